"""Whole runs on Ray and DeepSpeed, with the smallest model on the workload simulator."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.metrics_page import undocumented
from tests.processes import answers
from vla_rl.cluster.fork_request import FOLDER
from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.commands.cli import main
from vla_rl.commands.train import train
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.observability.plots import kind_of
from vla_rl.observability.spans import read_trace

pytestmark = pytest.mark.slow


def _config(tmp_path, **groups) -> RunConfig:
    base = {
        "env": {"name": "workload", "image_size": 48, "max_episode_steps": 16, "length_spread": 0.5, "step_ms": 1.0},
        "policy": {"name": "openvla_oft", "size": "nano"},
        "train": {"iterations": 3, "batch_episodes": 6, "eval_episodes": 4, "eval_every": 2, "checkpoint_every": 2},
        "placement": {"env_workers": 2, "envs_per_worker": 2},
        "log": {"dir": str(tmp_path), "name": "run", "video": False},
    }
    groups = {key: base.get(key, {}) | value if isinstance(value, dict) else value for key, value in groups.items()}
    return RunConfig.model_validate(base | groups)


def _metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _balanced(m: dict) -> bool:
    ended = sum(m[f"episodes/{name}"] for name in ("trained", "stale", "filtered", "evaluated", "lost"))
    return m["episodes/started"] == ended + m["episodes/running"] + m["episodes/buffered"] + m["episodes/in_training"]


def _own_leftovers() -> list[Path]:
    """But for the sockets of the fork servers, which this process has as long as it lives."""
    found = [p for root in (shared_root(), Path("/tmp")) for p in root.glob(f"vla_rl-{os.getpid()}-*")]
    return [p for p in found if str(p) != os.environ.get(FOLDER)]


@pytest.mark.parametrize(("mode", "placement"), [("async", "collocated"), ("sync", "pipelined")])
def test_a_run_leaves_a_complete_folder_and_nothing_else(tmp_path, monkeypatch, mode, placement):
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "a-secret-of-the-user")
    placed = {"mode": placement, "devices": 2}
    config = _config(tmp_path, mode=mode, placement=placed, train={"checkpoint_every": 1000}, log={"trace": True})
    assert train(config) == 0
    run = tmp_path / "run"
    metrics = _metrics(run)
    assert [m["iteration"] for m in metrics] == [0, 1, 2, 3]
    assert all(_balanced(m) for m in metrics)
    assert not undocumented(set().union(*metrics)), "docs/metrics.md"
    assert metrics[-1]["episodes/trained"] == 18
    assert metrics[-1]["episodes/evaluated"] == 12
    assert all(("busy/shared_devices" in m) == (placement == "collocated") for m in metrics[1:])
    if placement == "collocated":
        assert metrics[-1]["busy/shared_devices"] > 0, "inference and learner take turns"
    if mode == "sync":
        assert {m["rollout/staleness_max"] for m in metrics[1:]} == {0}
        assert max(m["learner/ratio_p99"] for m in metrics[1:]) >= 1.0
    for name in ("config.yaml", "metadata.json", "curves.png", "report.html", "evaluations/000003-greedy.json"):
        assert (run / name).stat().st_size > 0
    assert [p.name for p in Checkpoints(run / "checkpoints", 9).complete()] == ["000002", "000003"], (
        "the best and the last"
    )
    evaluation = json.loads((run / "evaluations/000002-greedy.json").read_text())
    assert evaluation["policy_versions"] == [2], "one policy version played the whole evaluation"
    _check_trace(run, leases=placement == "collocated")
    secrets = [b"a-secret-of-the-user", os.environ.get("RAY_AUTH_TOKEN", "a-secret-of-the-user").encode()]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]
    assert not _own_leftovers()
    children = answers(psutil.Process().children(recursive=True), psutil.Process.name)
    assert not [name for name in children if "ray" in name.lower()]


def _check_trace(run: Path, *, leases: bool) -> None:
    expected = {
        "driver": {"next_batch", "update", "publish", "evaluate", "checkpoint"},
        "env worker": {"reset", "render", "simulate", "wait"},
        "inference server": {"wait", "infer", "act", "refresh"} | ({"lease"} if leases else set()),
        "learner": {"train", "micro_batch", "step", "publish"} | ({"lease"} if leases else set()),
        "replay store": {"collate"},
    }
    spans = read_trace(run / "trace").spans
    assert {role: {span.activity for span in spans if span.role == role} for role in expected} == expected
    assert {span.role for span in spans} == expected.keys()
    assert not {span.activity for span in spans if kind_of(span.activity) == "other"}
    updates = [span for span in spans if (span.role, span.activity) == ("driver", "update")]
    trained = [span for span in spans if (span.process, span.activity) == ("learner 0", "train")]
    assert len(updates) == len(trained) == 3
    for update, inside in zip(updates, trained, strict=True):
        assert update.start < inside.start < inside.end < update.end, "the processes' clocks agree"


def test_a_time_limit_ends_the_run_after_one_update_at_least_with_an_evaluation_and_a_checkpoint(tmp_path, capsys):
    shorter_than_the_start = {"iterations": 10_000, "max_minutes": 0.01, "eval_every": 0, "eval_start": False}
    data = {"log": {"dataset": str(tmp_path / "data")}}
    assert train(_config(tmp_path, train=shorter_than_the_start, **data)) == 0
    (only,) = _metrics(tmp_path / "run")
    assert only["iteration"] == 1, "nor evaluated before"
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration 1/10000 (0 %) | "))
    assert " | KL " in line
    assert " | 0 s left" in line
    assert len(line) <= 160
    assert only["time/left_s"] == 0
    assert only["eval/greedy_success"] >= 0
    assert [p.name for p in Checkpoints(tmp_path / "run/checkpoints", 9).complete()] == ["000001"]
    info = json.loads((tmp_path / "data/meta/info.json").read_text())
    assert info["total_episodes"] >= only["episodes/played"] + only["episodes/evaluated"]
    assert not list((tmp_path / "data/pending").iterdir())


def test_resume_continues_counters_versions_and_metrics(tmp_path, capsys):
    """With a flow policy; the other tests have OpenVLA-OFT."""
    policy = {"name": "pi0", "random_steps": "last"}
    assert train(_config(tmp_path, policy=policy, train={"publish_every": 2, "eval_every": 0})) == 0
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"with policy.noise=learned, the policy trains other weights"):
        train(_config(tmp_path, policy=policy | {"noise": "learned"}, train={"iterations": 5}), resume=run, iteration=2)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, "refused: nothing changes"
    taken = policy | {"latency_ms": 1.0}  # a key that fits what waits and what is trained
    config = _config(tmp_path, policy=taken, train={"iterations": 5, "publish_every": 3})
    assert train(config, resume=run) == 0
    metrics = _metrics(run)
    assert [m["iteration"] for m in metrics] == [0, 1, 2, 3, 4, 5]
    published = [m["episodes/published_version"] for m in metrics]
    assert published == [0, 0, 2, 3, 4, 5], "when due, before evaluations, at the end, and where a run is resumed"
    assert metrics[-1]["episodes/trained"] == 30
    assert all(_balanced(m) for m in metrics)
    assert metrics[-1]["time/seconds"] > metrics[3]["time/seconds"]
    capsys.readouterr()
    assert train(config, resume=run) == 0
    assert capsys.readouterr().out == f"{run} is complete: 5 iterations; train.iterations=N goes on\n", "nothing starts"


def _start(tmp_path, **groups) -> subprocess.Popen:
    config = _config(tmp_path, **groups).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "vla_rl.commands.cli", "train", str(tmp_path / "config.yaml")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait_for(run: Path, process: subprocess.Popen, reached: Callable[[dict], bool]) -> dict:
    """The first metrics of an iteration, from the last one on, of which that is true."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and (last := _metrics(run)[-1:]) and reached(last[0]):
            return last[0]
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError("the run makes no progress")


