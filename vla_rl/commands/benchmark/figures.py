"""One figure of the speed of a source tree, for `vla-rl benchmark regress`: the tree on PYTHONPATH is measured.

    PYTHONPATH=TREE python .../figures.py NAME

prints one number, smaller is faster. This file is run for old trees, too, so it uses what has been there for long.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_TREE = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]) if __name__ == "__main__" else Path()
_CONFIG = "configs/libero_ppo.yaml"
_CHUNKS, _BATCHES = 30, 12


def chunk() -> float:
    """Milliseconds of processor time for a chunk that a short default run trains."""
    run = ["train.iterations=4", "train.batch_episodes=8", "train.eval_episodes=0", "log.video=false"]
    with tempfile.TemporaryDirectory() as folder:
        _train(_CONFIG, *run, f"log.dir={folder}", "log.name=run")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    measured = [m for m in lines if m["iteration"] > 1]  # queues are empty in the first one
    return 1e3 * sum(m["time/iteration_cpu_s"] for m in measured) / sum(m["rollout/chunks"] for m in measured)


def observe() -> float:
    """Milliseconds of processor time for an observation of LIBERO, while the robot moves."""
    import numpy as np

    from envs import make_env
    from envs.base import empty_observation
    from vla_rl.core.records import EpisodeSpec

    env, rng = make_env(_config().env, 1), np.random.default_rng(0)
    view = empty_observation(env.spec, 1)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0, init_state=0)])
    found = []
    for _ in range(_CHUNKS):
        env.step([0], rng.uniform(-0.5, 0.5, (1, 4, env.spec.action_dim)).astype(np.float32))
        found.append(_processor_time(lambda: env.observe([0], view)))
    env.close()
    return 1e3 * median(found)


def act() -> float:
    """Milliseconds of processor time to choose a chunk, in full batches."""
    import torch

    config, policy, rows = _config(), _policy(), _config().placement.max_batch
    draws = {"uniforms": torch.rand(rows, config.policy.chunk_size, policy.architecture.action_dim)}
    inputs, greedy = _inputs(rows), torch.zeros(rows, dtype=torch.bool)
    policy.eval()
    return 1e3 / rows * _median(lambda: policy.act(inputs, draws, greedy, 0.2))


def update() -> float:
    """Milliseconds of processor time for a chunk of a micro-batch, forward and backward."""
    import torch

    config, policy, rows = _config(), _policy(), _config().learner.micro_batch
    size = rows, config.policy.chunk_size, policy.architecture.action_dim
    inputs, record = _inputs(rows), {"tokens": torch.randint(0, 256, size, dtype=torch.uint8)}
    policy.train()

    def learn() -> None:
        output = policy(inputs, record, 0.2, True)
        (output.logprobs.exp().mean() + output.values.square().mean()).backward()

    return 1e3 / rows * _median(learn)


def start() -> float:
    """Seconds from the command to the first evaluated episode, on the tabletop."""
    run = ["train.iterations=1", "train.batch_episodes=4", "train.eval_episodes=1", "train.eval_sampled=false"]
    begun, seen = time.monotonic(), 0.0

    def look(line: str) -> None:
        nonlocal seen
        if "greedy success" in line and not seen:
            seen = time.monotonic() - begun

    with tempfile.TemporaryDirectory() as folder:
        _train("configs/tabletop.yaml", *run, "log.video=false", f"log.dir={folder}", "log.name=run", look=look)
    return seen


def first_step() -> float:
    """Seconds from the command to the first control step of a default run, on LIBERO, by its trace."""
    run = ["train.iterations=1", "train.batch_episodes=4", "train.eval_episodes=0", "log.video=false", "log.trace=true"]
    begun, steps = time.time_ns(), []
    with tempfile.TemporaryDirectory() as folder:
        _train(_CONFIG, *run, f"log.dir={folder}", "log.name=run")
        for file in Path(folder, "run", "trace").glob("*.jsonl"):
            for record in map(json.loads, file.read_text().splitlines()):
                if isinstance(record, dict):
                    epoch = record["epoch_ns"]
                elif record[0] == "simulate":
                    steps.append(epoch + record[1])
    return (min(steps) - begun) / 1e9


FIGURES: dict[str, Callable[[], float]] = {f.__name__: f for f in (chunk, observe, act, update, start, first_step)}


def _config() -> Any:
    from vla_rl.config.loading import load_config

    return load_config(_TREE / _CONFIG, [f"policy.checkpoint={_TREE}/checkpoints/libero_spatial_task0"])


def _policy() -> Any:
    import torch

    from envs import env_spec
    from vla_rl.policies.build import build_policy

    torch.set_num_threads(1)
    config = _config()
    return build_policy(config.policy, env_spec(config.env), 0)


def _inputs(rows: int) -> Any:
    import torch

    from vla_rl.policies.base.policy import PolicyInput

    images = torch.randint(0, 256, (rows, 1, 96, 96, 3), dtype=torch.uint8)
    return PolicyInput(images, torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows))


def _median(work: Callable[[], Any]) -> float:
    work()
    return median(_processor_time(work) for _ in range(_BATCHES))


def _processor_time(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _train(*arguments: str, look: Callable[[str], None] = lambda line: None) -> None:
    command = [sys.executable, "-m", "vla_rl.commands.cli", "train", *arguments]
    with subprocess.Popen(command, cwd=_TREE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            look(line)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed in {_TREE}")


if __name__ == "__main__":
    print(FIGURES[sys.argv[1]]())
