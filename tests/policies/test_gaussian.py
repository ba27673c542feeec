"""The base class of policies that bring a network alone; tests/tutorials trains one and reads it back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.policies.policy_helpers import check_elapsed_time
from tests.runtime_fakes import SPEC, A, K
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.gaussian import GaussianPolicy, GaussianPolicyConfig
from vla_rl.policies.base.policy import PolicyInput


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
