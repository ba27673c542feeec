"""openpi's own client, and strangers, at a served policy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgpack
import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.inference.serving.served import Dimmed, Served, request, served
from tests.runtime_fakes import SIZE, SPEC, K
from vla_rl.core.records import ActionBatch
from vla_rl.core.wire import MAX_BYTES, pack, unpack


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("rows"), Dimmed()) as found:
        yield found


@contextmanager
def client_of(here: Served, **options: Any) -> Iterator[WebsocketClientPolicy]:
    """openpi's client, which has no way to close its connection."""
    client = WebsocketClientPolicy(here.address, **options)
    yield client
    client._ws.close()


def still_serves(here: Served, **options: Any) -> None:
    with client_of(here, **options) as client:
        assert client.infer(request(51))["actions"][0, 0] == pytest.approx(0.2)


def test_actions_are_those_of_the_simulators_data_sets(here: Served) -> None:
    with client_of(here) as client:
        told, answer = client.get_server_metadata(), client.infer(request(51))
    assert (told["chunk_size"], told["state_dim"], told["images"]) == (K, 3, {"observation/image": "main"})
    assert answer["actions"].shape == (K, 7)
    assert np.allclose(answer["actions"][:, :6], 0.2)
    assert np.allclose(answer["actions"][:, 6], 0.6), "robosuite's gripper: -1 open, 1 closed; 0.2 of open here"
    assert answer["server_timing"]["infer_ms"] > 0


def test_images_of_another_size_are_resized_and_case_does_not_matter(here: Served) -> None:
    seen = request() | {"observation/image": np.full((224, 224, 3), 255, np.uint8), "prompt": "Do  It"}
    with client_of(here) as client:
        assert client.infer(seen)["actions"][0, 0] == 1.0


def test_concurrent_clients_share_forward_passes(tmp_path: Path) -> None:
    policy, answers, count = Dimmed(), {}, 6
    with served(tmp_path, policy, max_wait_s=0.5) as here, ExitStack() as stack:
        clients = [stack.enter_context(client_of(here)) for _ in range(count)]
        together = threading.Barrier(count)

        def ask(number: int) -> None:
            together.wait(10)
            answers[number] = clients[number].infer(request(51 * (number % 6)))["actions"][0, 0]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == pytest.approx({number: 0.2 * number for number in range(count)}), "each its own"
    assert sum(policy.batches) == count
    assert len(policy.batches) < count


IMAGE = np.zeros((SIZE, SIZE, 3), np.uint8)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"observation/image": IMAGE[None]}, r"observation/image: need a square image.*came uint8 \[1, 16, 16, 3\]"),
        ({"observation/image": IMAGE[:8]}, r"came uint8 \[8, 16, 3\]"),
        ({"observation/image": IMAGE.astype(np.float32)}, r"came float32 \[16, 16, 3\]"),
        ({"observation/image": IMAGE[:0, :0]}, r"came uint8 \[0, 0, 3\]"),
        ({"observation/image": None}, "came nothing"),
        ({"observation/state": np.zeros(7)}, r"observation/state: need 3 finite numbers.*came float64 \[7\]"),
        ({"observation/state": np.array([0.0, np.nan, 0.0])}, r"came float64 \[3\], up to nan"),
        ({"observation/state": np.array([0.0, 0.0, -1e30])}, r"numbers below 1e\+06.*up to 1e\+30"),
        ({"prompt": "fly"}, r"prompt: need an instruction that is served \(do it; do that\); came 'fly'"),
        ({"prompt": 3}, "came int"),
    ],
)
def test_a_bad_request_is_named_and_the_connection_lives_on(here: Served, part: dict, said: str) -> None:
    with client_of(here) as client:
        with pytest.raises(RuntimeError, match=said):
            client.infer(request() | part)
        assert client.infer(request(51))["actions"][0, 0] == pytest.approx(0.2)


