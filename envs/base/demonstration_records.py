"""What readers of demonstrations are asked for and return, whatever the format of the files; one check of all."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from envs.base.config import DemosConfig
from envs.base.vector_env import resized
from vla_rl.core.actions import ActionSpace, Gripper
from vla_rl.core.errors import UserError

# What a camera's name, without what stands before it, says of it where it is not the name of a view.
_MAIN = ("image", "agentview", "agentview_rgb", "agentview_image", "rgb", "main", "camera", "image_0")
_WRIST = ("image2", "wrist_image", "wrist", "eye_in_hand_rgb", "eye_in_hand", "robot0_eye_in_hand_image", "hand")
_BEYOND = 0.1  # of a range: what lies further out of it is another unit
_MOST_BEYOND = 0.05  # share of the numbers in one dimension


class DemonstrationError(UserError):
    """Demonstrations cannot be used. The text names the file, the cause and the remedy."""


class Demonstration(NamedTuple):
    """One demonstration of T steps, in this project's conventions."""

    images: np.ndarray  # uint8 [T, V, H, W, 3], upright, seen before the action
    proprio: np.ndarray  # float32 [T, P]
    actions: np.ndarray  # float32 [T, A], as ``EnvSpec.actions`` declares them
    task: int
    state: np.ndarray | None = None  # float32 [T, S], ``VectorEnv.state`` before the action; None: it was not recorded


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a simulator needs of demonstrations."""

    tasks: Mapping[str, int]  # by instruction
    views: Sequence[str]
    image_size: int
    proprio: int  # P; 0: none
    actions: ActionSpace
    conventions: DemosConfig
    drop_noops: bool = False
    notes: list[str] = field(default_factory=list)  # what was decided or left out, for people
    rates: set[float] = field(default_factory=set)  # frames a second, of the files that say so

    def no_task(self, path: Path, stated: Iterable[str]) -> DemonstrationError:
        """The error about a file of other tasks."""
        return DemonstrationError(
            f"{path} holds no demonstration of the tasks {list(self.tasks)}: it holds {sorted(set(stated))}; "
            "choose the file of these tasks, or the tasks of this file"
        )

    def cameras(self, path: Path, names: Iterable[str]) -> list[str]:
        """The camera of each view: as ``demos.cameras`` says, else by name. Raises DemonstrationError."""
        there = {name.rpartition("/")[2].rpartition(".")[2]: name for name in names}
        chosen = []
        for number, view in enumerate(self.views):
            given = self.conventions.cameras.get(view)
            own = [name for name in (view, f"{view}_rgb", f"{view}_image") if name in there]
            known = [name for name in (_WRIST if number else _MAIN) if name in there]
            found = [given.rpartition("/")[2].rpartition(".")[2]] if given is not None else own or known
            if len(found) != 1 or found[0] not in there:
                raise DemonstrationError(
                    f"{path} has the cameras {sorted(there)}, and none or several of them may be the view {view}"
                    f"{'' if given is None else f' (demos.cameras says {given})'}: "
                    f"set demos.cameras={{{view}: NAME}}, or train without this view"
                )
            chosen.append(there[found[0]])
        self.note(f"{path.name}: " + ", ".join(f"view {v} is {c}" for v, c in zip(self.views, chosen, strict=True)))
        return chosen

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def frames(self, where: str, camera: str, images: np.ndarray) -> np.ndarray:
        """uint8 [T, S, S, 3] of one camera. Raises DemonstrationError."""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise DemonstrationError(
                f"{where}: {camera} holds {images.dtype} {list(images.shape)}: images must be uint8 [T, H, W, 3]; "
                "convert them"
            )
        return resized(images, self.image_size)

    def demonstration(
        self,
        where: str,
        images: Sequence[np.ndarray],
        proprio: np.ndarray,
        actions: np.ndarray,
        task: int,
        grippers: Mapping[int, Gripper],
    ) -> Demonstration:
        """Check one episode's arrays, of T steps each, and convert them. Raises DemonstrationError."""
        if actions.ndim != 2 or actions.shape[1] != len(self.actions):
            raise DemonstrationError(
                f"{where}: actions of shape {list(actions.shape)}, the environment's have {len(self.actions)} numbers "
                f"({', '.join(self.actions.names)}): the data come from another robot"
            )
        if proprio.shape != (len(actions), self.proprio):
            raise DemonstrationError(
                f"{where} has proprioception of shape {proprio.shape}, expected {(len(actions), self.proprio)}: "
                "it comes from another simulator, or set env.proprio=false"
            )
        lengths = {len(actions), *map(len, images)}
        if len(lengths) > 1:
            raise DemonstrationError(f"{where}: {len(actions)} actions and {len(images[0])} images: they must pair up")
        for name, values in (("action", actions), ("proprioception", proprio)):
            if not np.isfinite(values).all():
                step, number = np.argwhere(~np.isfinite(values))[0]
                raise DemonstrationError(
                    f"{where}: {name} number {number} of step {step} is {values[step, number]}: repair the data, or "
                    "leave the episode out"
                )
        taken = self.actions.from_data(actions, grippers)
        return Demonstration(np.stack(images, axis=1), proprio.astype(np.float32), taken, task)

    def grippers(self, path: Path, stated: str | None) -> dict[int, Gripper]:
        """The grippers of a file: as ``demos.gripper`` says, else as the file ``stated``, else as declared."""
        if self.conventions.gripper is not None:
            return self.actions.data_grippers(Gripper(*self.conventions.gripper))
        try:
            return self.actions.data_grippers() if stated is None else self.actions.grippers_of(stated)
        except ValueError as error:
            raise DemonstrationError(f"{path}: {error}: it comes from another environment") from None

    def check_grippers(self, path: Path, parts: Sequence[np.ndarray], grippers: Mapping[int, Gripper]) -> None:
        """Raises DemonstrationError if a file's actions [T, A] contradict what it takes grippers for."""
        for i, gripper in grippers.items():
            values = np.concatenate([part[:, i] for part in parts])
            ends = sorted((gripper.open, gripper.closed))
            low, high = values.min() + 0.0, values.max() + 0.0  # no -0
            near = _BEYOND * (ends[1] - ends[0])
            outside = low < ends[0] - near or high > ends[1] + near
            half = np.isclose([low, high], [sum(ends) / 2, ends[1]], rtol=0, atol=near).all()  # 0 to 1 for -1 to 1
            if outside or half:
                raise DemonstrationError(
                    f"{path}: {self.actions.names[i]} goes from {low:g} to {high:g}, so that it is no gripper with "
                    f"{gripper.open:g} = open and {gripper.closed:g} = closed: say what it is, "
                    f"demos.gripper=[{high:g},{low:g}] (OPEN, CLOSED) or demos.gripper=[{low:g},{high:g}]"
                )


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Whole demonstrations, concatenated; demonstration d has the rows ``offsets[d]:offsets[d + 1]``."""

    images: np.ndarray  # uint8 [S, V, H, W, 3], upright, seen before the action; mapped from a file
    proprio: np.ndarray  # float32 [S, P]
    actions: np.ndarray  # float32 [S, A], as ``EnvSpec.actions`` declares them
    task: np.ndarray  # int32 [S]
    offsets: np.ndarray  # int64 [D + 1]
    notes: tuple[str, ...] = ()  # what readers decided or left out
    rates: tuple[float, ...] = ()  # frames a second, of the files that say so
    state: np.ndarray | None = None  # float32 [S, ...], ``VectorEnv.state`` before the action; None unless all have it

    @property
    def num_demonstrations(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def gathered(cls, parts: Iterable[Demonstration], wanted: Wanted) -> Self:
        """Of single ones, of which one at a time is in memory.

        Images go to a file that ends with this process (below TMPDIR), and are read from there when they are used.
        Raises DemonstrationError for none, and if actions have another unit than the environment's.
        """
        small: list[Demonstration] = []
        with tempfile.TemporaryFile(prefix="vla_rl-demos-") as file:
            for part in parts:
                part.images.tofile(file)
                small.append(part._replace(images=part.images[:0].copy()))
            if not small:
                raise DemonstrationError("no demonstration files were given, or all of their episodes are empty")
            lengths = [len(part.actions) for part in small]
            shape = sum(lengths), *small[0].images.shape[1:]
            file.flush()
            images = np.memmap(file, np.uint8, "r", shape=shape)
        actions = np.concatenate([part.actions for part in small])
        _check_unit(actions, wanted.actions)
        return cls(
            images=images,
            proprio=np.concatenate([part.proprio for part in small]),
            actions=actions,
            task=np.repeat(np.array([part.task for part in small], np.int32), lengths),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            notes=tuple(wanted.notes),
            rates=tuple(sorted(wanted.rates)),
            state=_states(small),
        )

    def chunks(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Targets float32 [S, K, A] and mask bool [S, K]: the K = ``size`` actions that begin at each row.

        Beyond a demonstration's end the mask is false and its last action is repeated.
        """
        steps = np.arange(len(self.actions))[:, None] + np.arange(size)
        end = np.repeat(self.offsets[1:], np.diff(self.offsets))[:, None]
        return self.actions[np.minimum(steps, end - 1)], steps < end


def _states(parts: Sequence[Demonstration]) -> np.ndarray | None:
    states = [part.state for part in parts if part.state is not None]
    alike = len(states) == len(parts) and len({state.shape[1] for state in states}) == 1
    return np.concatenate(states) if alike else None


def _check_unit(actions: np.ndarray, space: ActionSpace) -> None:
    margin = _BEYOND * (space.high - space.low)
    beyond = ((actions < space.low - margin) | (actions > space.high + margin)).mean(axis=0)
    if (beyond > _MOST_BEYOND).any():
        i = int(beyond.argmax())
        dim, values = space.dims[i], actions[:, i]
        raise DemonstrationError(
            f"{beyond[i]:.0%} of the demonstrated numbers for {dim.name} lie beyond the environment's limits, "
            f"{dim.low:g} and {dim.high:g}: they go from {values.min():g} to {values.max():g}, in another unit. "
            "Convert the data, or widen the limits (env.action_limits of env.name=gymnasium)"
        )
