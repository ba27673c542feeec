"""`vla-rl serve`: what is refused before anything is loaded; a real server process, its clients, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from tests import ROOT
from tests.inference.serving.served import request
from vla_rl.commands.api import load_policy
from vla_rl.commands.cli import main
from vla_rl.core.ipc.shared_memory import shared_root

SERVE = ("serve", "checkpoints/tabletop_reach", "tabletop")


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("a config is loaded")

    monkeypatch.delenv("VLA_RL_TOKEN", raising=False)
    monkeypatch.setattr("vla_rl.commands.serve.config_of_arguments", loads)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com", "192.0.2.1"])
def test_other_hosts_need_a_token(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, "--host", host]) == 2
    said = capsys.readouterr().err
    assert f"--host {host}: everybody in that network" in said
    assert "--token-file FILE" in said


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("content", ["", "two words", "schlüssel", None])
def test_a_token_is_one_word(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main([*SERVE, "--token-file", str(file)]) == 2
    assert f"--token-file {file}: " in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_empty_variable_is_no_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLA_RL_TOKEN", "")
    assert main([*SERVE]) == 2
    assert "VLA_RL_TOKEN: a token is one word" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_port_that_is_taken_is_found_first(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main([*SERVE, "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err
    assert main([*SERVE, "--port", "70000"]) == 2


def test_the_command_answers_as_the_policy_itself_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vla_rl.commands.cli", *SERVE, "--port", "0", "--host", "0.0.0.0"]
    environment = os.environ | {"VLA_RL_TOKEN": "s3cret", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment)
    try:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(3)]
        assert "listening with the token: ws://0.0.0.0:" in lines[2], (lines, (tmp_path / "log").read_text())
        port = int(lines[2].split("ws://0.0.0.0:")[1].split()[0])
        policy = load_policy("checkpoints/tabletop_reach", config="tabletop")
        seen = request(spec=policy.spec, mark=90, task=2)
        client = WebsocketClientPolicy("127.0.0.1", port, api_key="s3cret")
        found = client.infer(seen)["actions"]
        own = policy.act(seen["observation/image"][None], seen["observation/state"], task=2)
        assert np.array_equal(policy.spec.actions.from_data(found), policy.spec.actions.clip(own)), "bit for bit"
        start = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0, (tmp_path / "log").read_text()
        assert time.monotonic() - start < 15
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        server.kill()
        server.wait(10)
    assert not list(shared_root().glob(f"*vla_rl-{server.pid}-*")), "nothing is left"
