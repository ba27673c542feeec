"""The base class of policies that bring a network alone; tests/tutorials trains one and reads it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.policies.policy_helpers import check_elapsed_time
from tests.runtime_fakes import SPEC, A, K
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.gaussian import GaussianPolicy, GaussianPolicyConfig
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.gaussian.config import SmallGaussianConfig
from vla_rl.policies.gaussian.model import SmallGaussian


class OfProprioception(GaussianPolicy):
    def __init__(self, config: GaussianPolicyConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, width=spec.proprio_dim)

    def features(self, seen: PolicyInput) -> Tensor:
        return seen.proprio


@pytest.mark.parametrize("value_time", [True, False])
def test_elapsed_time_reaches_the_value_alone(value_time: bool) -> None:
    config = GaussianPolicyConfig(chunk_size=K, value_time=value_time)
    policy = OfProprioception.build_policy(config, SPEC, seed=0)
    policy.set_instructions(SPEC.instructions)
    generator = torch.Generator().manual_seed(0)
    images, proprio = torch.zeros(3, 1, 16, 16, 3, dtype=torch.uint8), torch.rand(3, 3, generator=generator)
    seen = PolicyInput(images, proprio, torch.zeros(3).long(), torch.linspace(0, 1, 3))
    check_elapsed_time(policy, seen, {"noise": torch.randn(3, K, A, generator=generator)}, is_read=value_time)


def test_limits_of_actions_are_in_the_units_of_the_network() -> None:
    policy = OfProprioception.build_policy(GaussianPolicyConfig(chunk_size=K), SPEC, seed=0)
    policy.set_statistics(np.array([[-0.5] * A, [0.25] * A], np.float32), np.zeros((2, 3), np.float32))
    ends = np.stack([np.full((K, A), -1.0, np.float32), np.full((K, A), 1.0, np.float32)])
    limits = policy.action_limits(ends)
    assert limits[:, 0, 0].tolist() == pytest.approx([-1 - 0.5 / 0.375, 1 + 0.75 / 0.375])
    assert np.allclose(policy.decode({"actions": limits}), ends, atol=1e-6)


def test_a_checkpoint_knows_its_tasks_by_their_instructions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three = replace(SPEC, instructions=("first", "second", "third"))
    made = SmallGaussian.build_policy(SmallGaussianConfig(chunk_size=K), three, seed=0)
    SmallGaussian.save_policy(made, tmp_path / "made", {})
    config = SmallGaussianConfig(chunk_size=K, checkpoint=str(tmp_path / "made"))
    for chosen in [["third"], ["second", "first"], ["first", "second", "third"]]:
        policy = SmallGaussian.build_policy(config, replace(SPEC, instructions=tuple(chosen)), seed=1)
        rows = [three.instructions.index(text) for text in chosen]
        assert torch.equal(policy.tasks.weight, made.tasks.weight[rows])
        assert torch.equal(policy.action_head.weight, made.action_head.weight)
    assert not caplog.messages
    policy = SmallGaussian.build_policy(config, replace(SPEC, instructions=("third", "new")), seed=1)
    assert torch.equal(policy.tasks.weight, torch.stack([made.tasks.weight[2], made.tasks.weight.mean(dim=0)]))
    assert caplog.messages == [f"policy.checkpoint={tmp_path / 'made'} has not been trained on 'new'"]


def test_a_checkpoint_that_names_no_tasks_has_those_of_the_simulator(tmp_path: Path) -> None:
    SmallGaussian.save_policy(SmallGaussian.build_policy(SmallGaussianConfig(chunk_size=K), SPEC, seed=0), tmp_path, {})
    about = json.loads((tmp_path / "policy.json").read_text())
    del about["instructions"]
    (tmp_path / "policy.json").write_text(json.dumps(about))
    config = SmallGaussianConfig(chunk_size=K, checkpoint=str(tmp_path))
    SmallGaussian.build_policy(config, SPEC, seed=1)
    more = replace(SPEC, instructions=(*SPEC.instructions, "another"))
    with pytest.raises(UserError, match=r"tasks.weight is \[\d, 16\], expected \[\d, 16\]"):
        SmallGaussian.build_policy(config, more, seed=1)
