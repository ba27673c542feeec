"""One contestant of `vla-rl benchmark simulator libero`, in a process of its own.

    python -m envs.libero.benchmark_worker NAME SETUP

reads one request per line on stdin and writes one answer per line on stdout, as JSON. NAME is ``vla_rl`` (ours),
``hf-libero`` (the package's own environment, unchanged) or ``lerobot`` (LeRobot's, if it is installed). All three play
the same actions from the same initial states.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol
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


class Contestant(Protocol):
    """``reset`` includes the settling steps. Both ``reset`` and ``step`` end with an observation."""

    def reset(self, task: int, init_state: int) -> None: ...

    def step(self, actions: np.ndarray) -> None:
        """Execute a chunk, float64 [K, 7] in robosuite's convention, and observe the result."""

    def step_blind(self, actions: np.ndarray) -> bool:
        """The same without any image; returns False if the contestant cannot do that."""

    def state(self) -> np.ndarray:
        """float64: time, positions, velocities."""

    def add_env(self, number: int) -> None:
        """Start one more environment, the ``number``-th (from 1), and observe it."""


class Ours:
    """This project's environment; env 0 is played."""

    def __init__(self, setup: Setup) -> None:
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

    def reset(self, task: int, init_state: int) -> None:
        self._reset(0, task, init_state)

    def _reset(self, env_id: int, task: int, init_state: int) -> None:
        from vla_rl.core.records import EpisodeSpec

        episode = EpisodeSpec(id=env_id, task=self._tasks.index(task), seed=_SEED, init_state=init_state)
        self._env.reset([env_id], [episode])
        self._env.observe([env_id], self._view)

    def step(self, actions: np.ndarray) -> None:
        self.step_blind(actions)
        self._env.observe([0], self._view)

    def step_blind(self, actions: np.ndarray) -> bool:
        convention = actions.astype(np.float32)[None]
        convention[..., 6] = (1 - convention[..., 6]) / 2  # 0 closed, 1 open
        self._env.step([0], convention)
        return True

    def state(self) -> np.ndarray:
        return self._env.demo_state(0)["states"]

    def add_env(self, number: int) -> None:
        self._reset(number, self._tasks[0], number)

    def bare_substeps(self, count: int) -> list[float]:
        """Seconds that MuJoCo's own step function takes for the substeps of a control step, ``count`` times."""
        import mujoco

        from envs.libero.fast.stepping import SUBSTEPS

        played = self._env.instance(0)
        model, now = played.scene.model.model, played.state.data
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:], data.ctrl[:] = now.qpos, now.qvel, now.ctrl
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            for _ in range(SUBSTEPS):
                mujoco.mj_step(model, data)
            seconds.append(time.perf_counter() - start)
        return seconds


class _Peer(ABC):
    """A contestant whose environments play one task each, and one episode at a time."""

    def __init__(self, setup: Setup) -> None:
        from envs.libero.protocol.tasks import suite_tasks

        self._setup = setup
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

    def reset(self, task: int, init_state: int) -> None:
        if task != self._task:
            self._env.close()
            self._env, self._task = self._build(task), task
        self._start(self._env, task, init_state)

    def step(self, actions: np.ndarray) -> None:
        for action in actions:
            self._env.step(action)

    def add_env(self, number: int) -> None:
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

    def step_blind(self, actions: np.ndarray) -> bool:
        from libero.libero.envs.env_wrapper import ControlEnv

        if self._blind is None:
            file = str(self._tasks[self._task].bddl_file)
            self._blind = ControlEnv(file, use_camera_obs=False, has_renderer=False, has_offscreen_renderer=False)
            self._start(self._blind, self._task, 0)
        for action in actions:
            self._blind.step(action)
        return True

    def state(self) -> np.ndarray:
        return self._env.get_sim_state()


class LeRobot(_Peer):
    """``lerobot.envs.libero.LiberoEnv``, unchanged. It always renders both cameras."""

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
        )

    def _start(self, env: Any, task: int, init_state: int) -> None:
        env.init_state_id = init_state
        np.random.seed(_SEED)
        env.reset(seed=_SEED)

    def step_blind(self, actions: np.ndarray) -> bool:
        return False

    def state(self) -> np.ndarray:
        return self._env._env.get_sim_state()


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


CONTESTANTS: dict[str, Callable[[Setup], Contestant]] = {"vla_rl": Ours, "hf-libero": HfLibero, "lerobot": LeRobot}


def random_actions(seed: int, steps: int) -> np.ndarray:
    """float64 [steps, 7] in robosuite's convention, exact in float32; around the start, so that no episode ends."""
    actions = np.random.default_rng(seed).uniform(-0.5, 0.5, (steps, 7)).astype(np.float32).astype(np.float64)
    actions[:, 6] = -1.0
    return actions


class Server:
    """Answers requests about one contestant."""

    def __init__(self, contestant: Contestant, setup: Setup) -> None:
        self._contestant, self._setup = contestant, setup

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer ``{"do": NAME, ...}`` with measurements; seconds are wall time."""
        return getattr(self, f"_{request.pop('do')}")(**request)

    def _chunks(self, count: int, seed: int, blind: bool) -> dict[str, Any]:
        """Seconds of each of ``count`` chunks; none if the contestant cannot step blind."""
        size = self._setup.chunk_size
        actions = random_actions(seed, count * size).reshape(count, size, 7)
        step = self._contestant.step_blind if blind else self._contestant.step
        seconds = []
        for chunk in actions:
            start = time.perf_counter()
            if step(chunk) is False:
                return {"seconds": []}
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def _reset(self, other: bool, init_state: int) -> dict[str, Any]:
        """Seconds until the first observation of an episode, of the task or of the other task."""
        start = time.perf_counter()
        self._contestant.reset(self._setup.other_task if other else self._setup.task, init_state)
        return {"seconds": [time.perf_counter() - start]}

    def _state(self) -> dict[str, Any]:
        return {"state": [float(x) for x in self._contestant.state()]}

    def _bare(self, count: int) -> dict[str, Any]:
        """Seconds of a control step's bare substeps, ``count`` times: the lower bound of every step."""
        return {"seconds": self._contestant.bare_substeps(count) if isinstance(self._contestant, Ours) else []}

    def _memory(self) -> dict[str, Any]:
        """Resident memory of this process with one environment, and what each further one adds, in bytes."""
        import psutil

        process = psutil.Process()
        alone = process.memory_info().rss
        for number in range(1, 1 + _EXTRA_ENVS):
            self._contestant.add_env(number)
        return {"process": alone, "env": (process.memory_info().rss - alone) / _EXTRA_ENVS}


def main() -> None:
    """See the module."""
    from envs.libero.bootstrap import import_libero

    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that libraries print may mix with the answers
    name, setup = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # all contestants on the same core, one after another
    assets = import_libero()
    server = Server(CONTESTANTS[name](setup), setup)
    print(json.dumps({"ready": name, "assets": assets.origin}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
