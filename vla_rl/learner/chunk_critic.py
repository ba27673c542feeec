"""The critic of off-policy algorithms: an ensemble that rates a chunk in a state.

It reads images by an encoder of its own, or the policy's features, and in both cases proprioception, the elapsed time
and the task. LayerNorm keeps the ratings of unseen chunks within bounds (RLPD, arXiv:2302.02948).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.cameras import Cameras
from vla_rl.policies.base.policy import PolicyInput

_TASK_WIDTH = 16
_CAMERA_WIDTH, _CHANNELS = 128, 64


class EnsembleCritic(nn.Module):
    """Q(s, a) of each member: [N, members]."""

    def __init__(
        self, reads: Literal["images", "features"], spec: EnvSpec, features: int, chunk: int, members: int, width: int
    ) -> None:
        """``features``: numbers of the policy's; ``chunk``: of one chunk of actions."""
        super().__init__()
        images = len(spec.views), spec.image_size
        self.cameras = Cameras(*images, _CHANNELS, _CAMERA_WIDTH) if reads == "images" else None
        self.tasks = nn.Embedding(len(spec.instructions), _TASK_WIDTH)
        seen = features if self.cameras is None else _CAMERA_WIDTH * len(spec.views)
        self.scale = nn.LayerNorm(seen)
        inputs = seen + spec.proprio_dim + 1 + _TASK_WIDTH + chunk
        self.members = nn.ModuleList(_network(inputs, width) for _ in range(members))

    def state(self, seen: PolicyInput, features: Tensor) -> Tensor:
        """[N, S], what all members read; ``features`` [N, F] of the policy."""
        found = features.float() if self.cameras is None else self.cameras(seen.images)
        known = seen.proprio.float(), seen.elapsed.float()[:, None], self.tasks(seen.task.long())
        return torch.cat([self.scale(found), *known], dim=1)

    def rate(self, state: Tensor, actions: Tensor) -> Tensor:
        """[N, S] and [N, K, A] -> [N, members]."""
        inputs = torch.cat([state, actions.flatten(1)], dim=1)
        return torch.cat([member(inputs) for member in self.members], dim=1)


def _network(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()),
        nn.Linear(width, 1),
    )
