"""Step 12: the other policies that people have act and learn: OpenVLA, its continuous head, and π0."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_checks.report import Report
from gpu_checks.setting import Setting, config_of, forget_peak, observations, peak_gib, seconds, spec_of, wait
from vla_rl.policies.base.policy import Policy
from vla_rl.policies.build import build_policy, torch_dtype

_LARGE: dict[str, dict[str, Any]] = {  # keys of the policy, with the sizes that were published
    "openvla, one action of 7 tokens": {"size": "7b", "decoding": "autoregressive", "chunk_size": 1},
    "openvla_oft, continuous": {"size": "7b", "head": "l1"},
    "pi0": {"name": "pi0", "size": "base", "horizon": 50, "padded_dim": 32, "denoise_steps": 10},
}


def other_policies(setting: Setting, report: Report) -> None:
    """Step 12."""
    for name, keys in _LARGE.items():
        report.attempt("built", partial(_measure, setting, report, name, dict(keys)), "s", policy=name)


def _measure(setting: Setting, report: Report, name: str, keys: dict[str, Any]) -> float:
    """Seconds until the policy is on the device, after everything else about it has been reported."""
    if setting.size != "7b":
        keys["size"] = "nano"
    forget_peak(setting)
    start = time.perf_counter()
    config, dtype = config_of(setting, policy=keys), torch_dtype(setting.dtype)
    with torch.device(setting.device):  # a policy of the library is built there, too
        policy = build_policy(config.policy, spec_of(setting.size), 0, device=setting.device, dtype=dtype)
    policy.to(setting.device).eval()
    wait(setting)
    built = time.perf_counter() - start
    report.add("weights", sum(p.numel() for p in policy.parameters()), "parameters", policy=name)
    draws = config.policy.spec(spec_of(setting.size)).draws
    for rows in setting.rows:
        call = _act(setting, policy, draws, rows)
        report.attempt("act", partial(_rate, setting, call, rows), "chunks/s", policy=name, rows=rows)
    for rows in setting.rows[-3:-1] or setting.rows[:1]:
        _learn(setting, report, policy, draws, rows, name)
    return built


def _rate(setting: Setting, call: Callable[[], Any], rows: int) -> float:
    return rows / seconds(setting, call)


def _act(setting: Setting, policy: Policy, draws: Any, rows: int) -> Callable[[], Any]:
    rng = np.random.default_rng(rows)
    seen = observations(setting, rows)
    numbers = {
        name: torch.from_numpy(np.stack([drawn.draw(rng) for _ in range(rows)])).to(setting.device)
        for name, drawn in draws.items()
    }
    greedy = torch.zeros(rows, dtype=torch.bool, device=setting.device)
    return lambda: policy.act(seen, numbers, greedy, 1.0)


def _learn(setting: Setting, report: Report, policy: Policy, draws: Any, rows: int, name: str) -> None:
    """Forward and backward passes with all weights trained, and that they repeat the log-probabilities of acting."""
    chosen = _act(setting, policy, draws, rows)()
    record: dict[str, Tensor] = {key: tensor.clone() for key, tensor in chosen.record.items()}

    def forward_and_backward() -> Tensor:
        output = policy(observations(setting, rows), record, 1.0)
        (output.logprobs.mean() + output.values.mean()).backward()
        policy.zero_grad()
        return output.logprobs.detach()

    about: dict[str, Any] = {"policy": name, "rows": rows}
    forget_peak(setting)
    report.attempt("micro-batch", lambda: 1e3 * seconds(setting, forward_and_backward, 2), "ms", **about)
    report.add("peak memory", peak_gib(setting), "GiB", **about)
    difference = (forward_and_backward() - chosen.logprobs).abs().max()
    report.add("largest difference of log-probabilities", float(difference), **about)
