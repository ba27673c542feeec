"""Step 13: off-policy control of a large policy: steps of critic and actor, and memory beside the plan."""

from typing import Any

import numpy as np
import torch

from gpu_checks.learning import make_off_policy_learner, super_batch
from gpu_checks.report import Report
from gpu_checks.setting import Setting, forget_peak, peak_gib, spec_of
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.placement.memory import expected_memory, learner_parts
from vla_rl.policies.build import build_policy, torch_dtype

_EPISODES, _CHUNKS = 2, 4  # of an update
_BATCH = 8  # on a GPU: chunks that pass through the policy at once
_STEPS_EACH = 0.125  # of the critic for a control step: 8 in an update of chunks of 8


def off_policy(setting: Setting, report: Report) -> None:
    """Step 13: ``td3_bc``, a continuous head with adapters, the critic on its features."""
    batch = _BATCH if setting.size == "7b" else 2
    algo: dict[str, Any] = {"name": "td3_bc", "critic_reads": "features", "batch": batch, "critic_warmup": 2}
    algo |= {"actor_every": 2, "updates_per_step": _STEPS_EACH}
    policy = {"name": "openvla_oft", "size": setting.size, "head": "l1", "lora": {}}
    learner_keys = {"precision": setting.dtype}
    config = RunConfig.model_validate({"policy": policy, "algo": algo, "learner": learner_keys})
    spec = spec_of(setting.size)
    forget_peak(setting)
    with torch.device(setting.device):  # a policy of the library is built there, too
        built = build_policy(config.policy, spec, 0, device=setting.device, dtype=torch_dtype(setting.dtype))
    learner = make_off_policy_learner(config, built, setting.device)
    report.add("peak memory before the first update", peak_gib(setting), "GiB")
    metrics: dict[str, float] = {}
    for iteration in range(2):  # the first one also allocates, and has the critic's steps without an actor
        before = dict(learner.meter.seconds)
        metrics = learner.update(super_batch(config, _EPISODES, _CHUNKS, iteration))
        for part, total in learner.meter.seconds.items():
            report.add(part, total - before.get(part, 0.0), "s", update=iteration)
        for name in ("critic_steps", "optimizer_steps", "skipped_steps"):
            report.add(name, metrics.get(f"learner/{name}", 0.0), update=iteration)
    report.add(
        "losses are finite", bool(np.isfinite([metrics["learner/critic_loss"], metrics["learner/actor_loss"]]).all())
    )
    planned = expected_memory(config, spec, Machine.detect())
    report.add("peak memory", peak_gib(setting), "GiB", batch=batch)
    for part, gib in learner_parts(config, planned, 1).items():
        if gib:
            report.add("by the plan", gib, "GiB", part=part)
    report.add("replay memory", metrics["learner/memory_gib"], "GiB", episodes=int(metrics["learner/memory_episodes"]))
    each = planned.kept / (config.train.iterations * config.train.batch_episodes)
    report.add("replay memory of one episode at most, by the plan", each, "GiB")
