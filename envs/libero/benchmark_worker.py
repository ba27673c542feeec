"""One contestant of `vla-rl benchmark simulator libero`, in a process of its own.

    python -m envs.libero.benchmark_worker NAME SETUP

reads requests on stdin, ``[METHOD, ARGUMENTS]``, and writes one answer each on stdout; both are lines of JSON. NAME is
``vla_rl`` (ours), ``hf-libero`` (the package's own environment, unchanged), ``lerobot`` (LeRobot's, if installed), or
``lerobot, soft resets`` (the same with an option of newer releases). All play the same actions from the same initial
states.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np

from envs.libero.protocol.conventions import NO_OP

CAMERAS = ("agentview", "robot0_eye_in_hand")
_SEED, _SETTLE = 0, 10
_EXTRA_ENVS = 2  # whose memory is measured


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contestant plays."""

    suite: str
    task: int
    other_task: int
    cameras: int  # 1: the scene's, 2: also the wrist's
    image_size: int
    chunk_size: int


class Contestant(ABC):
    """A simulator, and the requests that its process answers. Seconds are wall time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def time_chunks(self, count: int, seed: int, blind: bool) -> list[float]:
        """Seconds of each of ``count`` chunks; empty if the contestant cannot step blind."""
        size = self._setup.chunk_size
        step = self._step_blind if blind else self._step
        seconds = []
        for chunk in random_actions(seed, count * size).reshape(count, size, 7):
            start = time.perf_counter()
            if step(chunk) is False:
                return []
            seconds.append(time.perf_counter() - start)
        return seconds

    def time_reset(self, other: bool, init_state: int) -> list[float]:
        """Seconds until the first observation of an episode, of the task or of the other task."""
        start = time.perf_counter()
        self._reset(self._setup.other_task if other else self._setup.task, init_state)
        return [time.perf_counter() - start]

    def time_bare_substeps(self) -> list[float]:
        """Seconds of the substeps of a control step without anything around them; ours only."""
        return []

    def memory(self) -> dict[str, float]:
        """Resident memory of this process with one environment, and what each further one adds, in bytes."""
        import psutil

        process = psutil.Process()
        alone = process.memory_info().rss
        for number in range(1, 1 + _EXTRA_ENVS):
            self._add_env(number)
        return {"process": alone, "env": (process.memory_info().rss - alone) / _EXTRA_ENVS}

    @abstractmethod
    def state(self) -> list[float]:
        """Time, positions, velocities."""

    @abstractmethod
    def _reset(self, task: int, init_state: int) -> None:
        """Start an episode, settling steps included, and observe it."""

    @abstractmethod
    def _step(self, actions: np.ndarray) -> None:
        """Execute a chunk, float64 [K, 7] in robosuite's convention, and observe the result."""

    @abstractmethod
    def _step_blind(self, actions: np.ndarray) -> bool:
        """The same without any image; returns False if the contestant cannot do that."""

    @abstractmethod
    def _add_env(self, number: int) -> None:
        """Start one more environment, the ``number``-th (from 1), and observe it."""


class Ours(Contestant):
    """This project's environment; env 0 is played."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from envs.base import empty_observation
        from envs.libero.config import LiberoConfig
        from envs.libero.env import LiberoVectorEnv

        config = LiberoConfig(
            suite=setup.suite,  # type: ignore[arg-type]
            tasks=(setup.task, setup.other_task),
            image_size=setup.image_size,
            wrist_camera=setup.cameras == 2,
        )
        self._tasks = config.tasks
        self._env = LiberoVectorEnv(config, 1 + _EXTRA_ENVS)
        self._view = empty_observation(self._env.spec, 1 + _EXTRA_ENVS)

    def _reset(self, task: int, init_state: int) -> None:
        self._start(0, task, init_state)

    def _start(self, env_id: int, task: int, init_state: int) -> None:
        from vla_rl.core.records import EpisodeSpec

        episode = EpisodeSpec(id=env_id, task=self._tasks.index(task), seed=_SEED, init_state=init_state)
        self._env.reset([env_id], [episode])
        self._env.observe([env_id], self._view)

    def _step(self, actions: np.ndarray) -> None:
        self._step_blind(actions)
        self._env.observe([0], self._view)

    def _step_blind(self, actions: np.ndarray) -> bool:
        convention = actions.astype(np.float32)[None]
        convention[..., 6] = (1 - convention[..., 6]) / 2  # 0 closed, 1 open
        self._env.step([0], convention)
        return True

    def state(self) -> list[float]:
        return self._env.demo_state(0)["states"].tolist()

    def _add_env(self, number: int) -> None:
        self._start(number, self._tasks[0], number)

    def time_bare_substeps(self) -> list[float]:
        return [self._env.bare_seconds(0)["simulate"]]


class _Peer(Contestant):
    """A contestant whose environments play one task each, and one episode at a time."""

    def __init__(self, setup: Setup) -> None:
        from envs.libero.protocol.tasks import suite_tasks

        super().__init__(setup)
        self._tasks = suite_tasks(setup.suite)
        self._task = setup.task
        self._env = self._build(setup.task)
        self._others: list[Any] = []

    @abstractmethod
    def _build(self, task: int) -> Any:
        """An environment of the task."""

    @abstractmethod
    def _start(self, env: Any, task: int, init_state: int) -> None:
        """Start an episode, settling steps included."""

    def _reset(self, task: int, init_state: int) -> None:
        if task != self._task:
            self._env.close()
            self._env, self._task = self._build(task), task
        self._start(self._env, task, init_state)

    def _step(self, actions: np.ndarray) -> None:
        for action in actions:
            self._env.step(action)

    def _add_env(self, number: int) -> None:
        self._others.append(self._build(self._setup.task))
        self._start(self._others[-1], self._setup.task, number)


class HfLibero(_Peer):
    """The package's ``OffScreenRenderEnv`` as its examples and the evaluation scripts of the OpenVLA papers use it."""

    _blind: Any = None

    def _build(self, task: int) -> Any:
        from libero.libero.envs.env_wrapper import OffScreenRenderEnv

        file, size = str(self._tasks[task].bddl_file), self._setup.image_size
        cameras = list(CAMERAS[: self._setup.cameras])
        return OffScreenRenderEnv(bddl_file_name=file, camera_names=cameras, camera_heights=size, camera_widths=size)

    def _start(self, env: Any, task: int, init_state: int) -> None:
        from envs.libero.protocol.tasks import load_init_states

        env.seed(_SEED)
        env.reset()
        env.set_init_state(load_init_states(self._tasks[task])[init_state])
        for _ in range(_SETTLE):
            env.step(NO_OP)

    def _step_blind(self, actions: np.ndarray) -> bool:
        from libero.libero.envs.env_wrapper import ControlEnv

        if self._blind is None:
            file = str(self._tasks[self._task].bddl_file)
            self._blind = ControlEnv(file, use_camera_obs=False, has_renderer=False, has_offscreen_renderer=False)
            self._start(self._blind, self._task, 0)
        for action in actions:
            self._blind.step(action)
        return True

    def state(self) -> list[float]:
        return self._env.get_sim_state().tolist()


