"""The folder of a benchmark evaluation, which continues where it was interrupted.

FOLDER/
    protocol.json    what decides the results; another protocol needs another folder
    episodes.jsonl   one line per finished episode, written as soon as it ends
    results.json     the results by suite and task
    results.md       the same as a page
    videos/SUITE/    episodes that were played again to be filmed, failures first
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import remove_partial, replacing, write_json
from vla_rl.observability.verdicts import SET_ASIDE

_KEYS = {"suite", "task", "trial", "success", "failure", "steps", "instruction"}  # what results are made of
_NEW_FOLDER = "name a new folder with --output, or move this one away"


class EvaluationFolder:
    """Only one process at a time writes it, and nothing before ``begin``."""

    def __init__(
        self, path: Path, lock: FileLock, rows: list[dict[str, Any]], protocol: Mapping[str, Any], *, is_new: bool
    ) -> None:
        self.path = path
        self.rows = rows
        self.has_begun = False
        self._lock, self._protocol, self._is_new = lock, protocol, is_new

    @classmethod
    def open(cls, path: Path, protocol: Mapping[str, Any]) -> Self:
        """Raises UserError if the folder is in use, damaged, or was begun with another protocol."""
        is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FileLock.acquire(path / "lock")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error})") from None
        if lock is None:
            raise UserError(f"{path} is in use by {(path / 'lock').read_text()}; wait for its end, or stop it")
        file, now = path / "protocol.json", json.loads(json.dumps(protocol))
        try:
            begun = _read_protocol(file) if file.is_file() else now
            if begun != now:
                named = sorted(name for name in {*begun, *now} if begun.get(name) != now.get(name))
                raise UserError(
                    f"{path} was begun with another protocol ({', '.join(named)} differ): "
                    "name a new folder with --output, or repeat the command with which it was begun"
                )
            return cls(path, lock, _read_rows(path / "episodes.jsonl"), now, is_new=is_new)
        except BaseException:
            lock.release()
            raise

    def begin(self) -> None:
        """Episodes are played now. Those that were set aside, and a line that a crash has cut off, leave the file."""
        if self.has_begun:
            return
        self.has_begun = True
        remove_partial(self.path)
        write_json(self.path / "protocol.json", self._protocol)
        with replacing(self.path / "episodes.jsonl") as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a finished episode."""
        self.rows.append(dict(row))
        with (self.path / "episodes.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, suite: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["suite"] == suite]

    def played(self, suite: str) -> set[tuple[int, int]]:
        """Task and trial of the suite's finished episodes."""
        return {(row["task"], row["trial"]) for row in self.of(suite)}

    def filmed(self, suite: str, task: int, trial: int) -> bool:
        return any(self._films(suite).glob(f"{_name(task, trial)}-*.mp4"))

    def video(self, suite: str, task: int, trial: int, outcome: str) -> Path:
        """Where the film of an episode goes; its folder is made."""
        folder = self._films(suite)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{_name(task, trial)}-{outcome}.mp4"

    def _films(self, suite: str) -> Path:
        return self.path / "videos" / suite.strip("/").replace("/", "-")

    def videos(self) -> Sequence[Path]:
        return sorted((self.path / "videos").rglob("*.mp4"))

    def close(self) -> None:
        """A new folder in which nothing has begun is removed."""
        self._lock.release()
        if self._is_new and not self.has_begun:
            with suppress(OSError):  # another command has come
                self.path.rmdir()


def _read_protocol(file: Path) -> dict[str, Any]:
    try:
        begun = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): {_NEW_FOLDER}") from None
    if not isinstance(begun, dict):
        raise UserError(f"{file} is damaged (it is no mapping): {_NEW_FOLDER}")
    return begun


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """All finished episodes, without a last line that a crash has cut off, and without those that were set aside: they
    are played again."""
    if not file.is_file():
        return []
    rows = []
    for number, line in enumerate(file.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            missing = _KEYS - row.keys()
        except (ValueError, AttributeError):
            missing = _KEYS
        if missing:
            raise UserError(f"{file} is damaged: line {number} is no finished episode; remove the line")
        if row["failure"] != SET_ASIDE:
            rows.append(row)
    return rows


def _name(task: int, trial: int) -> str:
    return f"task{task:02d}-trial{trial:02d}"
