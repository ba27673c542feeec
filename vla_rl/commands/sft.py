"""`vla-rl sft`: a warm start by behaviour cloning.

scripted expert ──▶ HDF5 demonstrations ──▶ action chunks ──▶ cross-entropy over the bins ──▶ checkpoint
(or official files)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from vla_rl.commands.demonstrations import collect_demonstrations
from vla_rl.commands.run_folder import metadata
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import write_json
from vla_rl.observability.console import ProgressDisplay, make_console
from vla_rl.placement.checks import load_checked_config

if TYPE_CHECKING:
    from envs.base.demonstrations import Demonstrations
    from vla_rl.policies.base.policy import Policy

_WARMUP = 0.05  # share of the updates over which the learning rate rises from 0


def sft_command(args: Any) -> int:
    """Collect or read demonstrations, clone them, save the checkpoint and evaluate it."""
    from vla_rl.commands.evaluate import evaluate_policy

    config = load_checked_config(args.config, [*args.overrides, "policy.checkpoint=null"])
    config = config.with_values({f"policy.{name}": value for name, value in config.policy.merged.items()})
    console = make_console()
    figures = clone(config, console)
    if config.train.eval_episodes:
        trained = config.with_values({"policy.checkpoint": config.sft.output})
        for greedy in (True, False):
            evaluation = evaluate_policy(trained, config.train.eval_episodes, greedy=greedy)
            console.print(evaluation.text(), highlight=False)
            figures["greedy" if greedy else "sampled"] = evaluation.record()
    if args.json:
        write_json(args.json, figures)
    return 0


def clone(config: RunConfig, console: Console) -> dict[str, Any]:
    """Train a policy on demonstrations as the group ``sft`` says, write its checkpoint and return figures about it."""
    import torch

    from envs import env_spec
    from envs.base.demonstrations import read_demonstrations
    from vla_rl.policies.build import policy_for_demonstrations, save_policy

    spec = env_spec(config.env)
    console.print(f"{spec.name}, assets: {spec.assets}", highlight=False)
    paths = [Path(p) for p in config.sft.demos] or collect_demonstrations(config, spec, console)
    demos = read_demonstrations(
        paths, instructions=spec.instructions, views=spec.views, image_size=spec.image_size, proprio=spec.proprio_dim
    )
    console.print(f"{demos.num_demonstrations} demonstrations, {len(demos.actions)} steps", highlight=False)
    torch.set_num_threads(config.sft.threads)
    policy = policy_for_demonstrations(config.policy, spec, demos.actions, demos.proprio, config.seed)
    policy.set_instructions(config.algo.prompts(spec.instructions))
    start = time.monotonic()
    losses = _train(config, policy, demos, console)
    figures = {
        "demonstrations": demos.num_demonstrations,
        "steps": len(demos.actions),
        "updates": config.sft.updates,
        "final_loss": round(float(np.mean(losses[-100:])), 4),
        "seconds": round(time.monotonic() - start, 1),
    }
    save_policy(config.policy, policy, config.sft.output, figures | metadata(spec, sys.argv))
    console.print(f"checkpoint: {config.sft.output}, trained in {figures['seconds']} s", highlight=False)
    return figures


def _train(config: RunConfig, policy: Policy, demos: Demonstrations, console: Console) -> list[float]:
    """``sft.updates`` steps of AdamW; returns the loss of each."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    from vla_rl.policies.base.policy import PolicyInput

    sft = config.sft
    parameters = policy.trunk_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=sft.lr, betas=(0.9, 0.95), weight_decay=sft.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(_WARMUP * sft.updates), sft.updates)  # decays to 0
    chunks, mask = demos.chunks(config.policy.chunk_size)
    rng, condition_rng = np.random.default_rng(config.seed), np.random.default_rng((config.seed, 1))
    loss_rng = np.random.default_rng((config.seed, 2))
    tasks = len(policy.instructions) // len(config.algo.conditions)
    losses: list[float] = []
    policy.train()
    with ProgressDisplay(console, "cloning", sft.updates) as progress:
        for update in range(sft.updates):
            rows = rng.integers(len(chunks), size=sft.batch)
            images = shift_images(demos.images[rows], rng, sft.max_shift)
            no_time = np.zeros(sft.batch, np.float32)  # of no use: the value head is not trained
            conditions = config.algo.demonstration_conditions(condition_rng.random(sft.batch))
            task = demos.task[rows] + conditions * tasks
            seen = PolicyInput(*map(torch.from_numpy, (images, demos.proprio[rows], task, no_time)))
            demonstrated = chunks[rows], torch.from_numpy(mask[rows])
            loss = policy.imitation_loss(seen, *demonstrated, loss_rng, sft.bin_smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(update + 1, f"loss {np.mean(losses[-50:]):.3f}")
    policy.eval()
    return losses


def shift_images(images: np.ndarray, rng: np.random.Generator, max_shift: int) -> np.ndarray:
    """Shift all views of a row by the same random number of pixels; repeat the edge to fill the gap."""
    if max_shift == 0:
        return images
    size = images.shape[2]
    padded = np.pad(images, ((0, 0), (0, 0), (max_shift, max_shift), (max_shift, max_shift), (0, 0)), mode="edge")
    offsets = rng.integers(2 * max_shift + 1, size=(len(images), 2))
    return np.stack([p[:, y : y + size, x : x + size] for p, (y, x) in zip(padded, offsets, strict=True)])
