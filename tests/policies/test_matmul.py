"""`learner.matmul=bf16`: what rounding the factors of matrix products changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from envs import env_spec, make_env
from envs.base import empty_observation
from vla_rl.config.loading import load_config
from vla_rl.core.machine import multiplies_bf16
from vla_rl.core.records import EpisodeSpec
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy

ROWS = 32


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the processor's instructions compute: factors in bfloat16, sums in float32."""
    product = x.bfloat16().float() @ weight.bfloat16().float().T
    return product if bias is None else product + bias


@pytest.mark.libero
def test_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds that docs/placement.md states: the default run's policy on observations of its task."""
    config = load_config("configs/libero_ppo.yaml")
    spec = env_spec(config.env)
    policy, seen = build_policy(config.policy, spec, 0), _observations(config)
    draws = {"uniforms": torch.rand(ROWS, 8, 7, generator=torch.Generator().manual_seed(0))}
    record = policy.eval().act(seen, draws, torch.zeros(ROWS, dtype=torch.bool), 0.2).record

    def learn() -> tuple[Tensor, Tensor, Tensor]:
        policy.train().zero_grad()
        output = policy(seen, record, 0.2, True)
        (output.logprobs.exp().mean() + 0.1 * output.values.square().mean()).backward()
        gradients = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
        return output.logprobs.detach(), output.values.detach(), torch.cat(gradients)

    logprobs, values, gradients = learn()
    monkeypatch.setattr("torch.nn.functional.linear", rounded_linear)
    rounded, rounded_values, rounded_gradients = learn()
    error = (rounded - logprobs).abs()
    assert 1e-5 < error.mean() < 0.003
    assert error.max() < 0.6
    assert (rounded_values - values).abs().max() < 0.5 * values.std()
    assert torch.cosine_similarity(gradients, rounded_gradients, dim=0) > 0.99


@pytest.mark.parametrize(("flags", "does"), [("avx512f amx_bf16", True), ("avx512f avx512_bf16", False), ("", False)])
def test_only_amx_multiplies_float32_in_bf16(flags: str, does: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : fpu {flags} sse")
    assert multiplies_bf16() is does


@pytest.mark.skipif(not multiplies_bf16(), reason="this processor has no products of bfloat16")
def test_torch_rounds_so() -> None:
    """In a process of its own, since the setting is one of the whole process."""
    code = (
        "import torch\n"
        "from vla_rl.core.devices.settings import set_up_torch\n"
        "x, w = torch.randn(256, 512), torch.randn(384, 512)\n"
        "exact = torch.nn.functional.linear(x.double(), w.double())\n"
        "rounded = torch.nn.functional.linear(x.bfloat16().double(), w.bfloat16().double())\n"
        "set_up_torch('cpu', 1, 'bf16')\n"
        "found = torch.nn.functional.linear(x, w).double()\n"
        "assert (found - rounded).norm() < 0.01 * (rounded - exact).norm()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def _observations(config: Any) -> PolicyInput:
    env, rng = make_env(config.env, 1), np.random.default_rng(0)
    view, images, proprio = empty_observation(env.spec, 1), [], []
    for state in range(2):
        env.reset([0], [EpisodeSpec(id=0, task=0, seed=state, init_state=state)])
        for _ in range(ROWS // 2):
            env.observe([0], view)
            images.append(view.images[0].copy())
            proprio.append(view.proprio[0].copy())
            env.step([0], rng.uniform(-0.5, 0.5, (1, 8, 7)).astype(np.float32))
    env.close()
    seen = torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(proprio))
    return PolicyInput(*seen, torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS))
