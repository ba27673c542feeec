"""What readers of demonstrations return, whatever the format of the files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vla_rl.core.errors import UserError


class DemonstrationError(UserError):
    """Demonstrations cannot be used. The text names the file, the cause and the remedy."""


def no_demonstration(path: Path, known: Iterable[str], stated: Iterable[str]) -> DemonstrationError:
    """The error about a file of other tasks than the ``known`` ones."""
    return DemonstrationError(
        f"{path} holds no demonstration of the tasks {list(known)}: it holds {sorted(set(stated))}; "
        "choose the file of these tasks, or the tasks of this file"
    )


class Demonstration(NamedTuple):
    """One demonstration of T steps, in this project's conventions."""

    images: np.ndarray  # uint8 [T, V, H, W, 3], upright, seen before the action
    proprio: np.ndarray  # float32 [T, P]
    actions: np.ndarray  # float32 [T, A], as ``EnvSpec.actions`` declares them
    task: int


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Whole demonstrations, concatenated; demonstration d has the rows ``offsets[d]:offsets[d + 1]``."""

    images: np.ndarray  # uint8 [S, V, H, W, 3], upright, seen before the action
    proprio: np.ndarray  # float32 [S, P]
    actions: np.ndarray  # float32 [S, A], likewise
    task: np.ndarray  # int32 [S]
    offsets: np.ndarray  # int64 [D + 1]

    @property
    def num_demonstrations(self) -> int:
        return len(self.offsets) - 1

    def chunks(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Targets float32 [S, K, A] and mask bool [S, K]: the K = ``size`` actions that begin at each row.

        Beyond a demonstration's end the mask is false and its last action is repeated.
        """
        steps = np.arange(len(self.actions))[:, None] + np.arange(size)
        end = np.repeat(self.offsets[1:], np.diff(self.offsets))[:, None]
        return self.actions[np.minimum(steps, end - 1)], steps < end
