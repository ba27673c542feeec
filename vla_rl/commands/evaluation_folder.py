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
from pathlib import Path
from typing import Any, Self

from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import remove_partial, replacing, write_json


class EvaluationFolder:
    """Only one process at a time writes it."""

    def __init__(self, path: Path, lock: FileLock, rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.rows = rows
        self._lock = lock

    @classmethod
    def open(cls, path: Path, protocol: Mapping[str, Any]) -> Self:
        """Begin or continue. Raises UserError if the folder is in use, or was begun with another protocol."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FileLock.acquire(path / "lock")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error})") from None
        if lock is None:
            raise UserError(f"{path} is in use by {(path / 'lock').read_text()}; wait for its end, or stop it")
        file, now = path / "protocol.json", json.loads(json.dumps(protocol))
        begun = json.loads(file.read_text()) if file.is_file() else now
        if begun != now:
            lock.release()
            named = sorted(name for name in {*begun, *now} if begun.get(name) != now.get(name))
            raise UserError(
                f"{path} was begun with another protocol ({', '.join(named)} differ): "
                "name a new folder with --output, or repeat the command with which it was begun"
            )
        remove_partial(path)
        write_json(file, now)
        rows = _read_rows(path / "episodes.jsonl")
        return cls(path, lock, rows)

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
        return any((self.path / "videos" / suite).glob(f"{_name(task, trial)}-*.mp4"))

    def video(self, suite: str, task: int, trial: int, outcome: str) -> Path:
        """Where the film of an episode goes; its folder is made."""
        folder = self.path / "videos" / suite
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{_name(task, trial)}-{outcome}.mp4"

    def videos(self) -> Sequence[Path]:
        return sorted((self.path / "videos").rglob("*.mp4"))

    def close(self) -> None:
        self._lock.release()


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """All finished episodes. A last line that a crash has cut off is removed from the file."""
    if not file.is_file():
        return []
    lines = file.read_text().split("\n")[:-1]
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): remove the lines that are not JSON") from None
    with replacing(file) as partial:
        partial.write_text("".join(line + "\n" for line in lines))
    return rows


def _name(task: int, trial: int) -> str:
    return f"task{task:02d}-trial{trial:02d}"
