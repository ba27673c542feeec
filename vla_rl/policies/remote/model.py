"""A policy behind a network socket: sends each row to its server."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.core.actions import ActionSpace
from vla_rl.core.records import EnvSpec
from vla_rl.core.wire import PROMPT, STATE, image_keys
from vla_rl.policies.base.evaluated_policy import EvaluatedPolicy
from vla_rl.policies.base.policy import Decisions, PolicyInput
from vla_rl.policies.remote.client import RemoteClient
from vla_rl.policies.remote.config import RemoteConfig


class RemotePolicy(EvaluatedPolicy):
    """See the module. It has no weights."""

    def __init__(self, config: RemoteConfig, spec: EnvSpec) -> None:
        super().__init__()
        self._space: ActionSpace = spec.actions
        self._keys = image_keys(spec.views)
        self._client = RemoteClient(config, spec.action_dim)

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """The server's actions. It alone decides whether they are sampled. Raises UserError as ``RemoteClient``."""
        images, proprio = seen.images.cpu().numpy(), seen.proprio.float().cpu().numpy()
        prompts = [self.instructions[task] for task in seen.task.tolist()]
        requests = [
            dict(zip(self._keys, images[row], strict=True)) | {STATE: proprio[row], PROMPT: prompt}
            for row, prompt in enumerate(prompts)
        ]
        actions = torch.from_numpy(self._space.from_data(self._client.chunks(requests)))
        return Decisions({"actions": actions}, torch.zeros(actions.shape), torch.zeros(len(requests)))
