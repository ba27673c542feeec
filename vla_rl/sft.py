"""`vla-rl sft`: a warm start by behaviour cloning.

    scripted expert (or official files) ──▶ HDF5 demonstrations ──▶ action chunks ──▶ cross-entropy on the bins ──▶ checkpoint
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from vla_rl.config import EnvConfig, RunConfig
from vla_rl.run_folder import metadata
from vla_rl.schedule import training_episode
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from envs.demos import Demonstrations
    from vla_rl.policies import OpenVLAOFT

_DEMO_STREAM = 1_000_003  # added to the run's seed: demonstrations and training never share a placement seed
_WARMUP_SHARE = 0.05


def sft_command(args: Any) -> int:
    """Collect or read demonstrations, clone them, save the checkpoint, evaluate it."""
    from vla_rl.config_loading import load_config
    from vla_rl.evaluation_run import evaluate_policy
    from vla_rl.machine import Machine

    config = load_config(args.config, [*args.overrides, "policy.checkpoint=null"], Machine.detect())
    figures = clone(config, Console())
    if config.train.eval_episodes:
        trained = config.model_copy(
            update={"policy": config.policy.model_copy(update={"checkpoint": config.sft.output})}
        )
        for greedy in (True, False):
            evaluation = evaluate_policy(trained, config.train.eval_episodes, greedy=greedy)
            Console().print(evaluation.text(), highlight=False)
            figures["greedy" if greedy else "sampled"] = evaluation.record()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def clone(config: RunConfig, console: Console) -> dict[str, Any]:
    """Behaviour cloning as ``config.sft`` says; writes the checkpoint and returns figures about it."""
    import torch

    from envs import env_spec
    from envs.demos import read_demonstrations
    from vla_rl.policies import save_policy

    spec = env_spec(config.env)
    paths = [Path(p) for p in config.sft.demos] or collect_demonstrations(config, spec, console)
    demos = read_demonstrations(
        paths,
        instructions=spec.instructions,
        views=spec.views,
        image_size=spec.image_size,
        proprio=bool(spec.proprio_dim),
    )
    console.print(f"{len(demos.offsets) - 1} demonstrations, {len(demos.actions)} steps", highlight=False)
    torch.set_num_threads(config.sft.threads)
    policy = _new_policy(config, spec, demos)
    start = time.monotonic()
    losses = _train(config, policy, demos, console)
    figures = {
        "demonstrations": len(demos.offsets) - 1,
        "steps": len(demos.actions),
        "updates": config.sft.updates,
        "final_loss": float(np.mean(losses[-100:])),
        "seconds": round(time.monotonic() - start, 1),
    }
    save_policy(policy, config.sft.output, figures | metadata(spec, sys.argv))
    console.print(f"checkpoint: {config.sft.output} ({figures['seconds']} s)", highlight=False)
    return figures


# --- demonstrations -------------------------------------------------------------------------------------------------


def collect_demonstrations(config: RunConfig, spec: EnvSpec, console: Console) -> list[Path]:
    """Let the scripted expert play ``sft.demo_episodes`` episodes in ``placement.env_workers`` processes."""
    folder = Path(config.log.dir) / f"demos-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    workers = config.placement.env_workers
    shares = [len(part) for part in np.array_split(np.arange(config.sft.demo_episodes), workers)]
    firsts = np.concatenate(([0], np.cumsum(shares)[:-1])).tolist()
    context = multiprocessing.get_context("spawn")
    counts = context.Queue()
    processes = []
    for worker, (first, share) in enumerate(zip(firsts, shares, strict=True)):
        path = folder / f"part{worker}.hdf5"
        arguments = (config.env, config.seed, config.sft.demo_noise, len(spec.instructions), first, share, path, counts)
        processes.append(context.Process(target=_collect, args=arguments, daemon=True))
        processes[-1].start()
    with Progress(console=console) as progress:
        task = progress.add_task("demonstrations", total=config.sft.demo_episodes)
        while not progress.finished:
            try:
                counts.get(timeout=1.0)
                progress.advance(task)
            except multiprocessing.queues.Empty if False else TimeoutError:
                pass
    for process in processes:
        process.join()
    return sorted(folder.glob("part*.hdf5"))


def _collect(
    env_config: EnvConfig, seed: int, noise: float, num_tasks: int, first: int, count: int, path: Path, counts: Any
) -> None:
    """In a process of its own: play until ``count`` demonstrations succeeded."""


def _new_policy(config: RunConfig, spec: EnvSpec, demos: Demonstrations) -> OpenVLAOFT:
    """Random weights, with the statistics of the demonstrations."""
    from vla_rl.policies import ActionCodec, Bounds, make_architecture, make_policy

    codec = ActionCodec.from_actions(demos.actions)
    proprio = Bounds.from_samples(demos.proprio) if spec.proprio_dim else None
    return make_policy(make_architecture(config.policy, spec), spec.instructions, codec, proprio, seed=config.seed)
