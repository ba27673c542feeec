"""Steps 10 and 11: whole runs on Ray."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from gpu_checks.report import Report
from gpu_checks.setting import Setting

_ROOT = Path(__file__).resolve().parents[2]
_SHORT = ("train.iterations=3", "train.batch_episodes=16", "train.eval_episodes=0", "log.tensorboard=false")


_REPORTED = {  # of each iteration
    "time/iteration_s": "s",
    "throughput/chunks_per_s": "chunks/s",
    "throughput/inference_batch": "rows",
    "busy/inference": "",
    "busy/learner": "",
    "busy/env_workers": "",
    "learner/ratio_max": "",
    "learner/ess": "",
}


def train(setting: Setting, report: Report) -> None:
    """Step 10."""
    for mode in ("collocated", "pipelined", "hybrid"):
        _run(report, "configs/tabletop.yaml", f"placement.mode={mode}")
    _run(report, "configs/maniskill_ppo.yaml", "placement.mode=auto")
    if setting.on_gpu:
        _run(report, "configs/tabletop.yaml", "placement.offload=always")
        _run(report, "configs/tabletop.yaml", "learner.precision=bf16", "learner.zero_stage=1")


def train_large(setting: Setting, report: Report) -> None:
    """Step 11: random weights, so that no episode succeeds; PPO has a gradient all the same."""
    large = setting.size == "7b"
    shapes = [f"policy.size={setting.size}", f"env.image_size={256 if large else 64}"]
    short = ["algo=ppo", "env.tasks=[0]", "env.max_episode_steps=64", "train.iterations=5"]
    roomy = ["learner.activation_checkpointing=false", "policy.lora.merge_to_act=true"]
    half = setting.rows[-1] // 2
    for rows, extra in ((2 * half, [*roomy, "placement.compile_blocks=true"]), (half, [])) if large else ((half, []),):
        sizes = [f"learner.micro_batch={rows}", f"placement.max_batch={rows}", f"learner.precision={setting.dtype}"]
        _run(report, "configs/recipes/openvla_oft_lora_1gpu.yaml", *shapes, *sizes, *short, *extra)


def _run(report: Report, config: str, *overrides: str) -> None:
    """A mode that needs more devices than there are is refused: that is its result."""
    with tempfile.TemporaryDirectory() as folder:
        where = [f"log.dir={folder}", "log.name=check"]
        command = [sys.executable, "-m", "vla_rl.commands.cli", "train", config, *_SHORT, *overrides, *where]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        about = {"config": config, "overrides": " ".join(overrides)}
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-12:]
            report.add("training", f"status {done.returncode}: {chr(10).join(last)}", **about)
            return
        report.add("training", time.perf_counter() - start, "s", **about)
        run = Path(folder) / "check"
        metrics = (run / "metrics.jsonl").read_text().splitlines()
        for name, unit in _REPORTED.items():
            report.add(name, [round(json.loads(line).get(name, 0.0), 4) for line in metrics], unit, **about)
        for profile in run.glob("profile.yaml"):
            report.add("profile", yaml.safe_load(profile.read_text()), **about)
