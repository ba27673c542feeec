"""The critic of off-policy algorithms: an ensemble that rates a chunk in a state.

It reads images by an encoder of its own, the policy's features or the simulator's state; in all cases also
proprioception, the elapsed time and the task. LayerNorm keeps the ratings of unseen chunks within bounds (RLPD,
arXiv:2302.02948).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from algos.off_policy import CAMERA_WIDTH, CHANNELS, TASK_WIDTH
from vla_rl.core.records import EnvSpec
from vla_rl.learner.readout import Readout, Scalar
from vla_rl.policies.base.cameras import Cameras
from vla_rl.policies.base.policy import PolicyInput

_LEAST_DEVIATION = 1e-3  # meters, or radians


class EnsembleCritic(nn.Module):
    """Q(s, a) of each member: [N, members]; V(s), if it has ``values``. It rates what a simulator would execute."""

    limits: Tensor  # [2, K A], or [2, 1]

    def __init__(
        self,
        reads: Literal["images", "features", "state"],
        spec: EnvSpec,
        given: int,
        chunk: int,
        members: int,
        width: int,
        *,
        readout: Readout | None = None,
        values: bool = False,
        limits: Tensor | None = None,
    ) -> None:
        """``given``: numbers of the features or of the state; ``chunk``: of one chunk of actions.

        ``limits`` float32 [2, K, A]: the lowest and the highest of these actions; to the simulator, all beyond are the
        same. None: no limits.
        """
        super().__init__()
        ends = torch.tensor([[-torch.inf], [torch.inf]]) if limits is None else limits.flatten(1)
        self.register_buffer("limits", ends, persistent=False)
        self.readout = readout or Scalar()
        images = len(spec.views), spec.image_size
        self.cameras = Cameras(*images, CHANNELS, CAMERA_WIDTH) if reads == "images" else None
        self.tasks = nn.Embedding(len(spec.instructions), TASK_WIDTH)
        seen = given if self.cameras is None else CAMERA_WIDTH * len(spec.views)
        self.scale = Standardized(seen) if reads == "state" else nn.LayerNorm(seen)
        inputs = seen + spec.proprio_dim + 1 + TASK_WIDTH + chunk
        self.members = nn.ModuleList(_network(inputs, width, self.readout) for _ in range(members))
        self.values = _network(inputs - chunk, width, Scalar()) if values else None

    def state(self, seen: PolicyInput, given: Tensor) -> Tensor:
        """[N, S], what all members read; ``given`` [N, F]: the policy's features, or the simulator's state."""
        found = given.float() if self.cameras is None else self.cameras(seen.images)
        known = seen.proprio.float(), seen.elapsed.float()[:, None], self.tasks(seen.task.long())
        return torch.cat([self.scale(found), *known], dim=1)

    def rate(self, state: Tensor, actions: Tensor) -> Tensor:
        """[N, S] and [N, K, A] -> [N, members]."""
        return self.readout.value(self._found(state, actions))

    def towards(self, state: Tensor, actions: Tensor, aim: Tensor) -> tuple[Tensor, Tensor]:
        """The loss towards the ratings ``aim`` [N], and the ratings as they are: as ``rate``."""
        found = self._found(state, actions)
        return self.readout.loss(found, aim), self.readout.value(found)

    def _found(self, state: Tensor, actions: Tensor) -> Tensor:
        inputs = torch.cat([state, actions.flatten(1).clamp(*self.limits)], dim=1)
        return torch.stack([member(inputs) for member in self.members], dim=1)

    def value(self, state: Tensor) -> Tensor:
        """[N, S] -> [N]. Raises RuntimeError without ``values``."""
        if self.values is None:
            raise RuntimeError("this critic rates chunks alone: make it with values=True")
        found: Tensor = self.values(state)
        return found.squeeze(1)


class Standardized(nn.Module):
    """Numbers of very different sizes, by the mean and the deviation that ``fit`` has found; until then as they are."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("deviation", torch.ones(size))

    def fit(self, found: Tensor) -> None:
        """Of float32 [n, size]. Numbers that hardly change there must not become large when they do.

        Raises ValueError if there are no numbers.
        """
        if not found.numel():
            raise ValueError(f"no states to read ({list(found.shape)}): env workers must record them (keeps_state)")
        self.mean.copy_(found.mean(dim=0))
        self.deviation.copy_(found.std(dim=0).clamp(min=_LEAST_DEVIATION))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


def _network(inputs: int, width: int, readout: Readout) -> nn.Sequential:
    """Its ratings begin at 0: the aims of its first steps then hold rewards, and no random offset."""
    rating = nn.Linear(width, readout.outputs)
    nn.init.zeros_(rating.weight)
    with torch.no_grad():
        rating.bias.copy_(readout.first())
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()),
        rating,
    )
