"""Messages of policy servers: msgpack, with numpy arrays as maps that say dtype, shape and bytes.

openpi's clients and vla-eval's harness mark these maps otherwise: the former with keys that are bytes, the latter with
text, and with images compressed. ``unpack`` reads both. What comes is a stranger's: no message can name code, and none
becomes much larger than its bytes: images, lists and maps have limits.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from vla_rl.core.records import Array

STATE, PROMPT, ACTIONS = "observation/state", "prompt", "actions"  # openpi's names for LIBERO
MAX_BYTES = 32 << 20  # of a message: two views of 2048 pixels
_MAX_PIXELS = 2048 * 2048  # of a compressed image
_MAX_PARTS = 1024  # lists and maps of a message, and entries of each: a byte would become an object of 64 bytes
_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")  # dtypes
_BROKEN_IMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class WireError(ValueError):
    """Bytes that are no message."""


def image_keys(views: Sequence[str]) -> list[str]:
    """One for each view: openpi's names for LIBERO's two, and those of the simulator for a third one and on."""
    names = ["image", "wrist_image", *views[2:]]
    return [f"observation/{name}" for name in names[: len(views)]]


def pack(message: Any, *, text_keys: bool = False) -> bytes:
    """A message of plain values and numpy arrays of numbers; ``text_keys``: as vla-eval marks arrays, else openpi."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} is not a part of a message")
        array = {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
        return array if text_keys else {name.encode(): part for name, part in array.items()}

    packed: bytes = msgpack.packb(message, default=plain)
    return packed


def unpack(data: bytes) -> Any:
    """What a message holds. Raises WireError, which says what is wrong with it."""
    parts = itertools.count(1)

    def counted(part: Any) -> Any:
        if next(parts) > _MAX_PARTS:
            raise ValueError(f"more than {_MAX_PARTS} lists and maps")
        return _decoded(part) if isinstance(part, dict) else part

    limits = {"max_array_len": _MAX_PARTS, "max_map_len": _MAX_PARTS}
    try:
        return msgpack.unpackb(data, object_hook=counted, list_hook=counted, ext_hook=_refuse, **limits)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        text = f"{type(error).__name__}: {error}"[:200]
        raise WireError(f"a message of {len(data)} bytes cannot be read as msgpack ({text})") from None


def _refuse(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} is not used here")


def _decoded(value: dict) -> Any:
    for mark, decode in _MARKS.items():
        if mark in value or mark.encode() in value:
            named = {key.decode() if isinstance(key, bytes) else key: part for key, part in value.items()}
            return decode(named)
    return value


def _array(value: Mapping[str, Any]) -> Array:
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if not isinstance(dtype, str) or not _NUMBERS.fullmatch(dtype):
        raise ValueError(f"dtype {str(dtype)[:40]!r} is not one of numbers")
    if not isinstance(data, bytes) or len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array needs bytes, and a shape of up to 8 whole numbers")
    if len(data) != (needed := math.prod(shape) * np.dtype(dtype).itemsize):
        raise ValueError(f"an array of {dtype} {list(shape)} needs {needed} bytes, not {len(data)}")
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def _number(value: Mapping[str, Any]) -> bool | int | float:
    number = value["data"]
    if not isinstance(number, (bool, int, float)):
        raise ValueError("a number of numpy holds no number")
    return number


def _image(value: Mapping[str, Any]) -> Array:
    if value["format"] == "raw":
        return _array(value)
    try:
        with Image.open(io.BytesIO(value["data"]), formats=("PNG", "JPEG")) as image:
            if math.prod(image.size) > _MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels are more than {_MAX_PIXELS}")
            return np.asarray(image)
    except _BROKEN_IMAGE as error:
        raise ValueError(f"an image cannot be read: {error}") from None


_MARKS = {"__ndarray__": _array, "__npgeneric__": _number, "__image__": _image}
