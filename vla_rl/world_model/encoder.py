"""What the world model sees of a state: the policy that the run began with, frozen.

Its features (what its value head reads) and the chunk that it would most likely choose: both depend on image,
instruction and proprioception, and both come by the contract that every policy fulfils. They are frozen, so that what
the model has learned stays valid while the policy moves.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from vla_rl.config.world_model import ENCODER_ROWS
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import Array, PolicySpec, Trajectory
from vla_rl.policies.base.policy import Policy, PolicyInput


class FrozenEncoder:
    """Encodes trajectories. ``policy`` is not changed, and must not be changed by others."""

    def __init__(
        self,
        policy: Policy,
        spec: PolicySpec,
        temperature: float,
        device: str,
        lease: DeviceLease = nullcontext,  # of the device, if others share it; for each forward pass
    ) -> None:
        self._lease = lease
        self._policy = policy.to(device).eval()
        self._spec, self._temperature, self._device = spec, temperature, torch.device(device)

    def features(self, trajectory: Trajectory) -> Array:
        """float32 [T, F] of the observations before each chunk."""
        count = trajectory.num_chunks
        task = np.full(count, trajectory.episode.task, np.int32)
        return self.encode(trajectory.images[:count], trajectory.proprio[:count], task, trajectory.elapsed[:count])

    def encode(self, images: Array, proprio: Array, task: Array, elapsed: Array) -> Array:
        """float32 [n, F] of n observations."""
        observation = images, proprio, task, elapsed
        parts = [
            self._encode(*(a[i : i + ENCODER_ROWS] for a in observation)) for i in range(0, len(task), ENCODER_ROWS)
        ]
        return np.concatenate(parts)

    def likely_chunks(self, features: Array) -> Array:
        """float32 [n, K A]: the part of the features that is the most likely chunk, normalized."""
        return features[:, -self._spec.chunk_size * self._spec.action_dim :]

    def actions(self, trajectory: Trajectory) -> Array:
        """float32 [T, K, A]: the chosen chunks, in physical units."""
        return self._policy.decode(trajectory.record)

    @torch.no_grad()
    def _encode(self, *observation: Array) -> Array:
        seen = PolicyInput(*(torch.from_numpy(np.ascontiguousarray(a)).to(self._device) for a in observation))
        count = len(seen.task)
        draws = {n: torch.zeros(count, *d.shape, device=self._device) for n, d in self._spec.draws.items()}
        greedy = torch.ones(count, dtype=torch.bool, device=self._device)
        with self._lease():
            likely = self._policy.act(seen, draws, greedy, self._temperature)
            features = self._policy(seen, likely.record, self._temperature).features
            # copies to the host: the device has finished
            state, record = features.float().cpu().numpy(), {name: x.cpu().numpy() for name, x in likely.record.items()}
        chunk = self._policy.normalized_actions(record).reshape(count, -1)
        return np.concatenate([state, chunk], axis=1, dtype=np.float32)
