"""Actors that clone what the critic chooses among their own chunks; of any kind of policy."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from algos.best_of_n import BestOfN
from algos.td_losses import best_candidate, return_of_chunks, td_aim
from vla_rl.core.records import Record
from vla_rl.learner.off_policy import ActorAim, OffPolicyLearner, some
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.replay.memory import Transitions


class ChoiceLearner(OffPolicyLearner):
    """See the module. A step of the critic passes nothing through the policy, unless it reads the policy's features."""

    algorithm: BestOfN

    def _critic_loss(self, t: Transitions, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        before, after = self._seen(t.before, t.task), self._seen(t.after, t.task)
        actions = self._tensor(t.actions)
        with torch.no_grad():
            now, then = self._read(before, t.before.state, t.record), self._read(after, t.after.state, t.record)
            pair = self._made(now.shape[1], actions[0].numel())
            critic = pair.online
            gamma = self.algorithm.config.gamma
            earned, discount = return_of_chunks(self._tensor(t.rewards), self._tensor(t.steps), gamma)
            following = critic.value(critic.state(after, then))
            aim = td_aim(earned, discount, following[:, None], self._tensor(t.continues))
            target_q = pair.target.rate(pair.target.state(before, now), actions)
        state = critic.state(before, now)
        td, q = critic.towards(state, actions, aim)
        return self.algorithm.critic_loss(td, target_q, critic.value(state)), q, state

    def _actor_aim(self, t: Transitions, rng: np.random.Generator) -> ActorAim:
        before, success = self._seen(t.before, t.task), self._tensor(t.success)
        drawn = [self._drawn_chunks(before, rng) for _ in range(self.algorithm.config.candidates)]
        with torch.no_grad():
            state = self._critic.state(before, self._read(before, t.before.state, t.record))
            chunks = [self._tensor(self.policy.normalized_actions(record)) for record in drawn]
            rated = torch.stack([self._critic.rate(state, chunk) for chunk in chunks], dim=1)
            executed = self._critic.rate(state, self._tensor(t.actions))
            choice = best_candidate(rated, executed, success)
        best, rows = choice.cpu().numpy(), np.arange(len(choice))
        every = [*drawn, t.record]
        record = {name: np.stack([one[name] for one in every])[best, rows] for name in self._recorded}
        of_policy = choice < len(drawn)
        counted = self._executed(t) | of_policy[:, None]
        least = rated.min(dim=2).values
        metrics = {
            "actor_q": least.mean().item(),
            "choice_gain": (least.max(dim=1).values - least.mean(dim=1)).mean().item(),
            "chosen_executed": 1.0 - of_policy.float().mean().item(),
        }
        return ActorAim(before, record, lambda x: (self.algorithm.actor_loss(x.logprobs, counted), metrics))

    def _drawn_chunks(self, seen: PolicyInput, rng: np.random.Generator) -> Record:
        """The record of one chunk in each state, drawn as inference draws it."""
        n = len(seen.task)
        numbers = self.config.policy.spec(self._spec).draws
        draws = {name: self._tensor(replace(x, shape=(n, *x.shape)).draw(rng)) for name, x in numbers.items()}
        greedy = torch.zeros(n, dtype=torch.bool, device=self._device)
        self.policy.eval()
        decided = [
            self.policy.act(
                some(seen, part), {name: x[part] for name, x in draws.items()}, greedy[part], self._temperature
            ).record
            for part in self._parts(n)
        ]
        self.policy.train()
        return {name: torch.cat([record[name] for record in decided]).cpu().numpy() for name in decided[0]}
