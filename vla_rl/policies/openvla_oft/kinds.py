"""The class of a policy, by the head of its architecture."""

from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.regression import OpenVLARegression
from vla_rl.policies.openvla_oft.trunk import OpenVLA


def policy_class(architecture: Architecture) -> type[OpenVLA]:
    kinds: dict[str, type[OpenVLA]] = {"tokens": OpenVLAOFT, "l1": OpenVLARegression}
    return kinds[architecture.head]
