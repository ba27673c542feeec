"""scripts/check_gpu.py on the processor: the same code as on a GPU, with small shapes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT


def check(folder: Path, *arguments: str, code: int = 0) -> tuple[dict[int, dict], str]:
    """The steps of the result file by number, and the output."""
    file = folder / "result.json"
    command = [sys.executable, ROOT / "scripts/check_gpu.py", "--json", file, *arguments]
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert (found["setting"]["device"], found["setting"]["small_shapes"]) == ("cpu", True)
    return {step["step"]: step for step in found["steps"]}, done.stdout


def values(step: dict, name: str) -> list:
    return [result["value"] for result in step["results"] if result["name"] == name]


def is_running(pid: int) -> bool:
    """A process that has ended and waits for its parent is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_the_steps_without_ray_and_simulators(tmp_path: Path):
    picture = tmp_path / "result.png"
    steps, output = check(tmp_path, "--steps", "1,2,3,4,5,6,7,12,13", "--output", str(picture))
    assert picture.stat().st_size > 10_000
    assert output.startswith("no GPU that torch can use: small shapes on the processor\n1. tiny policy")
    assert {number: step["state"] for number, step in steps.items()} == dict.fromkeys((*range(1, 8), 12, 13), "ok")
    assert values(steps[1], "weights differ") == [0, 0]
    assert values(steps[1], "version after refresh") == [2, 2]
    differences = values(steps[1], "largest difference of log-probabilities")
    assert len(differences) == 4
    assert max(differences[:2]) < 1e-4
    assert all(norm > 0 for norm in values(steps[1], "gradient norm"))
    assert values(steps[2], "outputs are finite") == [True]
    assert len(values(steps[3], "act, eager")) == 2
    assert all(rate > 0 for rate in values(steps[3], "act, eager"))
    assert all(milliseconds > 0 for milliseconds in values(steps[4], "micro-batch"))
    assert min(values(steps[5], "micro_batch")) > 0
    same = [*(values(steps[6], f"sync of {which}")[0] for which in ("adapters", "all weights"))]
    same += [*values(steps[6], "lent weights"), *values(steps[7], "after a round trip")]
    assert same == ["the same bits"] * 5
    assert len(values(steps[12], "weights")) == 3
    assert max(values(steps[12], "largest difference of log-probabilities")) < 1e-4
    assert values(steps[13], "critic_steps") == [8.0, 8.0]
    assert values(steps[13], "optimizer_steps") == [3.0, 4.0]
    assert values(steps[13], "losses are finite") == [True]


@pytest.mark.exhaustive
@pytest.mark.timeout(1900)
def test_the_steps_with_simulators_and_ray(tmp_path: Path):
    """Minutes; what they find is in the result file, and here only that they go through."""
    steps, _ = check(tmp_path, "--steps", "8,9,10,11")
    assert {number: step["state"] for number, step in steps.items()} == dict.fromkeys((8, 9, 10, 11), "ok")
    assert all(rate > 0 for rate in values(steps[8], "frames"))
    assert values(steps[9], "a partial reset changes its row alone") == [True]
    assert len(values(steps[10], "training")) == 4
    assert min(values(steps[11], "profile")[0]["train"].values()) >= 0


def test_what_fails_or_lacks_a_package_does_not_end_the_rest(tmp_path: Path):
    """A step that is stopped by its limit, one without its package, and what an earlier one has found."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from gpu_checks.report import Report, Step, run_steps
        from gpu_checks.setting import Setting
    finally:
        sys.path.pop(0)

    def endless(setting: Setting, report: Report) -> None:
        report.add("found early", 1.5, "s", rows=2)
        report.add("process", subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)

    def broken(setting: Setting, report: Report) -> None:
        report.attempt("a part", lambda: 1 / 0)
        raise ValueError("no more")

    def good(setting: Setting, report: Report) -> None:
        report.add("answer", setting.matrix)

    steps = (
        Step(1, "endless", endless, 5),
        Step(2, "broken", broken, 60),
        Step(3, "lacking", good, 60, ["json", "no_such_package"]),
        Step(4, "good", good, 60),
    )
    setting = Setting("cpu", "nano", "fp32", (1,), 8, 64, 1)
    results = run_steps(steps, setting, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == results
    assert [result["state"] for result in results] == [
        "stopped after its limit of 5 s",
        "failed with exit status 1",
        "skipped: no package no_such_package",
        "ok",
    ]
    early, process = results[0]["results"]
    assert early == {"name": "found early", "value": 1.5, "unit": "s", "rows": 2}
    deadline = time.monotonic() + 20
    while is_running(process["value"]):
        assert time.monotonic() < deadline, "what a step has started ends with it"
        time.sleep(0.05)
    part, error = results[1]["results"]
    assert part["value"] == "failed: ZeroDivisionError: division by zero"
    assert "ValueError: no more" in error["value"]
    assert results[3]["results"] == [{"name": "answer", "value": 8, "unit": ""}]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
