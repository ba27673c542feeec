"""Workers that come from a server by a fork: as if an interpreter had been started for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from vla_rl.cluster import fork_request
from vla_rl.cluster.fork_request import FOLDER, KIND, is_forked, request_of

SCRIPT = """
import json, os, sys
import numpy as np
import pyarrow as pa
parent = open(f"/proc/{os.getppid()}/cmdline").read()
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "alone_in_its_group": os.getpgrp() == os.getpid(),
    "folder": os.getcwd(),
    "path": sys.path,
    "preloaded": "wave" in sys.modules,
    "server": os.getppid() if "fork_server" in parent else None,
    "variable": os.environ.get("COLOUR"),
    "drawn": np.random.random(),
    "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "with_arrow": pa.array(range(100_000)).slice(7).to_numpy()[0].item(),
    "waits": os.waitstatus_to_exitcode(os.system("exit 3")),
}))
sys.exit(0)
"""

DRIVER = """
import os, sys
from vla_rl.cluster.fork_server import POLICY, start_fork_servers
start_fork_servers({POLICY: ["wave", "no.such.module"]})
folder = os.environ["VLA_RL_FORK_SERVERS"]
start_fork_servers({})
assert folder == os.environ["VLA_RL_FORK_SERVERS"], "they run already"
print(folder, flush=True)
sys.stdin.read()
"""


def context(**values: Any) -> str:
    return "--serialized-runtime-env-context=" + json.dumps({"env_vars": {}, "command_prefix": []} | values)


def test_what_a_server_is_asked_for() -> None:
    request = request_of([context(env_vars={KIND: "policy", "A": "1"}), "--language=PYTHON", "worker.py", "--x=1"])
    assert request is not None
    assert (request["kind"], request["arguments"]) == ("policy", ["worker.py", "--x=1"])
    environment = request["environment"]
    assert isinstance(environment, dict)
    assert environment["A"] == "1"
    assert environment["PATH"] == os.environ["PATH"]
    assert request_of(["worker.py"]) is not None
    for other in (context(command_prefix=["nice"]), context(py_executable="python2"), context(java_jars=["a.jar"])):
        assert request_of([other, "worker.py"]) is None, "Ray's own script can do more"


@pytest.mark.parametrize("place", [None, "nowhere"])
def test_without_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str | None) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    if place is not None:
        monkeypatch.setenv(FOLDER, str(tmp_path / place))
    assert not is_forked(["worker.py"])


def test_workers_of_a_server_and_its_end(tmp_path: Path) -> None:
    """Also that the servers end with the driver, and remove their sockets."""
    (tmp_path / "worker.py").write_text(SCRIPT)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    drawn, servers = set(), set()
    for kind in ("policy", "policy", "simulator"):
        found = _work(tmp_path, folder, kind)
        servers.add(found["server"])
        assert found["argv"] == [str(tmp_path / "worker.py"), "--x=1"]
        assert (found["name"], found["folder"], found["variable"]) == ("__main__", str(tmp_path), "blue")
        assert found["path"][:2] == [str(tmp_path), str(tmp_path / "more")]
        assert found["preloaded"] == (kind == "policy")
        assert found["files"] == [0, 1, 2], "nothing of the server's is open"
        assert found["waits"] == 3
        assert found["with_arrow"] == 7, "its allocator's thread is gone with the fork, and is not missed"
        assert found["alone_in_its_group"]
        drawn.add(found["drawn"])
    assert len(drawn) == 3
    assert len(servers) == 2
    assert None not in servers
    driver.kill()
    driver.communicate()
    deadline = time.monotonic() + 20
    left = [folder, *(Path(f"/proc/{server}") for server in servers)]
    while any(one.exists() for one in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [one for one in left if one.exists()]


def _work(where: Path, folder: Path, kind: str) -> dict[str, Any]:
    """What a worker prints that Ray would start so."""
    variables = {FOLDER: str(folder), "PYTHONPATH": str(where / "more")}
    arguments = [context(env_vars={KIND: kind, "COLOUR": "blue"}), "--language=PYTHON"]
    result = subprocess.run(
        [sys.executable, fork_request.__file__, *arguments, str(where / "worker.py"), "--x=1"],
        env=os.environ | variables,
        cwd=where,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found
