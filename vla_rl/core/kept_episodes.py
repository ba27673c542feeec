"""Episodes that are kept beyond their first use, whoever learns from them: the newest, up to a number or a size.

A kind of episode is a dataclass: of arrays along time, records (arrays along time, by name) and numbers. So one file
format serves all kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from zipfile import BadZipFile

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.postponed import write
from vla_rl.core.records import Array

Kept = TypeVar("Kept")
BORDER = ".border"  # after a name: where its array is cut into episodes
_MORE = "more."  # before the names of what is not of episodes
_FORMAT, _VERSION = "format", 1


def _one(_: Any) -> int:
    return 1


class KeptEpisodes(Generic[Kept]):
    """The newest episodes; the last one is kept, however large it is."""

    def __init__(self, kind: type[Kept], capacity: float, size: Callable[[Kept], int] = _one) -> None:
        """``capacity``: of the sizes of all that is kept, by default a number of episodes."""
        self._kind, self._capacity, self._size = kind, capacity, size
        self.episodes: tuple[Kept, ...] = ()  # the oldest first
        self.taken = 0  # of the capacity
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self.episodes)

    def add(self, episodes: Sequence[Kept]) -> int:
        """Keep these, and forget the oldest ones that have no room. Returns how many were forgotten."""
        kept = (*self.episodes, *episodes)
        self.taken += sum(map(self._size, episodes))
        leaving = 0
        while self.taken > self._capacity and leaving < len(kept) - 1:
            self.taken -= self._size(kept[leaving])
            leaving += 1
        self.episodes = kept[leaving:]
        self.forgotten += leaving
        return leaving

    def column(self, name: str) -> Array:
        """All episodes' arrays, one after the other. Raises ValueError if there are no episodes."""
        return np.concatenate([getattr(episode, name) for episode in self.episodes])

    def lengths(self, name: str) -> Array:
        """int64 [episodes], of these arrays."""
        return np.array([len(getattr(episode, name)) for episode in self.episodes], np.int64)

    def save(self, path: Path, **more: Array) -> None:
        """Write all to an .npz file, now or later (``postponed``), with ``more`` arrays; ``load`` reads it."""
        arrays: dict[str, Any] = {_MORE + name: array for name, array in more.items()}
        arrays |= {"forgotten": np.array(self.forgotten), _FORMAT: np.array(_VERSION)}
        write(path, partial(_write, path, self.episodes, arrays))  # whose own arrays never change

    def load(self, path: Path) -> dict[str, Array]:
        """Continue from ``save``; returns ``more``. Raises UserError if the file is missing, damaged, or older."""
        try:
            with np.load(path, allow_pickle=False) as file:
                data = dict(file)
            if data.get(_FORMAT, 0) != _VERSION:
                raise UserError(
                    f"{path} was written by another version of vla_rl: resume with that one, or begin a new run from "
                    "this one's policy (policy.checkpoint=RUN/checkpoints/ITERATION/policy)"
                )
            forgotten, episodes = int(data["forgotten"]), [self._kind(**row) for row in _rows(self._kind, data)]
        except (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile) as error:
            raise UserError(
                f"{path} is missing or damaged ({error}); resume an earlier checkpoint: RUN@ITERATION"
            ) from error
        self.episodes, self.taken = (), 0
        self.add(episodes)
        self.forgotten = forgotten
        return {name.removeprefix(_MORE): array for name, array in data.items() if name.startswith(_MORE)}


def _write(path: Path, episodes: Sequence[Any], arrays: dict[str, Any]) -> None:
    rows = [_named(episode) for episode in episodes]
    for name in rows[0] if rows else ():
        parts = [row[name] for row in rows]
        if isinstance(parts[0], np.ndarray):
            borders = np.cumsum([len(part) for part in parts])[:-1]
            arrays |= {name: np.concatenate(parts), name + BORDER: borders}
        else:
            arrays[name] = np.array(parts)
    np.savez(path, **arrays)


def _named(episode: Any) -> dict[str, Any]:
    """Its arrays and numbers, those of records by "field.name"."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(episode)):
        value = getattr(episode, name)
        found |= {f"{name}.{n}": x for n, x in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def _rows(kind: type[Any], data: Mapping[str, Array]) -> list[dict[str, Any]]:
    """The fields of each episode of a file. Raises ValueError if there are more of some than of others."""
    columns: dict[str, list[Any]] = {}
    for name in (field.name for field in fields(kind)):
        if name in data:
            columns[name] = _parts(data, name)
            continue
        named = {n: _parts(data, n) for n in data if n.startswith(f"{name}.") and not n.endswith(BORDER)}
        records = zip(*named.values(), strict=True)
        columns[name] = [{n.removeprefix(f"{name}."): x for n, x in zip(named, r, strict=True)} for r in records]
    counts = {len(parts) for parts in columns.values() if parts}
    if len(counts) > 1:
        raise ValueError(f"it has {' and '.join(map(str, sorted(counts)))} episodes")
    return [{name: parts[i] if parts else {} for name, parts in columns.items()} for i in range(max(counts, default=0))]


def _parts(data: Mapping[str, Array], name: str) -> list[Any]:
    if name + BORDER in data:
        return np.split(data[name], data[name + BORDER])
    if data[name].ndim != 1:
        raise ValueError(f"{name} is not cut into episodes")
    return data[name].tolist()
