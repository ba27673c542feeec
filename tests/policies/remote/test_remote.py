"""A policy that another process serves: openpi's own server, `vla-rl serve`'s, and servers that are none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_server.websocket_policy_server import WebsocketPolicyServer
from websockets.asyncio.server import serve
from websockets.sync.server import serve as serve_blocking

from envs import env_spec, make_env
from envs.base import empty_observation
from tests.inference.serving.served import Dimmed, Served, served
from tests.runtime_fakes import SPEC
from vla_rl.commands.api import LoadedPolicy, load_config, load_policy
from vla_rl.commands.cli import main
from vla_rl.core.errors import UserError
from vla_rl.core.machine import free_port
from vla_rl.core.records import EnvSpec
from vla_rl.core.wire import pack
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.placement.checks import with_keys_of_checkpoint
from vla_rl.policies.build import build_policy, check_policy
from vla_rl.policies.remote.config import RemoteConfig
from vla_rl.replay.schedule import evaluation_episodes

CHUNK = np.linspace(-0.9, 0.9, 70).reshape(10, 7)


class Fixed:
    """A policy of openpi's server."""

    def infer(self, seen: dict[str, Any]) -> dict[str, Any]:
        assert seen["observation/image"].dtype == np.uint8
        assert seen["observation/state"].shape == (3,)
        return {"actions": CHUNK + (SPEC.instructions.index(seen["prompt"]) * 0.01)}


@contextmanager
def openpis_server(policy: Any) -> Iterator[str]:
    """Its address. The server of the package, on a loop of the test's."""
    port, loop, ready = free_port(), asyncio.new_event_loop(), threading.Event()
    own = WebsocketPolicyServer(policy, "127.0.0.1", port)

    async def run() -> None:
        async with serve(own._handler, "127.0.0.1", port, compression=None, max_size=None):
            ready.set()
            await asyncio.sleep(60)

    def until_cancelled() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(run())
    thread = threading.Thread(target=until_cancelled, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield f"ws://127.0.0.1:{port}"
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)


def remote(address: str, spec: EnvSpec = SPEC, **keys: Any) -> LoadedPolicy:
    run = load_config(None, {"policy": "remote", "policy.chunk_size": 5} | {f"policy.{k}": v for k, v in keys.items()})
    run = run.with_values({"policy.address": address})
    return LoadedPolicy(build_policy(run.policy, spec, 0), run, spec, "cpu")


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((count, 1, 16, 16, 3), np.uint8), np.zeros((count, 3), np.float32)


def test_openpis_own_server_is_asked_for_each_row() -> None:
    with openpis_server(Fixed()) as address:
        check_policy(RemoteConfig(address=address), SPEC)
        found = remote(address, connections=2).act(*rows(5), np.array([0, 1, 0, 1, 1]))
    expected = SPEC.actions.from_data(np.stack([CHUNK[:5] + 0.01 * task for task in (0, 1, 0, 1, 1)]))
    assert np.array_equal(found, expected), "in order, the first five of ten, the gripper as the simulator has it"