class LeRobot(_Peer):
    """``lerobot.envs.libero.LiberoEnv``, unchanged. It always renders both cameras."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, setup: Setup) -> None:
        if find_spec("torchvision") is None:
            sys.meta_path.append(_Unused("torchvision"))
        super().__init__(setup)

    def _build(self, task: int) -> Any:
        from lerobot.envs.libero import LiberoEnv
        from libero.libero import benchmark

        setup = self._setup
        return LiberoEnv(
            benchmark.get_benchmark_dict()[setup.suite](),
            task,
            setup.suite,
            camera_name=",".join(f"{name}_image" for name in CAMERAS[: setup.cameras]),
            observation_width=setup.image_size,
            observation_height=setup.image_size,
            num_steps_wait=_SETTLE,
            **self.options,
        )

    def _start(self, env: Any, task: int, init_state: int) -> None:
        env.init_state_id = init_state
        np.random.seed(_SEED)
        env.reset(seed=_SEED)

    def _step_blind(self, actions: np.ndarray) -> bool:
        return False

    def state(self) -> list[float]:
        return self._env._env.get_sim_state().tolist()


class LeRobotSoft(LeRobot):
    """With resets that keep the model and the renderer."""

    options: ClassVar[dict[str, Any]] = {"hard_reset": False}


class _Unused(MetaPathFinder, Loader):
    """Pretends that a package is installed. LeRobot imports torchvision, but its environments do not use it, and some
    machines cannot install it together with torch's build for the CPU."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == self._package else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__name__, module.__path__, module.__spec__, module.__version__ = spec.name, [], spec, "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


CONTESTANTS: dict[str, type[Contestant]] = {
    "vla_rl": Ours,
    "hf-libero": HfLibero,
    "lerobot": LeRobot,
    "lerobot, soft resets": LeRobotSoft,
}
_SOFT_RESETS_SINCE = (0, 6)  # release of LeRobot


def contestants_here() -> list[str]:
    """Names of those that are installed."""
    names = ["vla_rl", "hf-libero"]
    if find_spec("lerobot") is not None:
        names.append("lerobot")
        if tuple(map(int, version("lerobot").split(".")[:2])) >= _SOFT_RESETS_SINCE:
            names.append("lerobot, soft resets")
    return names


def random_actions(seed: int, steps: int) -> np.ndarray:
    """float64 [steps, 7] in robosuite's convention, exact in float32; around the start, so that no episode ends."""
    actions = np.random.default_rng(seed).uniform(-0.5, 0.5, (steps, 7)).astype(np.float32).astype(np.float64)
    actions[:, 6] = -1.0
    return actions


def main() -> None:
    """See the module."""
    from envs.libero.bootstrap import import_libero

    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that libraries print may mix with the answers
    name, setup = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # all contestants on the same core, one after another
    assets = import_libero()
    contestant = CONTESTANTS[name](setup)
    print(json.dumps(assets.origin), file=answers, flush=True)
    for line in sys.stdin:
        method, values = json.loads(line)
        print(json.dumps(getattr(contestant, method)(**values)), file=answers, flush=True)


if __name__ == "__main__":
    main()
