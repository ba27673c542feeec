"""Steps 8 and 9: how fast simulators draw on a GPU, and whether they can share it with training."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_checks.report import Report
from gpu_checks.setting import Setting, matrix_rate, wait
from vla_rl.core.records import EpisodeSpec

_DRAW = (
    "import sys; sys.path[:0] = sys.argv[1:3]; from gpu_checks.simulators import draw; draw(*map(int, sys.argv[3:]))"
)
_COMPUTE_S = 1.0  # seconds of matrix products between two looks at the env workers


def libero(setting: Setting, report: Report) -> None:
    """Step 8."""
    pixels, frames = (256, 300) if setting.on_gpu else (64, 4)
    alone = matrix_rate(setting)
    report.add("matrix products alone", alone / 1e12, "TFLOP/s")
    for workers in (1, 4, 16) if setting.on_gpu else (1,):
        report.add("frames", _draw_together(workers, pixels, frames, None), "frames/s", workers=workers, pixels=pixels)
    shares: list[float] = []
    busy = lambda: shares.append(_compute(setting) / alone)  # noqa: E731
    workers = 8 if setting.on_gpu else 1
    rate = _draw_together(workers, pixels, frames, busy)
    report.add("frames during matrix products", rate, "frames/s", workers=workers, pixels=pixels)
    report.add("rate of the matrix products during drawing", float(np.mean(shares)) if shares else 0.0, "of alone")


def _compute(setting: Setting) -> float:
    """FLOP/s of matrix products over about a second."""
    n = setting.matrix
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < _COMPUTE_S:
        _ = a @ b
        wait(setting)
        count += 1
    return 2.0 * n**3 * count / (time.perf_counter() - start)


def _draw_together(workers: int, pixels: int, frames: int, meanwhile: Any) -> float:
    """Frames per second of all workers together, each in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", _DRAW, str(root), str(root / "scripts"), str(pixels), str(frames)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(workers)]
    while meanwhile is not None and any(process.poll() is None for process in running):
        meanwhile()
    rates = []
    for process in running:
        out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a worker ended with status {process.returncode}: {error.strip().splitlines()[-1:]}")
        rates.append(float(out.split()[-1]))
    return sum(rates)


def draw(pixels: int, frames: int) -> None:
    """In a process of its own: play LIBERO, and print how many frames per second it draws."""
    from envs import make_env
    from envs.base import empty_observation
    from envs.libero.config import LiberoConfig

    env = make_env(LiberoConfig(image_size=pixels), 1)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0)])
    out = empty_observation(env.spec, 1)
    env.observe([0], out)
    start = time.perf_counter()
    for _ in range(frames):
        env.observe([0], out)
    print(frames / (time.perf_counter() - start))
    env.close()


def maniskill(setting: Setting, report: Report) -> None:
    """Step 9."""
    from envs import make_env
    from envs.base import empty_observation
    from envs.maniskill.config import ManiSkillConfig

    backend = "physx_cuda" if setting.on_gpu else "physx_cpu"
    for rows in (4, 64, 256) if setting.on_gpu else (2,):
        config = ManiSkillConfig(tasks=("PushCube-v1",), backend=backend, image_size=128)
        env, ids = make_env(config, rows), list(range(rows))
        env.reset(ids, [EpisodeSpec(id=i, task=0, seed=i) for i in ids])
        out = empty_observation(env.spec, rows)
        env.observe(ids, out)
        before = out.images.copy()
        report.add("rows that differ from the first", int((before != before[:1]).any((1, 2, 3, 4)).sum()), rows=rows)
        start = time.perf_counter()
        steps = env.step(ids, np.zeros((rows, 4, 7), np.float32)).num_steps.sum()
        report.add("control steps", float(steps / (time.perf_counter() - start)), "steps/s", rows=rows)
        start = time.perf_counter()
        env.observe(ids, out)
        report.add("images", rows / (time.perf_counter() - start), "frames/s", rows=rows)
        before = out.images.copy()
        env.reset([0], [EpisodeSpec(id=rows, task=0, seed=10**6)])
        env.observe(ids, out)
        changed = (out.images != before).any((1, 2, 3, 4))
        report.add("a partial reset changes its row alone", bool(changed[0] and not changed[1:].any()), rows=rows)
        env.close()
