"""The small Gaussian policy: what it reads, that it learns what it is shown, and its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runtime_fakes import SPEC, A, K
from vla_rl.core.errors import UserError
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, check_policy, save_policy
from vla_rl.policies.gaussian.config import SmallGaussianConfig

TWO_VIEWS = replace(SPEC, views=("front", "wrist"))
CONFIG = SmallGaussianConfig(chunk_size=K, channels=8, width=32, initial_std=0.1)


def observations(count: int, seed: int = 0) -> PolicyInput:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 2, SPEC.image_size, SPEC.image_size, 3)).astype(np.uint8)
    proprio = rng.normal(size=(count, SPEC.proprio_dim)).astype(np.float32)
    task = rng.integers(0, len(SPEC.instructions), count)
    return PolicyInput(*map(torch.from_numpy, (images, proprio, task, np.zeros(count, np.float32))))


def test_actions_depend_on_each_camera_on_proprioception_and_on_the_task() -> None:
    policy, seen = build_policy(CONFIG, TWO_VIEWS, 0), observations(4)
    draws, greedy = {"noise": torch.randn(4, K, A)}, torch.tensor([False, False, True, True])
    decisions = policy.act(seen, draws, greedy, 0.5)
    record = decisions.record
    rated = policy(seen, record, 0.5)
    assert (rated.logprobs - decisions.logprobs).abs().max() < 1e-5
    spread = (record["actions"] - policy.act(seen, draws, ~greedy & False, 1e-6).record["actions"]).abs()
    assert spread[:2].max() > 0.01 > spread[2:].max(), "greedy rows take the mean"
    for changed in (
        replace(seen, images=torch.stack([seen.images[:, 0], seen.images[:, 1].flip(1)], 1)),
        replace(seen, images=torch.stack([seen.images[:, 0].flip(1), seen.images[:, 1]], 1)),
        replace(seen, proprio=seen.proprio + 1),
        replace(seen, task=(seen.task + 1) % len(SPEC.instructions)),
    ):
        assert (policy(changed, record, 0.5).logprobs - rated.logprobs).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"expected uint8 \[N, 2, 16, 16, 3\]"):
        policy(replace(seen, images=seen.images[:, :1]), record, 0.5)


def test_it_clones_what_it_is_shown_and_is_read_back(tmp_path: Path) -> None:
    policy, seen, rng = build_policy(CONFIG, TWO_VIEWS, 0), observations(16), np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (16, K, A)).astype(np.float32)
    policy.set_statistics(actions.reshape(-1, A), np.zeros((1, 0), np.float32))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = policy.imitation_loss(seen, actions, torch.ones(16, K, dtype=torch.bool), rng, 0.0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    save_policy(CONFIG, policy, tmp_path / "clone", {"origin": "test"})
    config = CONFIG.model_copy(update={"checkpoint": str(tmp_path / "clone")})
    again = build_policy(config, TWO_VIEWS, 1)
    assert all(
        torch.equal(x, y) for x, y in zip(policy.state_dict().values(), again.state_dict().values(), strict=True)
    )
    check_policy(config, TWO_VIEWS)
    with pytest.raises(UserError, match="views=2, not 1"):
        check_policy(config, SPEC)


def test_images_that_no_patches_fill_are_refused() -> None:
    with pytest.raises(UserError, match=r"env\.image_size=50: policy=gaussian needs a multiple of 16"):
        check_policy(CONFIG, replace(SPEC, image_size=50))
