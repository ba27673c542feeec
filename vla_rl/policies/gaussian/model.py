"""A small network and a Gaussian over action chunks around its output.

each camera ─► patches, merged ─► layer, norm ┐
proprioception, task ─────────────────────────┴► 2 layers ─► mean of the chunk, value
"""

import torch
from torch import Tensor, nn

from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.cameras import Cameras
from vla_rl.policies.base.gaussian import GaussianPolicy
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.gaussian.config import SmallGaussianConfig

_TASK_WIDTH = 16


class SmallGaussian(GaussianPolicy):
    """See ``GaussianPolicy``. Cameras have weights of their own."""

    Config = SmallGaussianConfig
    TASK_ROWS = ("tasks.weight",)
    config: SmallGaussianConfig

    def __init__(self, config: SmallGaussianConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, width=config.width)
        self.cameras = Cameras(len(spec.views), spec.image_size, config.channels, config.width)
        self.cameras.requires_grad_(not config.freezes_cameras)
        self.tasks = nn.Embedding(len(spec.instructions), _TASK_WIDTH)
        inputs = config.width * len(spec.views) + _TASK_WIDTH + spec.proprio_dim
        self.join = nn.Sequential(
            nn.Linear(inputs, config.width), nn.GELU(), nn.Linear(config.width, config.width), nn.GELU()
        )

    def features(self, seen: PolicyInput) -> Tensor:
        dtype, images = self.action_head.weight.dtype, seen.images
        found = images.to(dtype) if images.ndim == 2 else self.cameras(images)  # the first: from ``embedded``
        known = self.tasks(seen.task.long()), seen.proprio.to(dtype)
        features: Tensor = self.join(torch.cat([found, *known], dim=1))
        return features

    @torch.no_grad()
    def embedded(self, seen: PolicyInput) -> Tensor | None:
        return self.cameras(seen.images) if self.config.freezes_cameras else None
