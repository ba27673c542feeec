"""The messages of vla-eval's harness, as its version 0.8.0 sends them; scripts/check_serving.sh runs the harness."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image
from websockets.sync.client import ClientConnection, connect

from tests.inference.serving.served import Dimmed, served
from tests.runtime_fakes import SIZE, SPEC, K
from vla_rl.core.wire import pack, unpack


@pytest.fixture
def policy() -> Dimmed:
    return Dimmed()


@pytest.fixture
def harness(tmp_path: Path, policy: Dimmed) -> Iterator[ClientConnection]:
    with (
        served(tmp_path, policy, replace(SPEC, views=("agentview", "robot0_eye_in_hand"))) as here,
        connect(f"{here.address}/vla-eval", compression=None) as connection,
    ):
        yield connection


def png(mark: int) -> dict[str, Any]:
    """An image as its codec sends it."""
    data = io.BytesIO()
    Image.fromarray(np.full((SIZE, SIZE, 3), mark, np.uint8)).save(data, format="PNG")
    return {"__image__": True, "format": "png", "data": data.getvalue(), "shape": [SIZE, SIZE, 3]}


def observation(mark: int, **parts: Any) -> dict[str, Any]:
    images = {"agentview": png(mark), "wrist": png(0)}
    return {"images": images, "states": np.zeros(3, np.float32), "task_description": "do it"} | parts


def tell(connection: ClientConnection, kind: str, payload: Any, number: int = 0) -> None:
    message = {"type": kind, "payload": payload, "seq": number, "timestamp": 0.0}
    connection.send(pack(message, text_keys=True))


def ask(connection: ClientConnection, kind: str, payload: Any, number: int = 0) -> dict[str, Any]:
    tell(connection, kind, payload, number)
    answer = unpack(connection.recv(10))
    assert set(answer) == {"type", "payload", "seq", "timestamp"}
    assert answer["seq"] == number
    return answer


def test_it_says_what_the_benchmark_should_send(harness: ClientConnection) -> None:
    answer = ask(harness, "hello", {"harness_version": "0.8.0", "protocol_version": 1}, 1)
    assert answer["type"] == "hello"
    assert answer["payload"]["observation_params"] == {"send_wrist_image": True, "send_state": True}


def test_a_chunk_is_executed_before_the_policy_is_asked_again(harness: ClientConnection, policy: Dimmed) -> None:
    tell(harness, "episode_start", {"task": {"name": "do it"}})
    first = [ask(harness, "observation", observation(51), i)["payload"]["actions"] for i in range(K)]
    assert all(np.allclose(action, [0.2] * 6 + [0.6]) for action in first)
    assert policy.batches == [1]
    assert ask(harness, "observation", observation(102))["payload"]["actions"][0] == pytest.approx(0.4)
    tell(harness, "episode_end", {})
    tell(harness, "episode_start", {})
    assert ask(harness, "observation", observation(0))["payload"]["actions"][0] == 0.0, (
        "nothing is left of the last one"
    )
    assert policy.batches == [1, 1, 1]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (observation(0, images={"agentview": png(0)}), "images/wrist: need a square image.*came nothing"),
        (observation(0, images=[1]), "images: need a map of images"),
        (observation(0, states=np.zeros(2)), r"states: need 3 finite numbers.*came float64 \[2\]"),
        (observation(0, task_description="fly"), "task_description: need an instruction"),
        (
            observation(0, images={"agentview": png(0) | {"data": b"no png"}, "wrist": png(0)}),
            "an image cannot be read",
        ),
        (None, "images: need a map of images"),
    ],
)
def test_a_bad_observation_is_an_error_and_no_more(harness: ClientConnection, payload: Any, said: str) -> None:
    answer = ask(harness, "observation", payload, 0)
    assert answer["type"] == "error"
    assert re.search(said, answer["payload"]["error"]), answer
    assert ask(harness, "observation", observation(51), 8)["type"] == "action"


def test_nonsense_is_an_error_and_no_more(harness: ClientConnection) -> None:
    for frame in ("text", b"\xc1", msgpack.packb({"type": "observation"}), msgpack.packb({"type": 1, "seq": 1})):
        harness.send(frame)
        assert unpack(harness.recv(10))["type"] == "error"
    assert "none of hello" in ask(harness, "sing", {})["payload"]["error"]
    assert ask(harness, "observation", observation(51), 8)["type"] == "action"