def test_a_policy_of_two_views_gets_no_made_up_wrist(tmp_path: Path) -> None:
    two = replace(SPEC, views=("main", "hand"))
    with served(tmp_path, Dimmed(), two) as here, client_of(here) as client:
        with pytest.raises(RuntimeError, match=r"observation/wrist_image: need a square image.*came nothing"):
            client.infer(request())
        assert client.infer(request(51) | {"observation/wrist_image": IMAGE})["actions"][0, 0] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "frame",
    [
        *("text", b"", b"\xc1\xff\x00", b"\x81", msgpack.packb([1, 2]), msgpack.packb({1: 2}), b"\x81" * 2000),
        msgpack.packb({"prompt": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"observation/image": {b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [0]}}),
        msgpack.packb(
            {"observation/image": {b"__ndarray__": True, b"data": b"", b"dtype": "<f8", b"shape": [1 << 40]}}
        ),
    ],
    ids=lambda frame: repr(frame[:12]),
)
def test_nonsense_gets_a_text_and_hurts_nobody(here: Served, frame: str | bytes) -> None:
    with connect(here.address, compression=None) as stranger:
        stranger.recv(5)
        stranger.send(frame)
        assert isinstance(stranger.recv(5), str)
        stranger.send(pack(request(51)))
        assert unpack(stranger.recv(5))["actions"][0, 0] == pytest.approx(0.2)


def test_who_leaves_half_way_hurts_nobody(tmp_path: Path) -> None:
    with served(tmp_path, Dimmed(), seats=1) as here:
        for half in (b"GET / HTTP/1.1\r\nHost:", b"\x16\x03\x01nonsense\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", here.port)) as half_open:
                half_open.sendall(half)
        with connect(here.address, compression=None) as asked:
            asked.recv(5)
            asked.send(pack(request()))
            asked.socket.shutdown(socket.SHUT_RDWR)  # without a closing handshake, and without the answer
        deadline = time.monotonic() + 10
        while True:  # the only seat is free again
            try:
                still_serves(here)
                break
            except ConnectionClosed:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_message_that_is_too_large_ends_its_own_connection(here: Served) -> None:
    with connect(here.address, compression=None) as stranger:
        stranger.recv(5)
        stranger.send(b"x" * (MAX_BYTES + 1))
        with pytest.raises(ConnectionClosed, match="1009"):
            stranger.recv(20)
    still_serves(here)


def test_one_client_too_many_is_told_and_comes_later(tmp_path: Path) -> None:
    with served(tmp_path, Dimmed(), seats=1) as here:
        with client_of(here), pytest.raises(ConnectionClosed, match="all connections are taken"):
            still_serves(here)
        still_serves(here)


def test_without_the_token_nobody_comes_in(tmp_path: Path) -> None:
    with served(tmp_path, Dimmed(), token="s3cret") as here:
        for options in ({}, {"api_key": "wrong"}, {"api_key": "s3cret "[:-2]}):
            with pytest.raises(InvalidStatus, match="401"):
                still_serves(here, **options)
        basic = f"ws://token:WORD@127.0.0.1:{here.port}"
        with pytest.raises(InvalidStatus, match="401"):
            connect(basic.replace("WORD", "wrong"))
        with connect(basic.replace("WORD", "s3cret")) as client:
            assert unpack(client.recv(5))["server"] == "vla_rl"
        still_serves(here, api_key="s3cret")
        assert urlopen(f"http://127.0.0.1:{here.port}/healthz", timeout=5).read() == b"OK\n"


def test_actions_that_are_not_finite_are_not_sent(tmp_path: Path) -> None:
    class Lost(Dimmed):
        def act(self, *seen: Any) -> ActionBatch:
            return replace(super().act(*seen), actions=np.full((1, K, 7), np.nan, np.float32))

    said = "are not finite"
    with served(tmp_path, Lost()) as here, client_of(here) as client, pytest.raises(RuntimeError, match=said):
        client.infer(request())


def test_another_path_is_not_found(here: Served) -> None:
    with pytest.raises(InvalidStatus, match="404"):
        connect(f"{here.address}/other")


def test_a_policy_that_fails_ends_the_server(tmp_path: Path) -> None:
    class Broken(Dimmed):
        def act(self, *_: Any) -> Any:
            raise ZeroDivisionError("no action")

    with served(tmp_path, Broken()) as here, client_of(here) as client, pytest.raises(ConnectionClosed):
        client.infer(request())
    assert isinstance(here.error, ZeroDivisionError)
