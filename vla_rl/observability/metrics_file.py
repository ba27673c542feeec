"""Reading the metrics of a run: one JSON record per line."""

import json
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


def _record(line: str, place: str) -> dict[str, float]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({str(error)[:80]}); remove this line to use the rest") from None
    if not isinstance(record, dict) or not _number(record.get("iteration")):
        raise UserError(f"{place} is not a record of metrics with an iteration; remove this line to use the rest")
    return {key: value for key, value in record.items() if _number(value)}


def _number(value: object) -> bool:
    return isinstance(value, (int, float))
