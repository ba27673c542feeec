"""What all policies share whose actions are denoised by flow matching: a sampler whose samples have log-probabilities.

    observation ─► read ─► prefix ─┐            ┌► velocity ─► denoising step ─┐
    noisy actions, time ───────────┴► velocity ─┘      ▲                       │
                                                       └────── S times ────────┘

With ``policy.steer``, a small network chooses the noise at the start (``vla_rl.policies.base.steering``), and all
denoising steps are deterministic.

Random denoising steps have a normal distribution; their density is the policy's (πRL, arXiv:2510.25889). What the
other steps do is settled by the drawn numbers, so that it cancels in probability ratios.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.core.errors import UserError
from vla_rl.core.records import Array, Record
from vla_rl.policies.base import flow
from vla_rl.policies.base.flow_config import FlowConfig
from vla_rl.policies.base.policy import Decisions, Policy, PolicyInput, PolicyOutput
from vla_rl.policies.base.steering import Steering
from vla_rl.policies.base.value_head import ValueHead

_VALUE_HIDDEN = 64, 32


@dataclass(frozen=True, slots=True)
class FlowPrefix:
    """What is read of N observations once, for all denoising steps. Subclasses add what their ``velocity`` needs."""

    features: Tensor  # [N, width], of which values are computed
    proprio: Tensor  # [N, P], normalized


class FlowPolicy(Policy):
    """See ``Policy``; for the record see ``FlowConfig.spec``."""

    config: FlowConfig
    value_head: ValueHead
    noise_head: nn.Linear | None
    steering: Steering | None  # chooses the noise; everything but it and the value head is frozen then
    model_lengths: tuple[int, int]  # H, D
    action_dim: int  # A
    steps: int  # S, those that can be random, and R that are: the config looks them up in the checkpoint's files
    noisy_steps: int
    recorded_steps: int

    def add_heads(self, width: int, proprio_dim: int, expert_width: int | None) -> None:
        """Make the heads that the published models lack. Call when the rest of the policy is there.

        Args:
            width: of the prefix's features.
            proprio_dim: of the prefix's proprioception.
            expert_width: of the hidden states that ``velocity`` returns; None: it returns none.
        """
        self.steps, self.recorded_steps = self.config.steps, self.config.recorded_steps
        self.noisy_steps = self.config.noisy_steps
        self.value_head = ValueHead(width + proprio_dim, *_VALUE_HIDDEN)
        learned = self.config.noise == "learned"
        if learned and expert_width is None:
            raise ValueError("policy.noise=learned needs hidden states, which this model does not give; use sde")
        self.noise_head = nn.Linear(expert_width, self.model_lengths[1]) if learned and expert_width else None
        self.steering, steer = None, self.config.steer_in_use
        if steer is not None:
            self.requires_grad_(False)
            self.value_head.requires_grad_(True)
            self.steering = Steering(width + proprio_dim, self.model_lengths[1], steer)

    @abstractmethod
    def read(self, seen: PolicyInput) -> FlowPrefix:
        """The prefix of N observations. Raises as ``Policy.forward``."""

    @abstractmethod
    def velocity(self, prefix: FlowPrefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity, float32 [N, H, D], at ``x`` [N, H, D] and ``time`` [N]; the hidden states [N, H, W] behind it."""

    def varying_actions(self) -> Array:
        """bool [A]: the dimensions of an action that are not constant in the data that the policy was cloned from."""
        return np.ones(self.action_dim, bool)

    @abstractmethod
    def normalize_actions(self, actions: Array) -> Array:
        """float32 [n, K, A] as the model reads them, of physical ones."""

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """See ``Policy.act``. Greedy rows take every step without noise."""
        prefix = self.read(seen)
        if self.steering is not None:
            return self._act_steered(self.steering, prefix, seen, draws["noise"], greedy, temperature)
        recorded, total = self.recorded_steps, self.steps
        first = self._first_random_step(draws["which"])
        x, chain, logprobs = draws["start"], [], []
        for number in range(total):
            step = torch.full_like(first, number)
            mean, deviation, velocity = self._step(prefix, x, step, temperature)
            place = (step - first).clamp(0, recorded - 1)
            noise = draws["steps"][torch.arange(len(x), device=x.device), place]
            random = (step >= first) & (step < first + recorded)
            plain = flow.ode_step(x, velocity, 1.0 / total)
            chosen = torch.where(greedy[:, None, None], plain, mean + deviation * noise)
            chain.append(x)
            density = flow.gaussian_logprob(chosen, mean, deviation)
            logprobs.append(torch.where(random[:, None, None], density, 0.0))  # a step without noise has none
            x = torch.where(random[:, None, None], chosen, plain)
        chain.append(x)
        window = first[:, None] + torch.arange(recorded + 1, device=x.device)
        rows = torch.arange(len(x), device=x.device)[:, None]
        record = {
            "chain": torch.stack(chain, dim=1)[rows, window],
            "first": first.int(),
            "actions": self._executed(x),
        }
        values = self._values(self._state(prefix), seen)
        return Decisions(record, self._density(torch.stack(logprobs).sum(0)), values)

    def _act_steered(
        self,
        steering: Steering,
        prefix: FlowPrefix,
        seen: PolicyInput,
        drawn: Tensor,
        greedy: Tensor,
        temperature: float,
    ) -> Decisions:
        """``drawn``: normal numbers [N, 1, D]. Greedy rows take the mean of the noise."""
        state = self._state(prefix)
        mean, deviation = steering(state, temperature)
        noise = torch.where(greedy[:, None, None], mean, mean + deviation * drawn)
        x = noise.expand(-1, self.model_lengths[0], -1)
        for number in range(self.steps):
            times, length = flow.step_times(self.steps, torch.full((len(x),), number, device=x.device), 1)
            x = flow.ode_step(x, self.velocity(prefix, x, times[:, 0])[0], length)
        logprobs = self._spread(flow.gaussian_logprob(noise, mean, deviation))
        return Decisions({"noise": noise, "actions": self._executed(x)}, logprobs, self._values(state, seen))

    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        """See ``Policy.forward``."""
        if self.steering is not None:
            return self._rate_steered(self.steering, seen, record["noise"], temperature)
        prefix, chain = self.read(seen), record["chain"]
        logprobs, entropy = torch.zeros_like(chain[:, 0]), torch.zeros_like(chain[:, 0])
        for i in range(self.recorded_steps):
            mean, deviation, _ = self._step(prefix, chain[:, i], record["first"].long() + i, temperature)
            logprobs = logprobs + flow.gaussian_logprob(chain[:, i + 1], mean, deviation)
            entropy = entropy + flow.gaussian_entropy(deviation)
        state = self._state(prefix)
        values = self._values(state.detach() if detach_value else state, seen)
        return PolicyOutput(self._density(logprobs), self._density(entropy), values, state.detach())

    def _rate_steered(self, steering: Steering, seen: PolicyInput, noise: Tensor, temperature: float) -> PolicyOutput:
        """Entropy, means and deviations are of the noise: [N, 1, D]."""
        with torch.no_grad():
            embedded = self.embedded(seen) if seen.images.dtype == torch.uint8 else seen.images
            assert embedded is not None
            state = embedded.to(next(self.value_head.parameters()).dtype)
        mean, deviation = steering(state, temperature)
        logprobs = self._spread(flow.gaussian_logprob(noise, mean, deviation))
        entropy, values = flow.gaussian_entropy(deviation), self._values(state, seen)
        return PolicyOutput(logprobs, entropy, values, state, mean, deviation)

    @torch.no_grad()
    def embedded(self, seen: PolicyInput) -> Tensor | None:
        """See ``Policy.embedded``: of a frozen policy, what the value head and the network that steers it read."""
        return None if self.steering is None else self._state(self.read(seen)).float()

    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """See ``Policy.imitation_loss``: flow matching, the squared error of the velocity at a random time."""
        self._refuse_to_clone()
        target, prefix = torch.from_numpy(self._padded(actions)).to(seen.images.device), self.read(seen)
        drawn = 0.001 + 0.999 * rng.beta(1.5, 1.0, len(actions))  # of π0: near 1, noise, more often than near 0
        time = torch.from_numpy(drawn.astype(np.float32)).to(target)
        noise = torch.from_numpy(rng.standard_normal(target.shape, dtype=np.float32)).to(target)
        t = time[:, None, None]
        velocity, _ = self.velocity(prefix, t * noise + (1.0 - t) * target, time)
        errors = self._executed((velocity - (noise - target)) ** 2)
        weights = mask.unsqueeze(-1).expand_as(errors).to(errors.dtype)
        return (errors * weights).sum() / weights.sum()

    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        """See ``Policy.encode``: random steps on the straight way from noise to the actions. Their log-probability is a
        flow-matching loss at these times, up to factor and constant.
        """
        self._refuse_to_clone()
        target, recorded = self._padded(actions), self.recorded_steps
        noise = rng.standard_normal(target.shape, dtype=np.float32)
        first = rng.integers(self.noisy_steps - recorded + 1, size=len(target)).astype(np.int32)
        number = first[:, None] + np.arange(recorded + 1)
        time = (1.0 - number / self.steps).astype(np.float32)[:, :, None, None]
        chain = time * noise[:, None] + (1.0 - time) * target[:, None]
        return {"chain": chain, "first": first, "actions": self.normalize_actions(actions)}

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return record["actions" if self.steering is None else "noise"]

    def action_limits(self, ends: Array) -> Array | None:
        return self.normalize_actions(ends) if self.steering is None else None

    def _first_random_step(self, drawn: Tensor) -> Tensor:
        """Its number, int64 [N], in each row. ``drawn``: numbers [N] from [0, 1), by which it is chosen."""
        latest = self.noisy_steps - self.recorded_steps
        if self.config.random_steps == "last":
            return torch.full_like(drawn, latest, dtype=torch.long)
        return (drawn * (latest + 1)).long().clamp(max=latest)

    def _step(self, prefix: FlowPrefix, x: Tensor, number: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and deviation of random denoising steps [N], and the velocity; [N, H, D] each."""
        times, length = flow.step_times(self.steps, number, 1)
        time = times[:, 0]
        velocity, hidden = self.velocity(prefix, x, time)
        if self.noise_head is None:
            random_step = flow.cps_step if self.config.noise == "cps" else flow.sde_step
            mean, deviation = random_step(x, velocity, time, length, self.config.noise_level)
            return mean, (temperature * deviation).expand_as(x), velocity
        low, high = np.log(self.config.noise_low), np.log(self.config.noise_high)
        deviation = torch.exp(low + (high - low) * torch.sigmoid(self.noise_head(hidden).float()))
        return flow.ode_step(x, velocity, length), temperature * deviation, velocity

    def _refuse_to_clone(self) -> None:
        if self.steering is not None:
            raise UserError(
                "policy.steer: the policy is frozen, and what chooses its noise cannot clone actions; set "
                "policy.steer=null, and use a checkpoint without steering.safetensors"
            )

    def _state(self, prefix: FlowPrefix) -> Tensor:
        """[N, width + P]."""
        return torch.cat([prefix.features, prefix.proprio.to(prefix.features.dtype)], dim=-1)

    def _values(self, state: Tensor, seen: PolicyInput) -> Tensor:
        time = seen.elapsed if self.config.value_time else torch.zeros_like(seen.elapsed)
        return self.value_head(state, time).float()

    def _spread(self, logprobs: Tensor) -> Tensor:
        """[N, K, A], whose sum is that of the log-densities of the noise [N, 1, D]."""
        shape = self.config.chunk_size, self.action_dim
        return (logprobs.sum(dim=(1, 2)) / math.prod(shape))[:, None, None].expand(-1, *shape)

    def _executed(self, x: Tensor) -> Tensor:
        """[N, K, A] of [N, H, D]."""
        return x[:, : self.config.chunk_size, : self.action_dim]

    def _density(self, x: Tensor) -> Tensor:
        """[N, K, A] of the log-densities [N, H, D]: 0 in dimensions where no action differs, whatever is drawn."""
        executed = self._executed(x)
        return executed * torch.from_numpy(self.varying_actions()).to(executed)

    def _padded(self, actions: Array) -> Array:
        """Normalized actions [n, H, D]: the last action is repeated, numbers that the simulator lacks are 0."""
        normalized = self.normalize_actions(actions)
        more = self.model_lengths[0] - normalized.shape[1]
        longer = np.pad(normalized, ((0, 0), (0, more), (0, 0)), mode="edge")
        return np.pad(longer, ((0, 0), (0, 0), (0, self.model_lengths[1] - normalized.shape[2])))
