"""What a relay and a gateway send each other: rows of their pools as raw bytes, by the layout that both know.

    relay ──ASK──▶ gateway       requests, and what the relay's workers do
    relay ──INQUIRE──▶ gateway   tickets of requests whose answer does not come
    relay ◀──ANSWER── gateway
    relay ◀──MISSING── gateway   tickets that the gateway does not know, so that they are asked again

A message has three frames: a header, the states of the relay's workers (int8 each), and records, which may be
compressed (lz4). All numbers are little-endian. Nothing is unpickled, and every frame is checked before it is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

import lz4.block
import numpy as np

from vla_rl.core.ipc.mailbox import WorkerState, answer_columns, request_columns
from vla_rl.core.records import Array


class Kind(IntEnum):
    ASK = 1
    INQUIRE = 2
    ANSWER = 3
    MISSING = 4


FROM_RELAY, FROM_GATEWAY = frozenset({Kind.ASK, Kind.INQUIRE}), frozenset({Kind.ANSWER, Kind.MISSING})

_MAGIC = 0x31524C56
_HEADER = np.dtype([("magic", "<u4"), ("kind", "<u4"), ("node", "<i8"), ("number", "<i8"), ("nbytes", "<i8")])
_PLAIN = -1  # in place of the size of compressed records
_OWN = ("row", "ticket", "held_ns")  # names of a record that are not those of a pool's array


class MessageError(ValueError):
    """Bytes that are no message of this run."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: what ``records`` are.
        node: of the relay, in both directions.
        number: of the last message with answers: that the gateway has sent, or that the relay has received.
        records: [n] of the dtype that ``Layout.dtypes`` has for the kind; ``row`` counts within the relay's pool.
        states: int8 [workers] of the relay, as ``WorkerState``; empty from a gateway.
    """

    kind: Kind
    node: int
    number: int
    records: Array
    states: Array = field(default_factory=lambda: np.empty(0, np.int8))


@dataclass(frozen=True, slots=True)
class Layout:
    """The record of each kind of message, as a structured dtype."""

    dtypes: Mapping[Kind, np.dtype]

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Self:
        """``arrays``: of a pool (``create_pool``); both sides have made theirs from the same EnvSpec and PolicySpec."""
        ticket: list = [("row", "<i4"), ("ticket", "<i8")]
        request, answer = (_fields(columns(arrays)) for columns in (request_columns, answer_columns))
        return cls(
            {
                Kind.ASK: np.dtype(ticket + request),
                Kind.INQUIRE: np.dtype(ticket),
                Kind.ANSWER: np.dtype([*ticket, ("held_ns", "<i8"), *answer]),  # held: from request to answer
                Kind.MISSING: np.dtype(ticket),
            }
        )

    def records(
        self, kind: Kind, rows: Array, tickets: Array, columns: Mapping[str, Array] | None = None, **more: Array
    ) -> Array:
        """Records of these rows. ``columns``: arrays of n rows each, by name."""
        records = np.empty(len(rows), self.dtypes[kind])
        for name, values in {"row": rows, "ticket": tickets, **(columns or {}), **more}.items():
            records[name] = values
        return records

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The pool's arrays that a record has."""
        names = self.dtypes[kind].names or ()
        return tuple(name for name in names if name not in _OWN)

    def most_bytes(self, rows: int) -> int:
        """Of the largest frame that a pool of so many rows can need."""
        return max(rows * max(dtype.itemsize for dtype in self.dtypes.values()), rows, _HEADER.itemsize)


def _fields(columns: Mapping[str, Array]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, array.dtype.newbyteorder("<").str, array.shape[1:]) for name, array in columns.items()]


def encode(message: Message, compress: bool = False) -> list[bytes | memoryview]:
    """The frames of a message."""
    records, nbytes = message.records.view(np.uint8).data, _PLAIN
    if compress and len(records):
        records, nbytes = lz4.block.compress(records, store_size=False), len(records)
    header = np.array([(_MAGIC, message.kind, message.node, message.number, nbytes)], _HEADER)
    return [header.tobytes(), message.states.tobytes(), records]


def decode(
    frames: Sequence[bytes], layout: Layout, kinds: frozenset[Kind], workers: Mapping[int, int], envs_per_worker: int
) -> Message:
    """The message that these frames are. ``workers``: of each node that may send or get it.

    Raises MessageError if the frames are none of ``kinds``, or name what there is not.
    """
    if len(frames) != 3 or len(frames[0]) != _HEADER.itemsize:
        raise MessageError("not the frames of a message")
    magic, kind, node, number, nbytes = np.frombuffer(frames[0], _HEADER)[0].tolist()
    if magic != _MAGIC or kind not in kinds or node not in workers:
        raise MessageError(f"kind {kind} of node {node}")
    states, dtype = np.frombuffer(frames[1], np.int8), layout.dtypes[Kind(kind)]
    if len(states) not in (0, workers[node]) or not np.isin(states, list(WorkerState)).all():
        raise MessageError(f"states of {len(states)} workers")
    plain = _decompress(frames[2], nbytes, workers[node] * envs_per_worker * dtype.itemsize)
    if len(plain) % dtype.itemsize:
        raise MessageError(f"{len(plain)} bytes are no records of {dtype.itemsize}")
    records = np.frombuffer(plain, dtype) if plain else np.empty(0, dtype)
    rows = records["row"]
    if len(rows) and (rows.min() < 0 or rows.max() >= workers[node] * envs_per_worker):
        raise MessageError(f"rows {rows.min()} to {rows.max()}")
    if len(np.unique(rows)) != len(rows):
        raise MessageError("a row twice")
    return Message(Kind(kind), node, number, records, states)


def _decompress(frame: bytes, nbytes: int, most: int) -> bytes:
    """``nbytes``: as the header says; ``most``: what all rows of a pool take."""
    if nbytes == _PLAIN:
        return frame
    if not 0 < nbytes <= most:
        raise MessageError(f"{nbytes} bytes of records")
    try:
        plain: bytes = lz4.block.decompress(frame, uncompressed_size=nbytes)
    except lz4.block.LZ4BlockError as error:
        raise MessageError(f"compressed records: {error}") from None
    return plain