def _wait_for_iteration(run: Path, iteration: int, process: subprocess.Popen) -> None:
    _wait_for(run, process, lambda metrics: metrics["iteration"] >= iteration)


LONG = {"iterations": 500, "batch_episodes": 6, "eval_episodes": 0, "checkpoint_every": 1000}


def _stopped_cleanly(run: Path, process: subprocess.Popen) -> str:
    """The output of a run that was asked to stop. There is a checkpoint of its last iteration, and nothing else."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "--resume" in output
    newest = Checkpoints(run / "checkpoints", 9).newest()
    assert int(newest.name) == _metrics(run)[-1]["iteration"]
    assert not list(shared_root().glob(f"vla_rl-{process.pid}-*"))
    return output


@pytest.mark.exhaustive  # the next test asks one process alone, as Ctrl-C does
def test_being_asked_to_stop_by_a_scheduler_ends_cleanly_with_a_checkpoint(tmp_path):
    """Schedulers tell all processes of a job."""
    process = _start(tmp_path, train=LONG)
    _wait_for_iteration(tmp_path / "run", 2, process)
    answers(psutil.Process(process.pid).children(recursive=True), lambda child: child.send_signal(signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    _stopped_cleanly(tmp_path / "run", process)


def _send_to_one(driver: subprocess.Popen, role: str, number: int) -> None:
    for child in psutil.Process(driver.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if role in " ".join(child.cmdline()):
                child.send_signal(number)
                return
    raise AssertionError(f"no {role} among the processes of the run")


def test_dead_processes_are_replaced_during_an_update_and_ctrl_c_ends_cleanly_with_a_checkpoint(tmp_path):
    """Workers, servers and stores, while inference is offloaded. Other deaths: test_chaos."""
    costs = {"env": {"step_ms": 10.0}, "learner": {"latency_ms": 300.0}, "placement": {"offload": "always"}}
    process = _start(tmp_path, train=LONG, **costs)
    run = tmp_path / "run"
    _wait_for_iteration(run, 2, process)
    for role in ("EnvWorkerProcess", "InferenceProcess", "StoreProcess"):
        _send_to_one(process, role, signal.SIGKILL)
        _wait_for_iteration(run, _metrics(run)[-1]["iteration"] + 3, process)
    _wait_for(run, process, lambda metrics: metrics["restarts"] >= 3)
    process.send_signal(signal.SIGINT)
    output = _stopped_cleanly(run, process)
    assert "env worker 0 is replaced: " in output
    assert "inference server 0 is replaced: " in output
    assert "replay store 0 is replaced: " in output
    last = _metrics(run)[-1]
    assert [m["iteration"] for m in _metrics(run)] == list(range(1, last["iteration"] + 1))
    assert all(map(_balanced, _metrics(run)))
    assert last["restarts_of_run"] == 0
    assert last["episodes/lost"] > 0
    assert last["episodes/trained"] == 6 * last["iteration"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "shapes"])
def test_a_bad_checkpoint_is_one_clear_error(tmp_path, capsys, damage):
    from envs import env_spec
    from vla_rl.policies.build import build_policy
    from vla_rl.policies.openvla_oft.checkpoint import save_policy
    from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig

    config = _config(tmp_path)
    folder = tmp_path / "policy"
    save_policy(build_policy(OpenVLAOFTConfig(size="nano"), env_spec(config.env), 0), folder, {})
    match damage:
        case "missing":
            (folder / "model.safetensors").unlink()
        case "truncated":
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
        case "shapes":
            content = json.loads((folder / "architecture.json").read_text())
            content["architecture"]["projector_hidden"] += 8
            (folder / "architecture.json").write_text(json.dumps(content))
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(_config(tmp_path, policy={"name": "openvla_oft", "checkpoint": str(folder)})))
    assert main(["train", str(file)]) == 2
    assert str(folder) in capsys.readouterr().err
    assert not _own_leftovers()
    assert not (tmp_path / "run").exists()
