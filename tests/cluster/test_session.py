"""Ray's processes: whose code they run, where they are, and what reaches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import ROOT
from vla_rl.cluster import held_folder, ray_session
from vla_rl.cluster.held_folder import HeldFolder, session_root, sweep_leftovers
from vla_rl.core.errors import UserError


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the processes of a session see if it was started in a folder that holds packages with the names of ours."""
    folder = tmp_path_factory.mktemp("a_working_directory_with_a_name_that_is_long")
    for package in ("algos", "envs", "vla_rl"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise RuntimeError('not this one')")
    hostile = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "RAY_ADDRESS": "10.255.255.1:6379"}
    no_token = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    no_token["HOME"] = str(folder)  # of a user who has none in ~/.ray
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/cluster/probe.py")],
        cwd=folder, env=no_token | hostile, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"where": str(folder)}


def test_processes_import_the_drivers_code_and_work_in_its_folder(seen: dict) -> None:
    assert seen["code"] == [str(ROOT)] * 3
    assert seen["folder"] == seen["where"]


def test_nothing_listens_to_other_machines(seen: dict) -> None:
    assert seen["listens"] == ["127.0.0.1"]


def test_a_process_without_the_token_is_refused(seen: dict) -> None:
    assert seen["answers"] == ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED"], "of who knows it, has none, has another"


def test_a_scheduler_that_tells_all_processes_to_stop_reaches_the_driver_alone(seen: dict) -> None:
    assert {"gcs_server", "raylet", "ray::Probe"} <= {name.split(".")[0] for name in seen["alive"]}
    assert seen["again"] == seen["pid"]


def test_the_first_cause_of_a_failed_collective_is_reported_while_others_hang(seen: dict) -> None:
    first = seen["failure"].splitlines()[0]
    assert first == "the learner's update failed: MemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    assert "take_part" in seen["failure"], "and where"
    assert seen["failure_s"] < 60


def test_a_node_that_hangs_holds_the_driver_up_for_no_time_and_is_lost_in_the_end(seen: dict) -> None:
    assert seen["hung_answers"] == [None] * 3
    assert seen["hung_s"] < 30
    assert seen["hung"].startswith("node 1 (there, 10.0.0.2) is lost: it has not answered for")


def test_a_node_that_runs_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "code_version", lambda: "ours")
    ray_session.require_same_code("ours", Path("/a"))
    with pytest.raises(UserError, match=rf"different code: {ROOT} here is not as /b there; install the same version"):
        ray_session.require_same_code("theirs", Path("/b"))


def test_nothing_is_left_of_a_session(seen: dict) -> None:
    assert not seen["left"]


def test_a_folder_is_swept_when_its_holder_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a process in another container, whose numbers mean nothing here."""
    monkeypatch.setattr(held_folder, "_session_roots", lambda: [tmp_path])
    monkeypatch.setattr(held_folder, "shared_root", lambda: tmp_path)
    held, dead = HeldFolder(tmp_path), HeldFolder(tmp_path)
    held.path = held.path.rename(tmp_path / "vla_rl-999999999-elsewhere")
    dead.release()
    sweep_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["vla_rl-999999999-elsewhere"]
    held.release()
    sweep_leftovers()
    assert not list(tmp_path.iterdir())


def test_where_sockets_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/scratch/jobs/0123456789/tmp")
    assert len(str(session_root())) <= 20
    monkeypatch.setattr(held_folder, "_session_roots", lambda: [Path(tempfile.gettempdir())])
    with pytest.raises(UserError, match=r"TMPDIR=/scratch/jobs/0123456789/tmp: .* at most 20 characters"):
        session_root()
