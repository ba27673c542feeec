"""What all peers share: the run that they repeat, the clock, and the line that they print."""

import argparse
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np
import psutil

from algos.ppo import PPOConfig
from envs import env_spec
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import CODE
from vla_rl.core.records import EnvSpec

# hf-libero, as the peer's users have it; this project's drop-in for it; this project's tabletop
Simulator = Literal["theirs", "ours", "tabletop"]
CONFIGS: dict[Simulator, str] = {"theirs": "libero_ppo", "ours": "libero_ppo", "tabletop": "tabletop"}
CHUNKS: dict[Simulator, int] = {"theirs": 480, "ours": 480, "tabletop": 192}  # of the config's episodes, on average
CLEANERS = "resource_tracker", "torch_shm_manager"  # processes that remove shared memory when others have ended
ENVIRONMENTS: dict[Simulator, int] = {"theirs": 1, "ours": 1, "tabletop": 8}  # of each process
PROCESSES = 2  # of environments
SAME = ("algo.value_warmup=0", "train.start_states=benchmark")  # in this project's run, since it is so in the others


@dataclass(frozen=True)
class Setting:
    """One measurement; environments get it in their processes, too."""

    simulator: Simulator
    seconds: float
    chunks: int  # that one update learns from
    per_process: int  # environments
    folder: Path  # a temporary one

    @property
    def played(self) -> Path:
        """One byte for each chunk that was played: its control steps."""
        return self.folder / "played"

    @cached_property
    def config(self) -> RunConfig:
        return load_config(CODE / "configs" / f"{CONFIGS[self.simulator]}.yaml", list(SAME))

    @cached_property
    def spec(self) -> EnvSpec:
        return env_spec(self.config.env)

    @property
    def libero(self) -> bool:
        return self.simulator != "tabletop"

    @property
    def environments(self) -> int:
        return PROCESSES * self.per_process

    @property
    def env(self) -> Any:
        """The simulator's own keys."""
        return self.config.env

    @property
    def algo(self) -> PPOConfig:
        return cast(PPOConfig, self.config.algo)

    @property
    def minibatch(self) -> int:
        return self.chunks // self.algo.minibatches

    def count(self, steps: int) -> None:
        """Note a chunk that some environment has played; ``steps`` of control, below 256."""
        with self.played.open("ab") as file:
            file.write(bytes([steps]))


class Clock:
    """Ends a training after ``seconds``, and prints what it learned from in them. The first update is the warm-up.

    Synchronous PPO learns from whatever was played since the last update: nothing else has to be counted. A peer that
    is asynchronous tells how many chunks it has learned from.
    """

    def __init__(self, setting: Setting, peer: str) -> None:
        self._setting, self._peer = setting, peer
        self._marks: list[tuple[float, int, int]] = []  # of updates: when, and how many chunks were played and learned

    def goes_on(self, learned: int | None = None) -> bool:
        """Call it after each update; ``learned``: chunks that all updates have learned from."""
        played = self._setting.played.stat().st_size
        self._marks.append((time.monotonic(), played, played if learned is None else learned))
        return len(self._marks) < 2 or self._marks[-1][0] - self._marks[0][0] < self._setting.seconds

    def end(self) -> NoReturn:
        """Print the result, and leave without waiting for processes that the library would take long to end."""
        first, last = self._marks[0], self._marks[-1]
        seconds, played, learned = np.subtract(last, first)
        chunks = int(min(played, learned))  # what lay in queues before is no gain
        steps = np.fromfile(self._setting.played, np.uint8)[first[1] : first[1] + chunks]
        line(self._peer, self._setting.simulator, len(self._marks) - 1, chunks, int(steps.sum()), seconds)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not any(name in " ".join(child.cmdline()) for name in CLEANERS):
                    child.kill()
        shutil.rmtree(self._setting.folder)
        os._exit(0)


def line(peer: str, simulator: str, updates: int, chunks: int, steps: int, seconds: float) -> None:
    """Print the result. ``steps``: control steps that the learner has consumed."""
    release = None if peer == "vla_rl" else version(peer)
    counted = {"updates": updates, "chunks": chunks, "steps": steps, "seconds": round(seconds, 3)}
    rate = {"steps_per_s": round(steps / seconds, 3)}
    print(json.dumps({"peer": peer, "release": release, "simulator": simulator} | counted | rate), flush=True)


def read_setting(arguments: list[str] | None = None) -> Setting:
    """From the command line."""
    parser = argparse.ArgumentParser(description="Trains for some seconds, and prints how fast it was.")
    parser.add_argument("--simulator", choices=CONFIGS, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="after the first update, which is the warm-up")
    parser.add_argument("--chunks", type=int, help="that an update learns from (default: as many as ours has)")
    parser.add_argument("--environments", type=int, help="of each process, for peers that know several in one")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="vla_rl-peer-"))
    chunks = given.chunks or CHUNKS[given.simulator]
    environments = given.environments or ENVIRONMENTS[given.simulator]
    return Setting(given.simulator, given.seconds, chunks, environments, folder)
