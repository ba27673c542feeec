"""Steps 1 to 3: acting, and that server and learner compute the same log-probabilities."""

import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu_checks.learning import make_learner, shared_folder, super_batch
from gpu_checks.report import Report
from gpu_checks.setting import (
    Setting,
    config_of,
    copy_rates,
    fill_policy,
    flops_of,
    forget_peak,
    matrix_rate,
    observations,
    peak_gib,
    seconds,
    spec_of,
    wait,
)
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
from vla_rl.core.records import Observation, join_records
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.base.blocks import compile_blocks
from vla_rl.policies.base.policy import Policy
from vla_rl.policies.build import build_policy
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.lora import MergedAdapters, add_adapters
from vla_rl.policies.openvla_oft.model import OpenVLAOFT

_ROWS, _FEWER = 12, 5  # equal and unequal batch sizes
_ADAPTED = ("with adapters", "with merged adapters")


def same_numbers(setting: Setting, report: Report) -> None:
    """Step 1."""
    for dtype in ("fp32", "bf16"):
        small = replace(setting, size="nano", dtype=dtype)
        config = config_of(small, learner={"precision": dtype, "zero_stage": int(dtype == "bf16"), "lr": 1e-3})
        spec = spec_of("nano")
        learner = make_learner(config, build_policy(config.policy, spec, 0), setting.device)
        for iteration in range(2):  # ZeRO's optimizers tell the gradient norm of the step before
            metrics = learner.update(super_batch(config, 4, 3, iteration))
        report.add("gradient norm", metrics["learner/grad_norm"], dtype=dtype)
        with shared_folder() as folder:
            create_weight_buffers(folder / "weights", learner.published_nbytes())
            learner.publish(2, WeightPublisher(folder / "weights"))
            served = build_policy(config.policy, spec, 9).to(next(learner.policy.parameters()).dtype)
            runner = PolicyRunner(served, config, WeightReader(folder / "weights"), setting.device)
            report.add("version after refresh", runner.refresh(), dtype=dtype)
        report.add("weights differ", _differing(learner.policy, served), "tensors", dtype=dtype)
        for rows in (_ROWS, _FEWER):
            report.add(
                "largest difference of log-probabilities",
                disagreement(small, runner, rows, _ROWS, learner.policy),
                dtype=dtype,
                server_rows=rows,
                learner_rows=_ROWS,
            )
        if setting.on_gpu:
            graphs = config.with_values({"placement.cuda_graphs": True})
            recorded = PolicyRunner(served, graphs, None, setting.device)
            report.attempt(
                "largest difference of log-probabilities, CUDA graphs",
                partial(disagreement, small, recorded, _FEWER, _ROWS, learner.policy),
                dtype=dtype,
            )


def _differing(ours: Policy, theirs: Policy) -> int:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return sum(not torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def disagreement(
    setting: Setting, runner: PolicyRunner, rows: int, learner_rows: int, policy: Policy | None = None
) -> float:
    """Of log-probabilities: ``rows`` at a time on the server, all at once on the learner's policy (None: the same)."""
    policy = policy or runner.policy
    seen = observations(setting, learner_rows)
    records, logprobs = [], []
    for start in range(0, learner_rows, rows):
        part = [getattr(seen, f.name)[start : start + rows].cpu().numpy() for f in fields(seen)]
        uniforms = np.random.default_rng(start).random((len(part[0]), 8, 7)).astype(np.float32)
        answer = runner.act(Observation(*part), {"uniforms": uniforms}, np.zeros(len(part[0]), bool))
        records.append(answer.record)
        logprobs.append(torch.from_numpy(answer.logprobs))
    record = {name: torch.from_numpy(array).to(setting.device) for name, array in join_records(records).items()}
    output = policy(seen, record, 1.0)
    return float((output.logprobs.cpu() - torch.cat(logprobs)).abs().max())


def fill(setting: Setting, report: Report) -> None:
    """Step 2."""
    forget_peak(setting)
    start = time.perf_counter()
    policy = fill_policy(setting)
    wait(setting)
    report.add("seconds", time.perf_counter() - start, "s")
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    report.add("weights", weights / 2**30, "GiB")
    report.add("peak memory", peak_gib(setting), "GiB")
    with torch.no_grad():
        finite = bool(policy.distribution(observations(setting, 1), 1.0)[0].isfinite().all())
    report.add("outputs are finite", finite)


def act(setting: Setting, report: Report) -> None:
    """Step 3."""
    ceiling = matrix_rate(setting)
    report.add("bf16 matrix product", ceiling / 1e12, "TFLOP/s", size=setting.matrix)
    for way, rate in copy_rates(setting).items():
        report.add(f"copy {way}", rate / 1e9, "GB/s")
    policy = fill_policy(setting).eval()
    for kind in ("eager", "CUDA graphs", *_ADAPTED, "compiled") if setting.on_gpu else ("eager", *_ADAPTED):
        _change(setting, policy, kind)
        for rows in setting.rows:
            report.attempt(f"act, {kind}", partial(_act_rate, setting, policy, kind, rows), "chunks/s", rows=rows)
            if kind == "eager":
                _shares(setting, report, policy, rows, ceiling)


def _change(setting: Setting, policy: OpenVLAOFT, kind: str) -> None:
    """What is changed stays: adapters, then merged ones, which cost nothing, then compiled blocks."""
    if kind == "compiled":
        compile_blocks(policy)
    elif kind == _ADAPTED[0]:
        with torch.device(setting.device):
            add_adapters(policy, LoraConfig(), seed=0)
        policy.to(next(policy.language_model.parameters()).dtype)
    elif kind == _ADAPTED[1]:
        MergedAdapters(policy.adapted)()


def _call(setting: Setting, policy: OpenVLAOFT, rows: int) -> Callable[[], Any]:
    seen = observations(setting, rows)
    draws = {"uniforms": torch.rand(rows, 8, 7, device=setting.device)}
    greedy = torch.zeros(rows, dtype=torch.bool, device=setting.device)
    return lambda: policy.act(seen, draws, greedy, 1.0)


def _act_rate(setting: Setting, policy: OpenVLAOFT, kind: str, rows: int) -> float:
    call = _call(setting, policy, rows)
    if kind == "CUDA graphs":
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return rows / seconds(setting, graph.replay)
    return rows / seconds(setting, call)


def _shares(setting: Setting, report: Report, policy: OpenVLAOFT, rows: int, ceiling: float) -> None:
    call = _call(setting, policy, rows)
    taken = seconds(setting, call)
    report.add("share of the ceiling", flops_of(call) / taken / ceiling, rows=rows)
    if not setting.on_gpu:
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(setting.repeats):
            call()
        wait(setting)
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / setting.repeats
    report.add("idle share of the GPU", max(0.0, 1 - busy / taken), rows=rows)
