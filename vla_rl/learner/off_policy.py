"""The learner of off-policy algorithms: replay memory, critic and actor.

    super-batch ──▶ memory ──▶ steps of the critic, every other one also of the actor ──▶ version + 1 ──▶ publish

A super-batch's new episodes enter the memory; how many steps follow, ``algo.updates_per_step`` says. Simulators play
meanwhile. One rank: its steps are small.
"""

import copy
import math
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from algos.advantages import explained_variance
from algos.off_policy import OffPolicyAlgorithm
from algos.td_losses import chunk_return, td_aim
from envs.base.demonstration_records import Demonstrations
from vla_rl.config.run_config import RunConfig
from vla_rl.core.augmentation import random_shift
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import EnvSpec, SuperBatch
from vla_rl.core.tensor_files import load_tensors, moments_of, save_tensors, set_moments
from vla_rl.learner.chunk_critic import EnsembleCritic, Standardized
from vla_rl.learner.trained_policy import TrainedPolicy
from vla_rl.policies.base.policy import Policy, PolicyInput, PolicyOutput
from vla_rl.replay.memory import (
    ReplayMemory,
    Seen,
    StoredEpisode,
    Transitions,
    episodes_of,
    episodes_of_demonstrations,
    joined,
)

_STREAM = 6  # separates its draws from those of other learners
_CRITIC, _MEMORY = "off_policy.safetensors", "memory.npz"


