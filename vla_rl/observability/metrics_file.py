"""Reading the metrics of a run: one JSON record per line."""

import json
import os
from pathlib import Path

from vla_rl.core.errors import UserError


def read_records(file: Path) -> list[dict[str, float]]:
    """All records of a ``metrics.jsonl``, without a last line that a crash has cut off, and without metrics that were
    not finite. Raises UserError, which names the line, if another one is not a record, and FileNotFoundError."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} cannot be read as metrics: {error}") from error
    records = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        if line:
            records.append(_record(line, f"{file}:{number}"))
    return records


def _record(line: str | bytes, place: str) -> dict[str, float]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({str(error)[:80]}); remove this line to use the rest") from None
    if not isinstance(record, dict) or not _number(record.get("iteration")):
        raise UserError(f"{place} is not a record of metrics with an iteration; remove this line to use the rest")
    return {key: value for key, value in record.items() if _number(value)}


def _number(value: object) -> bool:
    return isinstance(value, (int, float))


class RecordTail:
    """The records of a ``metrics.jsonl`` as they come. The file may be missing still; a resume replaces it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = self._offset = self._lines = 0  # what was read: of which file, bytes, lines

    def read(self) -> list[dict[str, float]]:
        """The complete records since the last call, or all if the file is another one. Raises UserError."""
        try:
            with self._file.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._lines = status.st_ino, 0, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self._file} cannot be read as metrics: {error}") from error
        lines = content.split(b"\n")[:-1]
        first = self._lines + 1
        self._offset += sum(len(line) + 1 for line in lines)
        self._lines += len(lines)
        return [_record(line, f"{self._file}:{number}") for number, line in enumerate(lines, first) if line]
