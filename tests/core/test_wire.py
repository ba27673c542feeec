"""Messages: openpi's own packing in both directions, and what is refused."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from openpi_client import msgpack_numpy
from PIL import Image

from vla_rl.core.wire import WireError, image_keys, pack, unpack

SENT = {
    "image": np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
    "state": np.linspace(0, 1, 8),
    "half": np.ones((2, 0), np.float16),
    "flags": np.array([True, False]),
    "prompt": "do it",
    "nested": {"numbers": [1, 2.5, None]},
}


@pytest.mark.parametrize("packed", [msgpack_numpy.packb(SENT), pack(SENT), pack(SENT, text_keys=True)])
def test_it_reads_what_openpi_and_vla_eval_send(packed: bytes) -> None:
    found = unpack(packed)
    assert found["nested"] == SENT["nested"]
    assert found["prompt"] == "do it"
    for name in ("image", "state", "half", "flags"):
        assert found[name].dtype == SENT[name].dtype
        assert np.array_equal(found[name], SENT[name])


def test_openpi_reads_what_it_sends() -> None:
    found = msgpack_numpy.unpackb(pack(SENT))
    assert np.array_equal(found["state"], SENT["state"])
    assert unpack(msgpack_numpy.packb({"one": np.float32(1.5)})) == {"one": 1.5}


def test_views_have_openpis_names() -> None:
    assert image_keys(["front"]) == ["observation/image"]
    assert image_keys(["a", "b", "c"]) == ["observation/image", "observation/wrist_image", "observation/c"]


def array(**parts: Any) -> bytes:
    return msgpack.packb({"__ndarray__": True, "data": b"12345678", "dtype": "<f8", "shape": [1]} | parts)


def png(width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.new("1", (width, height)).save(data, format="PNG")
    return msgpack.packb({"__image__": True, "format": "png", "data": data.getvalue()})


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (array(dtype="|O"), "not one of numbers"),
        (array(dtype="<c8"), "not one of numbers"),
        (array(dtype="i4,i4"), "not one of numbers"),
        (array(dtype=["<f8"]), "not one of numbers"),
        (array(shape=[2]), "needs 16 bytes, not 8"),
        (array(shape=[-1]), "whole numbers"),
        (array(shape=[1 << 62, 1 << 62]), "bytes, not 8"),
        (array(shape=[1] * 9), "up to 8"),
        (array(shape=3), "TypeError"),
        (array(data="12345678"), "needs bytes"),
        (msgpack.packb({"__ndarray__": True}), "KeyError"),
        (msgpack.packb({"__npgeneric__": True, "data": [1]}), "holds no number"),
        (msgpack.packb(msgpack.ExtType(1, b"")), "extension type 1"),
        (msgpack.packb({"__image__": True, "format": "png", "data": b"GIF89a"}), "an image cannot be read"),
        (png(3000, 3000), "3000x3000 pixels are more than"),
        (msgpack.packb([{}] * 1024), "more than 1024 lists and maps"),
        (msgpack.packb(list(range(1025))), "exceeds"),
        (b"\x91" * 100_000, "cannot be read"),
        (b"\xdd\xff\xff\xff\xff", "cannot be read"),
        (b"", "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(packed: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        unpack(packed)


def test_small_things_do_not_become_large() -> None:
    """A map takes one byte in a message, and 64 in Python."""
    many = b"\x91" * 300 + b"\xdc\x03\xe8" + (b"\xdc\x03\xe8" + b"\x80" * 1000) * 1000
    tracemalloc.start()
    with pytest.raises(WireError, match="more than 1024"):
        unpack(many)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
