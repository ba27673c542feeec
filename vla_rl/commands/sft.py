"""`vla-rl sft`: a warm start by behaviour cloning.

scripted expert ──▶ HDF5 demonstrations ──▶ action chunks ──▶ cross-entropy over the bins ──▶ checkpoint
(or official files)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from vla_rl.commands.demonstrations import collect_demonstrations
from vla_rl.commands.inspect import require_agreement
from vla_rl.commands.metadata import metadata
from vla_rl.config.loading import Source
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.machine import Machine
from vla_rl.observability.console import ProgressDisplay, make_console
from vla_rl.placement.checks import load_checked_config

if TYPE_CHECKING:
    from envs.base.demonstration_records import Demonstrations
    from vla_rl.core.records import Array
    from vla_rl.observability.success_rate import Evaluation
    from vla_rl.policies.base.policy import Policy

_COARSE = 0.1  # of the range of the demonstrated actions: a larger error of an action is a loss
_LEAST_ERROR = 1e-3  # likewise, in physical units
_MOST_LOST = 0.1  # share of the demonstrated actions in one dimension
_WARMUP = 0.05  # share of the updates over which the learning rate rises from 0


@dataclass(frozen=True, slots=True)
class SftResult:
    """What behaviour cloning has left.

    Attributes:
        checkpoint: of the policy, a folder.
        figures: demonstrations, steps, updates, passes over the steps, final_loss, seconds.
        evaluations: with the most likely actions, then sampled; empty with train.eval_episodes=0.
    """

    checkpoint: Path
    figures: Mapping[str, Any]
    evaluations: tuple[Evaluation, ...]

    def __repr__(self) -> str:
        said = [f"loss {self.figures['final_loss']}", *(evaluation.text() for evaluation in self.evaluations)]
        return f"<SftResult {self.checkpoint}: {', '.join(said)}>"


def sft_command(args: Any) -> int:
    """Collect or read demonstrations, clone them, save the checkpoint and evaluate it."""
    result = run_sft(args.config, args.overrides)
    if args.json:
        kinds = {"greedy" if e.greedy else "sampled": e.record() for e in result.evaluations}
        write_json(args.json, {**result.figures, **kinds})
    return 0


def run_sft(source: Source, overrides: Sequence[str] | Mapping[str, Any]) -> SftResult:
    """The whole of `vla-rl sft`, as ``load_config`` reads its arguments. Raises UserError."""
    from vla_rl.commands.evaluate import evaluate_policy

    config = load_checked_config(source, _with(overrides, None))
    if config.sft.start_from is not None:
        config = load_checked_config(source, _with(overrides, config.sft.start_from))
    console = make_console()
    config = _with_free_output(config, console)
    figures = clone(config, console)
    evaluations = []
    if config.train.eval_episodes:
        merged = {f"policy.{name}": value for name, value in config.policy.merged.items()}
        trained = config.with_values({"policy.checkpoint": config.sft.output, **merged})
        for greedy in (True, False):
            evaluations.append(evaluate_policy(trained, config.train.eval_episodes, greedy=greedy))
            console.print(evaluations[-1].text(), highlight=False)
    return SftResult(Path(config.sft.output), figures, tuple(evaluations))


def _with(overrides: Sequence[str] | Mapping[str, Any], checkpoint: str | None) -> Sequence[str] | Mapping[str, Any]:
    """The overrides, and at last that of the policy's checkpoint: policy=NAME would reset it."""
    if isinstance(overrides, Mapping):
        rest = {key: value for key, value in overrides.items() if key != "policy.checkpoint"}
        return rest | {"policy.checkpoint": checkpoint}
    return [*overrides, f"policy.checkpoint={json.dumps(checkpoint)}"]


def _with_free_output(config: RunConfig, console: Console) -> RunConfig:
    """``sft.output`` beside the checkpoint that is there, if one is, so that none is lost."""
    wanted = Path(config.sft.output)
    if config.sft.overwrite and wanted.exists() and not _is_checkpoint(wanted):
        raise UserError(
            f"sft.overwrite=true sft.output={wanted}: that is no checkpoint, and would be lost; name another folder"
        )
    if config.sft.overwrite or not wanted.exists():
        return config
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    free = next(path for path in numbered if not path.exists())
    console.print(f"{wanted} exists: writing {free} (sft.overwrite=true replaces {wanted})", highlight=False)
    return config.with_values({"sft.output": str(free)})


def _is_checkpoint(folder: Path) -> bool:
    """Of a policy, not the folder of a run, which has metadata, too."""
    return (folder / "metadata.json").is_file() and not (folder / "config.yaml").exists()


