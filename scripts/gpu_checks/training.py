"""Steps 4 and 5: micro-batches of a policy with adapters, and a whole update."""

from functools import partial
from typing import Any

import torch

from gpu_checks.inference import disagreement
from gpu_checks.learning import make_learner, super_batch
from gpu_checks.report import Report
from gpu_checks.setting import (
    Setting,
    config_of,
    fill_policy,
    flops_of,
    forget_peak,
    matrix_rate,
    observations,
    peak_gib,
    seconds,
)
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.base.blocks import blocks_of, checkpoint_activations, compile_blocks
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.lora import add_adapters
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.sizes import openvla_sizes


def adapted_policy(setting: Setting) -> OpenVLAOFT:
    """With adapters and a value head that train."""
    policy = fill_policy(setting)
    with torch.device(setting.device):
        add_adapters(policy, LoraConfig(), seed=0)
    return policy.to(next(policy.language_model.parameters()).dtype)


def micro_batches(setting: Setting, report: Report) -> None:
    """Step 4."""
    ceiling, policy = matrix_rate(setting), adapted_policy(setting).train()
    width, flops = next(policy.parameters()).element_size(), dict[int, float]()
    for kind in ("recomputed", "kept", "kept, compiled") if setting.on_gpu else ("recomputed", "kept"):
        _change(policy, kind)
        for rows in setting.rows:
            about: dict[str, Any] = {"rows": rows, "activations": kind}
            milliseconds = report.attempt("micro-batch", partial(_milliseconds, setting, policy, rows), "ms", **about)
            if milliseconds is None:
                policy.zero_grad()
                continue
            peak, taken = peak_gib(setting), milliseconds / 1e3
            if kind != "kept, compiled":  # which computes what "kept" does, and hides it from the counter
                flops[rows] = flops_of(partial(_pass, setting, policy, rows), training=True)
            report.add("share of the ceiling", flops[rows] / taken / ceiling, **about)
            tokens = policy.attended.shape[1] + policy.architecture.tail_tokens
            report.add("tokens", rows * tokens / taken, "tokens/s", **about)
            report.add("peak memory", peak, "GiB", **about)
            sizes = openvla_sizes(
                policy.architecture, LoraConfig(), element_size=width, activation_checkpointing=kind == "recomputed"
            )
            planned = (width * sizes.parameters + rows * sizes.train_each) / 2**30
            report.add("weights and activations by the plan", planned, "GiB", **about)
        policy.zero_grad()


def _change(policy: OpenVLAOFT, kind: str) -> None:
    """What was set before is undone, except that compiled blocks stay so."""
    if kind == "recomputed":
        checkpoint_activations(policy)
        return
    for block in blocks_of(policy):
        block.gradient_checkpointing = False
    if kind == "kept, compiled":
        compile_blocks(policy)


def _milliseconds(setting: Setting, policy: OpenVLAOFT, rows: int) -> float:
    forget_peak(setting)
    return 1e3 * seconds(setting, lambda: _pass(setting, policy, rows), max(1, setting.repeats // 3))


def _pass(setting: Setting, policy: OpenVLAOFT, rows: int) -> None:
    """Forward and backward."""
    tokens = torch.zeros(rows, 8, 7, dtype=torch.uint8, device=setting.device)
    output = policy(observations(setting, rows), {"tokens": tokens}, 1.0)
    (output.logprobs.mean() + output.values.mean()).backward()


def update(setting: Setting, report: Report) -> None:
    """Step 5."""
    micro_batch = setting.rows[-1] // 4 or 1
    settings = {"precision": "bf16", "zero_stage": 1, "micro_batch": micro_batch}
    config = config_of(setting, learner=settings)
    forget_peak(setting)
    learner = make_learner(config, adapted_policy(setting), setting.device)
    chunks = 8 * micro_batch
    for iteration in range(2):  # the first one also loads and allocates
        before = dict(learner.meter.seconds)
        learner.update(super_batch(config, 2, chunks // 2, iteration))
        for part, total in learner.meter.seconds.items():
            report.add(part, total - before.get(part, 0.0), "s", update=iteration, chunks=chunks)
    report.add("peak memory", peak_gib(setting), "GiB", micro_batch=micro_batch)
    rows = setting.rows[-1]
    for served in {rows, max(1, rows // 2 - 1)}:
        difference = disagreement(setting, PolicyRunner(learner.policy, config, None, setting.device), served, rows)
        report.add("largest difference of log-probabilities", difference, server_rows=served, learner_rows=rows)