def test_its_errors_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Strict:
        def infer(self, seen: dict[str, Any]) -> dict[str, Any]:
            return {"actions": seen["observation/wrist_image"]}

    with openpis_server(Strict()) as address:
        with pytest.raises(UserError, match=rf"policy.address={address}: it refuses.*KeyError: 'observation/wrist_im"):
            check_policy(RemoteConfig(address=address), SPEC)
        arguments = ["policy=remote", f"policy.address={address}", "--config", "tabletop", "--episodes", "1"]
        assert main(["eval", *arguments]) == 2, "before any process is started"
    assert "KeyError: 'observation/wrist_image'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (pack({"actions": CHUNK[:3]}), r"predicts 3 actions at once \(lower policy.chunk_size=5\)"),
        (pack({"actions": CHUNK[:, :6]}), "have 6 numbers, the simulator's 7"),
        (pack({"actions": CHUNK[0]}), r"its actions are float64 \[7\]"),
        (pack({"actions": CHUNK * np.nan}), "not finite"),
        (pack({}), "its actions are NoneType"),
        (pack([1]), "it sends list"),
        (b"\xc1", "no server of openpi's protocol"),
        ("KeyError: 'x'", "it refuses the observation: KeyError: 'x'"),
        (None, "no answer: TimeoutError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_that_are_none(answer: bytes | str | None, said: str) -> None:
    def talk(connection: Any) -> None:
        connection.send(pack({}))
        for _ in connection:
            if answer is not None:
                connection.send(answer)

    with answering(talk) as address, pytest.raises(UserError, match=rf"policy.address={address}: .*{said}"):
        check_policy(RemoteConfig(address=address, timeout_s=0.5 if answer is None else 10), SPEC)


@contextmanager
def answering(talk: Callable[[Any], None]) -> Iterator[str]:
    with serve_blocking(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(10)


def test_a_server_with_few_connections_gets_as_many_requests_at_once(tmp_path: Path) -> None:
    with served(tmp_path, Dimmed(), seats=2) as here:
        images, proprio = rows(5)
        images += np.array([0, 51, 102, 153, 204], np.uint8)[:, None, None, None, None]
        found = remote(here.address, chunk_size=4).act(images, proprio)
    assert np.allclose(found[:, 0, 0], [0.0, 0.2, 0.4, 0.6, 0.8])


def test_a_server_that_leaves_in_the_middle_is_named() -> None:
    def talk(connection: Any) -> None:
        connection.send(pack({}))
        connection.recv()
        connection.send(pack({"actions": CHUNK}))

    with answering(talk) as address:
        policy = remote(address)
        policy.act(*rows(1))
        with pytest.raises(UserError, match=rf"policy.address={address}: no answer: ConnectionClosed"):
            policy.act(*rows(1))


@pytest.mark.parametrize(
    "address", ["ws://127.0.0.1:9", "http://127.0.0.1:9", "nowhere", "ws://no.such.host.invalid:1"]
)
def test_a_server_that_is_away_is_named(address: str) -> None:
    with pytest.raises(UserError, match=rf"policy.address={address}: cannot be reached"):
        check_policy(RemoteConfig(address=address), SPEC)


def test_training_and_checkpoints_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["policy=remote", "policy.address=ws://127.0.0.1:9"]
    for command in ("train", "sft"):
        assert main([command, "tabletop", *nowhere]) == 2
        assert "policy.name=remote: ws://127.0.0.1:9 is for evaluation" in capsys.readouterr().err
    assert main(["eval", "checkpoints/tabletop_reach", "--config", "tabletop", *nowhere]) == 2
    assert "takes its weights from ws://127.0.0.1:9" in capsys.readouterr().err
    assert main(["eval", "policy=openvla_oft", "--config", "configs/panda_reach.yaml", "env=tabletop"]) == 2
    assert "random weights" in capsys.readouterr().err


def test_the_token_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = load_policy("checkpoints/tabletop_reach", config="tabletop")
    monkeypatch.setenv("ITS_TOKEN", "s3cret")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with serving(here, tmp_path, token="s3cret") as there:
        for name, said in ((None, "401"), ("NO_TOKEN", "this variable is not set")):
            with pytest.raises(UserError, match=said):
                check_policy(RemoteConfig(address=there.address, token_env=name), here.spec)
        check_policy(RemoteConfig(address=there.address, token_env="ITS_TOKEN"), here.spec)


@contextmanager
def serving(policy: LoadedPolicy, folder: Path, token: str | None = None) -> Iterator[Served]:
    runner = PolicyRunner(policy.policy, policy.config, None, "cpu")
    with served(folder, runner, policy.spec, policy.config.policy.spec(policy.spec), token=token) as found:
        yield found


@pytest.mark.parametrize(
    ("checkpoint", "config", "overrides", "chunks"),
    [
        ("tabletop_reach", "tabletop", {}, 4),
        pytest.param(
            *("libero_spatial_task0", "libero_ppo", {"env.settle_steps": 0}, 2), marks=pytest.mark.libero, id="libero"
        ),
    ],
)
def test_a_served_checkpoint_plays_as_it_does_here(
    checkpoint: str, config: str, overrides: dict[str, Any], chunks: int, tmp_path: Path
) -> None:
    """Bit for bit, where a batch has one row; chunk size and observations are those of the server's metadata."""
    here = load_policy(f"checkpoints/{checkpoint}", config=config, overrides=overrides)
    with serving(here, tmp_path) as there:
        values = {"policy": "remote", "policy.address": there.address}
        run = load_config(config, overrides | values)
        assert run.policy.chunk_size == here.config.policy.chunk_size
        spec = env_spec(run.env)
        away = LoadedPolicy(build_policy(run.policy, spec, 0), run, spec, "cpu")
        env = make_env(run.env, 1)
        seen, (episode, *_) = empty_observation(spec, 1), evaluation_episodes(0, 1, 1, spec.init_states, 0)
        env.reset([0], [episode])
        for _ in range(chunks):
            env.observe([0], seen)
            actions = away.act(seen.images, seen.proprio, seen.task)
            assert np.array_equal(actions, spec.actions.clip(here.act(seen.images, seen.proprio, seen.task)))
            env.step([0], actions)
        env.close()


def test_observations_follow_from_the_metadata() -> None:
    told = {"chunk_size": 3, "images": {"observation/image": "a", "observation/wrist_image": "b"}, "state_dim": 0}
    with answering(lambda connection: connection.send(pack(told))) as address:
        config = load_config(None, {"env": "libero"}).with_values({"policy": RemoteConfig(address=address)})
        found = with_keys_of_checkpoint(config)
    assert (found.policy.chunk_size, found.env.wrist_camera, found.env.proprio) == (3, True, False)


@pytest.mark.slow
def test_the_command_finds_the_success_of_the_served_checkpoint(tmp_path: Path) -> None:
    here = load_policy("checkpoints/tabletop_reach", config="tabletop")
    with serving(here, tmp_path) as there:
        found = {}
        for name, target in (
            ("away", ["policy=remote", f"policy.address={there.address}"]),
            ("here", ["checkpoints/tabletop_reach"]),
        ):
            file = tmp_path / f"{name}.json"
            few = ["--config", "tabletop", "--episodes", "12", "placement.env_workers=1", "--json", str(file)]
            assert main(["eval", *target, *few]) == 0
            found[name] = json.loads(file.read_text())
    assert found["away"]["checkpoint"] == there.address
    assert found["away"]["successes"] == found["here"]["successes"]
