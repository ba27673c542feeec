"""Checkpoints of a run: folders that are complete or absent.

checkpoints/
    000040/
        policy/            the policy alone, for `vla-rl eval` and for another run's policy.checkpoint
        learner/           trained weights and the optimizer's moments, a part from every rank
        trajectories.npz   finished episodes that are still to be trained
        state.json         counters, versions, time spent
        files.json         all of these files, with their sizes and checksums
    after-000020/          later ones, which were set aside when the run was resumed at that iteration
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.core.files import measure_file, new_folder, replacing, write_json

_MANIFEST = "files.json"
_STATE = frozenset({"policy_version", "seconds", "store"})


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    @contextmanager
    def write(
        self, iteration: int, best: int | None = None, measured: Mapping[str, dict[str, int]] | None = None
    ) -> Iterator[Path]:
        """A folder to fill, as an absolute path; it becomes the newest checkpoint when the block ends without an error.

        Older checkpoints are then deleted, except that of the iteration ``best``. ``measured``: where the block puts
        the files that their writers have measured (``measure_file``); the others are read once more.
        """
        with replacing(self.folder / f"{iteration:06d}") as partial:
            partial.mkdir()
            yield partial.absolute()
            write_json(partial / _MANIFEST, measure_files(partial, measured or {}))
        for old in self.complete()[: -self._keep]:
            if int(old.name) != best:
                shutil.rmtree(old)

    def set_aside_after(self, iteration: int) -> None:
        """Move later checkpoints to ``after-ITERATION/``: the run continues from an earlier one."""
        if later := [path for path in self.complete() if int(path.name) > iteration]:
            aside = new_folder(self.folder, f"after-{iteration:06d}")
            for path in later:
                path.rename(aside / path.name)

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("[0-9]*") if p.is_dir())

    def of(self, iteration: int) -> Path:
        """Raises UserError if the iteration has no complete checkpoint."""
        path = self.folder / f"{iteration:06d}"
        if path not in self.complete():
            there = ", ".join(str(int(p.name)) for p in self.complete()) or "none"
            raise UserError(f"{self.folder}: no complete checkpoint of iteration {iteration}; there are: {there}")
        return path

    def newest_undamaged(self, say: Callable[[str], None] = print) -> Path:
        """The newest checkpoint whose files are as they were written. ``say``: called with what is passed over.

        Raises UserError if the run has none; it is about the newest.
        """
        newest, *older = [self.newest(), *reversed(self.complete()[:-1])]
        try:
            read_state(newest)
            return newest
        except UserError as error:
            for path in older:
                with contextlib.suppress(UserError):
                    read_state(path)
                    say(f"{newest} is passed over: {error}")
                    return path
            raise

    def newest(self) -> Path:
        """Raises UserError if the run has no checkpoint."""
        complete = self.complete()
        if not complete:
            raise UserError(f"{self.folder}: no complete checkpoint to continue from; start a new run instead")
        return complete[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises UserError if a file of the checkpoint is missing or damaged."""
    _verify(checkpoint)
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); resume an earlier checkpoint: RUN@ITERATION") from error
    missing = _STATE - state.keys() if isinstance(state, dict) else _STATE
    if missing:
        raise UserError(
            f"{path}: {', '.join(sorted(missing))} is missing, the file is damaged; resume an earlier checkpoint: "
            "RUN@ITERATION"
        )
    return state


def measure_files(folder: Path, known: Mapping[str, dict[str, int]] | None = None) -> dict[str, dict[str, int]]:
    """Size and checksum of every file; those of ``known`` are not read."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: (known or {}).get(name) or measure_file(path) for name, path in paths.items()}


def _verify(checkpoint: Path) -> None:
    path = checkpoint / _MANIFEST
    if not path.is_file():
        return  # of an earlier version
    try:
        written = {
            name: dict(content, bytes=content["bytes"]) for name, content in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); resume an earlier checkpoint: RUN@ITERATION") from error
    for name, content in written.items():
        if problem := _difference(checkpoint / name, content):
            raise UserError(f"{checkpoint / name} {problem}; resume an earlier checkpoint: RUN@ITERATION")


def _difference(path: Path, written: Mapping[str, int]) -> str | None:
    """What is wrong with a file that was ``written`` so; earlier versions had no checksums of large files."""
    if not path.is_file():
        return "is missing"
    if path.stat().st_size == written["bytes"] and written.items() <= measure_file(path).items():
        return None
    return "is damaged or truncated"
