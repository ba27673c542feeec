"""A short training run in a temporary folder: what benchmarks and `vla-rl profile` measure."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vla_rl.config.run_config import RunConfig
from vla_rl.observability.callbacks import Callback


@contextmanager
def short_run(config: RunConfig, iterations: int | None, callbacks: Sequence[Callback] = ()) -> Iterator[Path]:
    """Train without evaluations and loggers; the run's folder exists within the block.

    ``iterations``: None if a callback ends the run.
    Raises UserError if simulator or policy cannot be built, KeyboardInterrupt if the run was stopped early.
    """
    from vla_rl.commands.train import run_training
    from vla_rl.observability.plots import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        values = {
            "train.iterations": iterations or 10**6,
            "train.eval_episodes": 0,
            "train.checkpoint_every": 10**6,
            "train.max_minutes": None,
            "log.dir": folder,
            "log.name": "short_run",
            "log.tensorboard": False,
            "log.wandb": "off",
            "log.video": False,
            "log.dataset": None,
            "log.prometheus_port": None,
        }
        run_training(config.with_values(values), callbacks=callbacks, temporary=True)
        path = Path(folder) / "short_run"
        if read_metrics(path)[-1]["iteration"] < (iterations or 0):
            raise KeyboardInterrupt
        yield path
