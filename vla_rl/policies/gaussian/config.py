"""The config group ``policy`` of the convolutional Gaussian policy."""

from typing import Literal

from pydantic import Field

from vla_rl.core.schema import Positive
from vla_rl.policies.base.gaussian_config import GaussianPolicyConfig


class ConvGaussianConfig(GaussianPolicyConfig):
    """Four convolutions for each camera, then two layers; actions are normalized, with a learned deviation."""

    name: Literal["gaussian"] = "gaussian"
    channels: Positive = Field(32, description="Channels of each convolution.")
    width: Positive = Field(256, description="Width of the layers after the convolutions.")
