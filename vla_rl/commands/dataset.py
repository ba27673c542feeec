"""The LeRobot data set to which a run adds its episodes (``log.dataset``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_rl.config.run_config import RunConfig
from vla_rl.core.records import EnvSpec


@contextmanager
def complete_dataset(config: RunConfig, spec: EnvSpec) -> Iterator[None]:
    """Add what processes have recorded to the data set when the block ends, whatever ends it.

    What a killed run has left is added first. Raises UserError if the data set has other observations.
    """
    if config.log.dataset is None:
        yield
        return
    from envs.base.lerobot_writer import add_pending, check_dataset

    root = Path(config.log.dataset)
    check_dataset(root, spec)
    add_pending(root, spec)
    try:
        yield
    finally:
        add_pending(root, spec)
