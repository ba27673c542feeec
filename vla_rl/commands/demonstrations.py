"""Collects demonstrations of the scripted expert in several processes."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
from rich.console import Console

from envs import EnvConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import new_folder
from vla_rl.core.parent import end_with_parent
from vla_rl.core.records import EnvSpec, EpisodeSpec
from vla_rl.observability.console import ProgressDisplay
from vla_rl.replay.schedule import training_episode

_DEMO_STREAM = 0x5EED  # added to the run's seed, so that demonstrations and training share no placement

_played: Synchronized[int]  # episodes done by all processes of the pool


def collect_demonstrations(config: RunConfig, spec: EnvSpec, console: Console) -> list[Path]:
    """Play ``sft.demo_episodes`` episodes with the expert in ``placement.env_workers`` processes.

    Returns the files, one per process, in a new folder below ``log.dir``. Failed episodes are not kept.
    """
    folder = new_folder(Path(config.log.dir), f"demos-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    episodes = [demonstration_episode(i, len(spec.instructions), config.seed) for i in range(config.sft.demo_episodes)]
    workers = min(config.placement.env_workers, len(episodes))
    paths = [folder / f"part{w}.hdf5" for w in range(workers)]
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    with (
        ProcessPoolExecutor(workers, mp_context=context, initializer=_start_process, initargs=(counter,)) as pool,
        ProgressDisplay(console, "demonstrations", len(episodes)) as progress,
    ):
        jobs = [
            pool.submit(_collect, config.env, episodes[w::workers], path, config.sft.demo_noise)
            for w, path in enumerate(paths)
        ]
        pending = set(jobs)
        while pending:
            _, pending = wait(pending, timeout=0.5)
            progress.update(counter.value)
        written = sum(job.result() for job in jobs)
    console.print(f"{folder}: {written} of {len(episodes)} episodes succeeded and were kept", highlight=False)
    return paths


def demonstration_episode(number: int, num_tasks: int, seed: int) -> EpisodeSpec:
    """The ``number``-th demonstration. The simulator samples its placements, which training never uses."""
    draw = int(np.random.SeedSequence((seed, number, _DEMO_STREAM)).generate_state(1)[0])
    return replace(training_episode(number, number % num_tasks, seed), seed=draw)


def _start_process(counter: Synchronized[int]) -> None:
    global _played
    _played = counter
    end_with_parent()


def _collect(env_config: EnvConfig, episodes: list[EpisodeSpec], path: Path, noise: float) -> int:
    """Run in a process of the pool; returns the number of demonstrations written."""
    from envs import make_env
    from envs.base.demonstrations import CollectCounts, collect

    def count(_: CollectCounts) -> None:
        with _played.get_lock():
            _played.value += 1

    env = make_env(env_config, 1)
    try:
        return collect(env, episodes, path, noise=noise, progress=count).written
    finally:
        env.close()
