"""The critic of off-policy algorithms: rates a chunk in a state, from the policy's own features.

It is small, and features are computed once in an update, so many optimizer steps cost little. It belongs to the learner
and not to the policy: inference never asks it, and no checkpoint of the policy holds it. Every rank trains the same
critic on all chunks of the super-batch. Its few megabytes stay on the device when the learner is offloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from algos.advantages import chunk_rewards
from vla_rl.core.records import SuperBatch
from vla_rl.core.tensor_files import load_tensors, moments_of, save_tensors, set_moments

if TYPE_CHECKING:
    from algos.critic import CriticAlgorithm

_WIDTH = 256
_STREAM = 4  # separates the draws from those of minibatches


class ChunkCritic(nn.Module):
    """An ensemble of Q(s, a), and V(s)."""

    def __init__(self, features: int, actions: int, members: int) -> None:
        super().__init__()
        self.q = nn.ModuleList(_network(features + actions) for _ in range(members))
        self.v = _network(features)

    def rate(self, state: Tensor, chunk: Tensor) -> Tensor:
        """[n, features], [n, actions] -> [n, members]."""
        inputs = torch.cat([state, chunk], dim=1)
        return torch.cat([member(inputs) for member in self.q], dim=1)

    def value(self, state: Tensor) -> Tensor:
        """[n, features] -> [n]."""
        values: Tensor = self.v(state)
        return values.squeeze(1)


class CriticTrainer:
    """A critic with its target and its optimizer."""

    def __init__(self, algorithm: CriticAlgorithm, seed: int, device: torch.device) -> None:
        self._algorithm, self._seed, self._device = algorithm, seed, device
        self._online: ChunkCritic | None = None  # made when the sizes of its inputs are known
        self._target: ChunkCritic
        self._optimizer: torch.optim.Adam

    def train(self, batch: SuperBatch, features: np.ndarray, actions: np.ndarray) -> dict[str, float]:
        """The update's optimizer steps of the critic; returns metrics.

        ``features`` [M, F] and ``actions`` [M, K, A] (``Policy.normalized_actions``) of all chunks.
        """
        c = self._algorithm.config
        state, chunk = self._inputs(batch, features, actions)
        critic = self._critic(state.shape[1], chunk.shape[1])
        rewards = torch.from_numpy(chunk_rewards(batch.rewards, batch.num_steps)).to(state)
        following = np.arange(1, batch.num_chunks + 1)
        following[batch.offsets[1:] - 1] = -1  # after the end
        after = torch.from_numpy(following).to(self._device)
        losses = []
        for step in range(c.critic_steps):
            rng = np.random.default_rng((self._seed, batch.policy_version, step, _STREAM))
            rows = torch.from_numpy(rng.integers(batch.num_chunks, size=c.critic_batch)).to(self._device)
            with torch.no_grad():
                next_values = torch.where(after[rows] < 0, 0.0, critic.value(state[after[rows]]))
                target_q = self._target.rate(state[rows], chunk[rows])
            q, values = critic.rate(state[rows], chunk[rows]), critic.value(state[rows])
            loss = self._algorithm.critic_loss(q, target_q, values, next_values, rewards[rows])
            losses.append(loss.item())
            if not np.isfinite(losses[-1]):  # a step would spoil the weights
                continue
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._move_target()
        return {"critic_loss": float(np.mean(losses))}

    @torch.no_grad()
    def rate(self, batch: SuperBatch, features: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Q_target [M, critics] and V [M] of all chunks; arguments as ``train``, which is called first."""
        state, chunk = self._inputs(batch, features, actions)
        critic = self._critic(state.shape[1], chunk.shape[1])
        return self._target.rate(state, chunk).cpu().numpy(), critic.value(state).cpu().numpy()

    def save(self, path: Path) -> None:
        if self._online is None:
            return
        parts = {
            "online": self._online.state_dict(),
            "target": self._target.state_dict(),
            "adam": moments_of(self._optimizer),
        }
        save_tensors({f"{part}.{name}": tensor for part in parts for name, tensor in parts[part].items()}, path)

    def load(self, path: Path) -> None:
        """Continue from ``save``. Raises UserError if the file is damaged."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_tensors(path, self._device).items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = tensor
        first, value = parts["online"]["q.0.0.weight"], parts["online"]["v.0.weight"]
        critic = self._critic(value.shape[1], first.shape[1] - value.shape[1])
        critic.load_state_dict(parts["online"])
        self._target.load_state_dict(parts["target"])
        set_moments(self._optimizer, parts["adam"])

    def _inputs(self, batch: SuperBatch, features: np.ndarray, actions: np.ndarray) -> tuple[Tensor, Tensor]:
        """State and chunk as the networks read them: features with the elapsed time, and flat actions."""
        elapsed = batch.elapsed[batch.obs_row][:, None]
        state = np.concatenate([features, elapsed], axis=1, dtype=np.float32)
        chunk = actions.reshape(batch.num_chunks, -1)
        return torch.from_numpy(state).to(self._device), torch.from_numpy(chunk).to(self._device)

    def _critic(self, features: int, actions: int) -> ChunkCritic:
        if self._online is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                self._online = ChunkCritic(features, actions, self._algorithm.config.critics).to(self._device)
            self._target = copy.deepcopy(self._online).requires_grad_(False)
            self._optimizer = torch.optim.Adam(self._online.parameters(), lr=self._algorithm.config.critic_lr)
        return self._online

    @torch.no_grad()
    def _move_target(self) -> None:
        assert self._online is not None
        for target, online in zip(self._target.parameters(), self._online.parameters(), strict=True):
            target.lerp_(online, self._algorithm.config.target_rate)


def _network(inputs: int, widths: Sequence[int] = (_WIDTH, _WIDTH)) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *widths)):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))
