"""Step 10: whole runs on Ray."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_checks.report import Report
from gpu_checks.setting import Setting

_ROOT = Path(__file__).resolve().parents[2]
_SHORT = ("train.iterations=3", "train.batch_episodes=16", "train.eval_episodes=0", "log.tensorboard=false")


def train(setting: Setting, report: Report) -> None:
    """Step 10."""
    for mode in ("collocated", "pipelined", "hybrid"):
        _run(report, "configs/tabletop.yaml", f"placement.mode={mode}")
    _run(report, "configs/maniskill_ppo.yaml", "placement.mode=auto")
    if setting.on_gpu:
        _run(report, "configs/tabletop.yaml", "placement.offload=always")
        _run(report, "configs/tabletop.yaml", "learner.precision=bf16", "learner.zero_stage=1")


def _run(report: Report, config: str, *overrides: str) -> None:
    """A mode that needs more devices than there are is refused: that is its result."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.json"
        where = [f"log.dir={folder}", "--json", str(metrics)]
        command = [sys.executable, "-m", "vla_rl.commands.cli", "train", config, *_SHORT, *overrides, *where]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        about = {"config": config, "overrides": " ".join(overrides)}
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            report.add("training", f"status {done.returncode}: {' '.join(last)}", **about)
            return
        report.add("training", time.perf_counter() - start, "s", **about)
        found = json.loads(metrics.read_text())["metrics"]
        report.add("largest probability ratio", found["learner/ratio_max"], **about)