class OffPolicyLearner(TrainedPolicy):
    """Trains a policy's actor by a critic, on everything that the memory holds."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        algorithm: OffPolicyAlgorithm,
        spec: EnvSpec,
        *,
        device: str,  # "cuda" or "cpu"
        lease: DeviceLease = nullcontext,  # of the device, if others share it; for each step
        demos: Demonstrations | None = None,  # from which a share of each batch is drawn
    ) -> None:
        """See ``TrainedPolicy``."""
        super().__init__(config, policy, rank=0, world_size=1, device=device, lease=lease)
        self.algorithm, self._spec = algorithm, spec
        self.memory = ReplayMemory(algorithm.config.memory_gib * 2**30)
        self._demos = ReplayMemory(math.inf)
        if demos is not None:
            chunks, mask = demos.chunks(config.policy.chunk_size)
            actions = policy.normalized_actions(policy.encode(chunks, np.random.default_rng(config.seed)))
            self._demos.add(self._kept(episodes_of_demonstrations(demos, actions, mask, spec.max_episode_steps)))
        self._critic: EnsembleCritic | None = None  # made when the number of the policy's features is known
        self._inputs = 0, 0  # these, and the numbers of a chunk
        self._target: EnsembleCritic
        self._adam: torch.optim.Adam
        self._step = 0  # of the critic, over the whole run
        self._owed = 0.0  # part of a step

    def update(self, batch: SuperBatch) -> dict[str, float]:
        """Take in the new episodes and make the steps they allow. Returns metrics.

        Steps whose gradient is not finite are skipped, and counted as ``skipped_steps``.
        """
        c = self.algorithm.config
        with self.meter.time("train"):
            time.sleep(self.config.learner.latency_ms * 1e-3)
            factor = self.config.learner.policy_lr_factor(batch.policy_version, 0, self.config.train.iterations)
            group = self._optimizer.param_groups[0]
            group["lr"] = group["peak_lr"] * factor
            new = self._kept(episodes_of(batch, self.policy.normalized_actions(batch.record), self._valued(batch)))
            metrics = self._surprise(new)
            self.memory.add(new)
            self._owed += c.updates_per_step * float(sum(e.num_steps.sum() for e in new))
            sums: dict[str, list[float]] = defaultdict(list)
            while self._owed >= 1:
                self._owed -= 1
                for name, value in self._one_step().items():
                    sums[name].append(value)
            self._end_update()
            metrics |= {name: float(np.sum(x) if name.endswith("_steps") else np.mean(x)) for name, x in sums.items()}
            metrics |= self.memory.metrics() | {"lr": group["lr"]}
            return {f"learner/{name}": value for name, value in metrics.items()}

    def _kept(self, episodes: list[StoredEpisode]) -> list[StoredEpisode]:
        """As the memory keeps them: what frozen weights make of the images replaces these, if no critic reads them."""
        if self.algorithm.config.critic_reads == "images":
            return episodes
        with self._lease():
            made = [self.policy.embedded(self._tensor(np.ascontiguousarray(e.images))) for e in episodes]
        pairs = zip(episodes, made, strict=True)
        return [e if x is None else replace(e, images=x.float().cpu().numpy()) for e, x in pairs]

    def _valued(self, batch: SuperBatch) -> np.ndarray:
        """bool [B]: which episodes' final observation has a value."""
        rule = self.algorithm.config.bootstrap
        return batch.truncated if rule == "truncated" else np.full_like(batch.truncated, rule == "always")

    def _one_step(self) -> dict[str, float]:
        c, number = self.algorithm.config, self._step
        self._step += 1
        rng = np.random.default_rng((self.config.seed, number, _STREAM))
        drawn = self._drawn(c.critic_successes, rng)
        with self._lease(), self._timer.time("critic_step", c.batch):
            metrics = self._critic_step(drawn, rng, 1.0 if number < c.critic_warmup else c.target_rate)
        if number >= c.critic_warmup and number % c.actor_every == 0:
            drawn = self._drawn(c.actor_successes, rng)
            with self._lease():
                of_actor = self._actor_step(drawn)
            of_actor["skipped_steps"] += metrics["skipped_steps"]
            metrics |= of_actor
        return metrics

    def _critic_step(self, t: Transitions, rng: np.random.Generator, target_rate: float) -> dict[str, float]:
        c = self.algorithm.config
        before, after = self._seen(t.before, t.task), self._seen(t.after, t.task)
        actions, num_steps = self._tensor(t.actions), self._tensor(t.num_steps)
        with torch.no_grad():
            then = self._choices(after, actions)
            # unless the critic reads features or rates the actor's chunks, the state before needs no forward pass
            now = self._choices(before, actions) if c.rates_before else then
            given = self._given(then, t.after.state)
            critic = self._made(given.shape[1], actions[0].numel())
            noise = self._tensor(rng.normal(0, c.target_noise, t.actions.shape).astype(np.float32))
            chosen = (_means(then) + noise.clamp(-c.target_clip, c.target_clip)).clamp(-1.0, 1.0)
            rated = self._target.rate(self._target.state(after, given), chosen)
            if c.critic_subset is not None and c.critic_subset < c.critics:
                rated = rated[:, rng.permutation(c.critics)[: c.critic_subset].tolist()]
            earned, discount = chunk_return(self._tensor(t.rewards), num_steps, c.gamma)
            aim = td_aim(earned, discount, rated, self._tensor(t.continues))
        state = critic.state(before, self._given(now, t.before.state))
        q = critic.rate(state, actions)
        other = self._rated_others(critic, state, _means(now), rng) if c.cql_coef else None
        loss = self.algorithm.critic_loss(q, aim, other)
        metrics = {"critic_loss": loss.item(), "q": q.mean().item(), "critic_steps": 1.0, "skipped_steps": 0.0}
        if not np.isfinite(metrics["critic_loss"]):  # a step would spoil the weights
            return metrics | {"skipped_steps": 1.0}
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()
        with torch.no_grad():
            for target, online in zip(self._target.parameters(), critic.parameters(), strict=True):
                target.lerp_(online, target_rate)
        return metrics

    def _rated_others(self, critic: EnsembleCritic, state: Tensor, means: Tensor, rng: np.random.Generator) -> Tensor:
        """[n, chunks, members]: ratings of chunks at random, and of chunks near the actor's, in the same states."""
        c, shape = self.algorithm.config, (self.algorithm.config.cql_actions, *means.shape)
        uniform = self._tensor(rng.uniform(-1, 1, shape).astype(np.float32))
        near = means + self._tensor(rng.normal(0, c.target_noise, shape).astype(np.float32))
        return torch.stack([critic.rate(state, chunk) for chunk in (*uniform, *near)], dim=1)

    def _actor_step(self, t: Transitions) -> dict[str, float]:
        assert self._critic is not None
        before, actions = self._seen(t.before, t.task), self._tensor(t.actions)
        with self._timer.time("micro_batch", len(actions)):
            output = self._engine(before, {"actions": actions}, self._temperature)
            means = _means(output)
            with torch.no_grad():
                state = self._critic.state(before, self._given(output, t.before.state))
            self._critic.requires_grad_(False)
            q = self._critic.rate(state, means).mean(dim=1)
            self._critic.requires_grad_(True)
            executed = torch.arange(actions.shape[1], device=self._device) < self._tensor(t.num_steps)[:, None]
            loss = self.algorithm.actor_loss(q, means, actions, executed)
            unused = 0.0 * (output.values.sum() + output.logprobs.sum())  # engines expect a gradient of every weight
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.backward(loss + unused)
        with self._timer.time("step", 1):
            skipped = not self._steps.step()
        return {
            "actor_loss": loss.item(),
            "actor_q": q.mean().item(),
            "grad_norm": self._steps.grad_norms["grad_norm"],
            "optimizer_steps": 1.0,
            "skipped_steps": float(skipped),
        }

    def _surprise(self, new: list[StoredEpisode]) -> dict[str, float]:
        """How well the critic predicts what new episodes return, before it has learned from them."""
        if self._critic is None:
            return {}
        rated, earned = [], []
        for e in new:
            n = len(e)
            known = Seen(e.images[:n], e.proprio[:n], e.elapsed[:n], e.state[:n])
            seen, actions = self._seen(known, np.full(n, e.task, np.int32)), self._tensor(e.actions)
            with torch.no_grad():
                given = self._given(self._choices(seen, actions), known.state)
                q = self._critic.rate(self._critic.state(seen, given), actions)
            rated.append(q.mean(dim=1).cpu().numpy())
            gains, discounts = chunk_return(
                self._tensor(e.rewards), self._tensor(e.num_steps), self.algorithm.config.gamma
            )
            total, returns = 0.0, np.zeros(n)
            for row in reversed(range(n)):
                total = returns[row] = float(gains[row]) + float(discounts[row]) * total
            earned.append(returns)
        explained = explained_variance(np.concatenate(earned), np.concatenate(rated))
        return {} if explained is None else {"explained_variance": explained}

    def _choices(self, seen: PolicyInput, actions: Tensor) -> PolicyOutput:
        """What the policy does in these states; ``actions`` have the shape of a record."""
        output: PolicyOutput = self._engine(seen, {"actions": actions}, self._temperature)
        return output

    def _given(self, output: PolicyOutput, state: np.ndarray) -> Tensor:
        """[N, F], what the critic reads of the policy, or of the simulator."""
        return self._tensor(state) if self.algorithm.config.critic_reads == "state" else output.features

    @property
    def _temperature(self) -> float:
        return self.config.policy.temperature  # which no mean depends on

    def _drawn(self, successes: float | None, rng: np.random.Generator) -> Transitions:
        """A batch, ``demo_share`` of it from demonstrations, its images moved at random."""
        c = self.algorithm.config
        shown = round(c.demo_share * c.batch) if len(self._demos) else 0
        parts = [self.memory.sample(c.batch - shown, successes, rng)] if shown < c.batch else []
        t = joined([*parts, *([self._demos.sample(shown, None, rng)] if shown else [])])
        if t.before.images.dtype != np.uint8:  # embedded: there is nothing left to be moved
            return t
        before, after = (replace(s, images=random_shift(s.images, c.shift, rng)) for s in (t.before, t.after))
        return replace(t, before=before, after=after)

    def _seen(self, seen: Seen, task: np.ndarray) -> PolicyInput:
        return PolicyInput(*map(self._tensor, (seen.images, seen.proprio, task, seen.elapsed)))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _made(self, given: int, chunk: int) -> EnsembleCritic:
        if self._critic is None:
            c = self.algorithm.config
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.config.seed)
                made = EnsembleCritic(c.critic_reads, self._spec, given, chunk, c.critics, c.critic_width)
            if isinstance(made.scale, Standardized):
                made.scale.fit(torch.from_numpy(self.memory.states()))
            self._inputs = given, chunk
            self._critic = made.to(self._device)
            self._target = copy.deepcopy(self._critic).requires_grad_(False)
            self._adam = torch.optim.Adam(self._critic.parameters(), lr=c.critic_lr)
        return self._critic

    def save(self, folder: Path) -> None:
        """Also the critic and the memory."""
        super().save(folder)
        count = torch.tensor([self._step, self._owed, *self._inputs], dtype=torch.float64)
        parts: dict[str, dict[str, Tensor]] = {"count": {"all": count}}
        if self._critic is not None:
            parts |= {"online": self._critic.state_dict(), "target": self._target.state_dict()}
            parts["adam"] = moments_of(self._adam)
        save_tensors({f"{part}.{name}": x for part in parts for name, x in parts[part].items()}, folder / _CRITIC)
        self.memory.save(folder / _MEMORY)

    def load(self, folder: Path) -> None:
        super().load(folder)
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in load_tensors(folder / _CRITIC, self._device).items():
            part, _, name = key.partition(".")
            parts[part][name] = tensor
        self.memory.load(folder / _MEMORY)
        step, self._owed, given, chunk = parts["count"]["all"].tolist()
        self._step = int(step)
        if "online" in parts:
            made = self._made(int(given), int(chunk))
            made.load_state_dict(parts["online"])
            self._target.load_state_dict(parts["target"])
            set_moments(self._adam, parts["adam"])


def _means(output: PolicyOutput) -> Tensor:
    assert output.means is not None  # ``vla_rl.config.checks`` refuses policies without
    return output.means
