"""Steps, each in a process of its own with a time limit, and their results, kept as soon as they are known."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.setting import Setting


@dataclass(frozen=True, slots=True)
class Step:
    """One question. ``limit_s`` is generous: what has been reported by then is kept."""

    number: int
    title: str
    run: Callable[[Setting, "Report"], None]
    limit_s: float
    packages: Sequence[str] = ()

    def missing(self) -> list[str]:
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


@dataclass(slots=True)
class Report:
    """Prints results of one step, and appends them to a file with one JSON object per line."""

    file: Path
    values: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, value: Any, unit: str = "", **about: Any) -> None:
        """``about``: the circumstances, such as rows=8."""
        where = "".join(f", {key}={item}" for key, item in about.items())
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"    {name}{where}: {shown} {unit}".rstrip(), flush=True)
        with self.file.open("a") as out:
            out.write(json.dumps({"name": name, "value": value, "unit": unit} | about) + "\n")

    def attempt(self, name: str, call: Callable[[], Any], unit: str = "", **about: Any) -> Any:
        """Report what a call returns, and return it; None if it failed, which is reported: the step goes on."""
        try:
            value = call()
        except Exception as error:  # such as memory that ran out: a result, too
            first = (str(error).splitlines() or [""])[0]
            self.add(name, f"failed: {type(error).__name__}: {first}", **about)
            return None
        self.add(name, value, unit, **about)
        return value


def run_steps(steps: Sequence[Step], setting: Setting, output: Path) -> list[dict[str, Any]]:
    """Run the steps one after the other, and write all results after each of them."""
    results: list[dict[str, Any]] = []
    for step in steps:
        print(f"{step.number}. {step.title}", flush=True)
        result = _run(step, setting, output.with_suffix(".partial"))
        print(f"    {result['state']}, {result['seconds']:.1f} s", flush=True)
        results.append(result)
        output.write_text(json.dumps({"setting": setting.describe(), "steps": results}, indent=1) + "\n")
    return results


def _run(step: Step, setting: Setting, partial: Path) -> dict[str, Any]:
    start, about = time.monotonic(), {"step": step.number, "title": step.title}
    if missing := step.missing():
        return about | {"state": f"skipped: no package {missing[0]}", "seconds": 0.0, "results": []}
    partial.write_text("")
    # forked: the libraries that the parent has imported need not be imported again; it never touches the device
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(step, setting, partial))
    child.start()
    assert child.pid
    state = f"stopped after its limit of {step.limit_s:.0f} s"
    try:
        child.join(step.limit_s)
        if child.exitcode is not None:
            state = "ok" if child.exitcode == 0 else f"failed with exit status {child.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the usual case: nothing of the step is left
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
    results = [json.loads(line) for line in partial.read_text().splitlines()]
    partial.unlink()
    return about | {"state": state, "seconds": time.monotonic() - start, "results": results}


def _in_child(step: Step, setting: Setting, partial: Path) -> None:
    os.setpgid(0, 0)  # so that what the step starts can be ended with it
    report = Report(partial)
    try:
        step.run(setting, report)
    except Exception:
        report.add("error", traceback.format_exc())
        raise SystemExit(1) from None