def clone(config: RunConfig, console: Console) -> dict[str, Any]:
    """Train a policy on demonstrations as the group ``sft`` says, write its checkpoint and return figures about it.

    On a GPU if there is one; with ``policy.lora`` only adapters, which the checkpoint has merged into its weights.
    """
    from envs import env_spec
    from envs.base.config import DemosConfig
    from envs.base.demonstrations import demonstrations_for
    from vla_rl.core.devices.settings import set_up_torch
    from vla_rl.policies.base.blocks import prepare_training
    from vla_rl.policies.build import (
        build_policy,
        require_trainable,
        save_policy,
        torch_dtype,
    )

    require_trainable(config.policy)
    spec = env_spec(config.env)
    for note in (f"{spec.name}, assets: {spec.assets}", *spec.notes):
        console.print(note, highlight=False, markup=False)
    if config.sft.demos:
        demos = demonstrations_for(spec, [Path(path) for path in config.sft.demos], config.demos)
        if config.demos.check:
            require_agreement(config, demos, console)
    else:
        demos = demonstrations_for(spec, collect_demonstrations(config, spec, console), DemosConfig())
    for note in demos.notes:
        console.print(note, highlight=False)
    console.print(f"{demos.num_demonstrations} demonstrations, {len(demos.actions)} steps", highlight=False)
    device = "cuda" if Machine.detect().gpus else "cpu"
    set_up_torch(device, config.sft.threads, config.learner.matmul)
    dtype = torch_dtype(config.learner.precision)
    prompts = config.algo.prompts(spec.instructions)
    policy = build_policy(config.policy, spec, config.seed, prompts, learn_words=True, device=device, dtype=dtype)
    if config.policy.checkpoint is None or config.sft.new_statistics:
        policy.set_statistics(demos.actions, demos.proprio)
    else:
        _check_expressible(policy, demos.chunks(config.policy.chunk_size)[0], config.sft.start_from)
    prepare_training(policy, recomputed=config.learner.activation_checkpointing, compiled=config.learner.compile_blocks)
    start = time.monotonic()
    losses = _train(config, policy, demos, console)
    if not np.isfinite(losses).all():
        first = int(np.flatnonzero(~np.isfinite(losses))[0]) + 1
        raise UserError(
            f"cloning has diverged: the loss is not finite from update {first} on; lower sft.lr={config.sft.lr}"
        )
    figures = {
        "demonstrations": demos.num_demonstrations,
        "steps": len(demos.actions),
        "updates": config.sft.updates,
        "passes": round(config.sft.updates * config.sft.batch / len(demos.actions), 1),
        "final_loss": round(float(np.mean(losses[-100:])), 4),
        "seconds": round(time.monotonic() - start, 1),
    }
    save_policy(config.policy, policy, config.sft.output, figures | metadata(config, spec, sys.argv))
    console.print(f"checkpoint: {config.sft.output}, trained in {figures['seconds']} s", highlight=False)
    return figures


def _check_expressible(policy: Policy, chunks: Array, checkpoint: str | None) -> None:
    """Raises UserError if the policy's statistics do not let it choose demonstrated actions, [n, K, A].

    Percentiles cut off some of any data set; a dimension that the checkpoint's data never used would be lost.
    """
    record = policy.encode(chunks, np.random.default_rng(0))
    error = np.abs(policy.decode(record) - chunks).reshape(-1, chunks.shape[-1])
    low, high = (np.quantile(chunks.reshape(error.shape), q, axis=0) for q in (0.01, 0.99))
    lost = (error > np.maximum(_LEAST_ERROR, _COARSE * (high - low))).mean(axis=0)
    if lost.max() > _MOST_LOST:
        worst = int(lost.argmax())
        raise UserError(
            f"sft.start_from={checkpoint}: its statistics cannot express {lost[worst]:.0%} of the demonstrated actions "
            f"in dimension {worst}, which lie between {low[worst]:.2f} and {high[worst]:.2f}, unlike its own data. "
            "Take those of the demonstrations (sft.new_statistics=true), or start from a checkpoint of similar actions"
        )


def _train(config: RunConfig, policy: Policy, demos: Demonstrations, console: Console) -> list[float]:
    """``sft.updates`` steps of AdamW; returns the loss of each."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    from vla_rl.learner.master_weights import MasterWeights
    from vla_rl.policies.base.policy import PolicyInput

    sft, device = config.sft, next(policy.parameters()).device
    masters = MasterWeights(policy.trunk_parameters())
    optimizer = torch.optim.AdamW(masters.float32, lr=sft.lr, betas=(0.9, 0.95), weight_decay=sft.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(_WARMUP * sft.updates), sft.updates)  # decays to 0
    chunks, mask = demos.chunks(config.policy.chunk_size)
    rng, condition_rng = np.random.default_rng(config.seed), np.random.default_rng((config.seed, 1))
    loss_rng = np.random.default_rng((config.seed, 2))
    tasks = len(policy.instructions) // len(config.algo.conditions)
    parts = -(-sft.batch // config.learner.micro_batch)
    losses: list[float] = []
    policy.train()
    with ProgressDisplay(console, "cloning", sft.updates) as progress:
        for update in range(sft.updates):
            rows = rng.integers(len(chunks), size=sft.batch)
            images = shift_images(demos.images[rows], rng, sft.max_shift)
            conditions = config.algo.warm_start_conditions(condition_rng.random(sft.batch))
            task = demos.task[rows] + conditions * tasks
            masters.zero_grad()
            total = 0.0
            for part in np.array_split(np.arange(sft.batch), parts):
                no_time = np.zeros(len(part), np.float32)  # of no use: the value head is not trained
                seen = images[part], demos.proprio[rows[part]], task[part], no_time
                inputs = PolicyInput(*(torch.from_numpy(array).to(device) for array in seen))
                valid = mask[rows[part]]
                demonstrated = chunks[rows[part]], torch.from_numpy(valid).to(device)
                share = float(valid.sum() / mask[rows].sum())
                loss = policy.imitation_loss(inputs, *demonstrated, loss_rng, sft.bin_smoothing) * share
                loss.backward()
                total += loss.item()
            masters.take_gradients()
            torch.nn.utils.clip_grad_norm_(masters.float32, 1.0)
            optimizer.step()
            masters.write_back()
            schedule.step()
            losses.append(total)
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
