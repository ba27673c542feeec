"""Actors that follow the gradient of the critic, through chunks that depend on what the policy states."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.off_policy import Acted, GradientAlgorithm
from algos.td_losses import excess_loss, executed_mean, return_of_chunks, td_aim
from vla_rl.learner.chunk_critic import EnsembleCritic
from vla_rl.learner.entropy_weight import EntropyWeight
from vla_rl.learner.off_policy import ActorAim, OffPolicyLearner
from vla_rl.policies.base.policy import PolicyOutput
from vla_rl.replay.memory import Transitions


class GradientLearner(OffPolicyLearner):
    """See the module. How a chunk is drawn, and the actor's loss, are the algorithm's."""

    algorithm: GradientAlgorithm

    def __init__(self, *given: Any, **settings: Any) -> None:
        """See ``OffPolicyLearner``."""
        super().__init__(*given, **settings)
        self._entropy = EntropyWeight(self.algorithm.entropy_rule)

    def _critic_loss(self, t: Transitions, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        c, algorithm = self.algorithm.config, self.algorithm
        before, after = self._seen(t.before, t.task), self._seen(t.after, t.task)
        actions = self._tensor(t.actions)
        with torch.no_grad():
            then = self._choices(after, t.record)
            # unless the critic reads features or rates the actor's chunks, the state before needs no forward pass
            now = self._choices(before, t.record) if c.critic_passes > 1 else then
            given = self._given(then, t.after.state)
            pair = self._made(given.shape[1], actions[0].numel())
            critic = pair.online
            chosen = algorithm.chunks_after(_means(then), then.deviations, self._normal(rng, *actions.shape))
            rated = pair.target.rate(pair.target.state(after, given), chosen)
            if c.critic_subset is not None and c.critic_subset < c.critics:
                rated = rated[:, rng.permutation(c.critics)[: c.critic_subset].tolist()]
            worth = algorithm.values_after(rated, then.entropy, self._entropy.alpha)
            earned, discount = return_of_chunks(self._tensor(t.rewards), self._tensor(t.steps), c.gamma)
            aim = td_aim(earned, discount, worth, self._tensor(t.continues))
        state = critic.state(before, self._given(now, t.before.state))
        td, q = critic.towards(state, actions, aim)
        other = self._rated_others(critic, state, now, rng) if c.cql_coef else None
        return algorithm.critic_loss(td, q, other), q, state

    def _given(self, output: PolicyOutput, state: np.ndarray) -> Tensor:
        """As ``_read``, of a pass that was made anyway."""
        return self._tensor(state) if self.algorithm.config.critic_reads == "state" else output.features

    def _rated_others(
        self, critic: EnsembleCritic, state: Tensor, now: PolicyOutput, rng: np.random.Generator
    ) -> Tensor:
        """[n, chunks, members]: ratings of chunks at random, and of chunks near the actor's, in the same states."""
        means = _means(now)
        shape = self.algorithm.config.cql_actions, *means.shape
        uniform = self._tensor(rng.uniform(-1, 1, shape).astype(np.float32))
        near = [self.algorithm.chunks_near(means, now.deviations, noise) for noise in self._normal(rng, *shape)]
        return torch.stack([critic.rate(state, chunk) for chunk in (*uniform, *near)], dim=1)

    def _actor_aim(self, t: Transitions, rng: np.random.Generator) -> ActorAim:
        return ActorAim(self._seen(t.before, t.task), t.record, partial(self._actor_loss, t, rng))

    def _actor_loss(
        self, t: Transitions, rng: np.random.Generator, output: PolicyOutput
    ) -> tuple[Tensor, dict[str, float]]:
        before = self._seen(t.before, t.task)
        means = _means(output)
        chunks = self.algorithm.chunks(means, output.deviations, self._normal(rng, *means.shape))
        with torch.no_grad():
            state = self._critic.state(before, self._given(output, t.before.state))
        self._critic.requires_grad_(False)
        q = self._critic.rate(state, chunks).mean(dim=1)
        self._critic.requires_grad_(True)
        executed = self._executed(t)
        acted = Acted(q, means, output.entropy, self._tensor(t.actions), executed)
        loss = self.algorithm.actor_loss(acted, self._entropy.alpha)
        loss = loss + excess_loss(means.flatten(1), *self._critic.limits)
        entropy = executed_mean(output.entropy.detach(), executed).item()
        self._entropy.step(entropy)
        return loss, {"actor_q": q.mean().item(), "entropy": entropy, "alpha": self._entropy.alpha}

    def _normal(self, rng: np.random.Generator, *shape: int) -> Tensor:
        return self._tensor(rng.standard_normal(shape).astype(np.float32))

    def _own_state(self) -> dict[str, Tensor]:
        return self._entropy.state()

    def _load_own(self, state: Mapping[str, Tensor]) -> None:
        self._entropy.load(state)


def _means(output: PolicyOutput) -> Tensor:
    assert output.means is not None  # ``vla_rl.config.checks`` refuses policies without
    return output.means
