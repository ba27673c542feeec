"""The config group ``policy`` of the small Gaussian policy."""

from typing import Literal

from pydantic import Field

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.core.schema import Positive
from vla_rl.policies.base.gaussian_config import GaussianPolicyConfig
from vla_rl.policies.base.patches import STRIDE


class SmallGaussianConfig(GaussianPolicyConfig):
    """Patches of each camera, then two layers; actions are normalized, with a learned deviation."""

    name: Literal["gaussian"] = "gaussian"
    channels: Positive = Field(64, description="Numbers that a patch of 8x8 pixels becomes.")
    width: Positive = Field(256, description="Width of the layers after that.")
    train_cameras: bool = Field(
        True,
        description="Whether the weights that read images are trained. false: they stay as the checkpoint has them "
        "(without one, they are trained); an off-policy learner whose critic reads features or state then passes each "
        "image through them once.",
    )

    @property
    def freezes_cameras(self) -> bool:
        """Whether the weights that read images stay as they are. Random ones never do: nothing could be cloned."""
        return not self.train_cameras and self.checkpoint is not None

    def check_images(self, env: EnvSpec) -> None:
        """Raise UserError if the simulator's images cannot be divided into patches."""
        if env.image_size % STRIDE:
            raise UserError(f"env.image_size={env.image_size}: policy=gaussian needs a multiple of {STRIDE}")
