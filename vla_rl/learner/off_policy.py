"""What learners of off-policy algorithms share: replay memory, critic, and when both and the actor are trained.

    super-batch ──▶ memory ──▶ steps of the critic, every other one also of the actor ──▶ version + 1 ──▶ publish

A super-batch's new episodes enter the memory; how many steps follow, ``algo.updates_per_step`` says. Simulators play
meanwhile. One rank: its steps are small. How the actor learns from the critic is each subclass's own.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from algos.advantages import explained_variance
from algos.off_policy import OffPolicyAlgorithm
from algos.td_losses import chunk_return
from envs.base.demonstration_records import Demonstrations
from vla_rl.config.run_config import RunConfig
from vla_rl.core.augmentation import random_shift
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import Array, EnvSpec, SuperBatch
from vla_rl.core.tensor_files import load_tensors, save_tensors
from vla_rl.learner.chunk_critic import EnsembleCritic, Standardized
from vla_rl.learner.critic_pair import CriticPair
from vla_rl.learner.practice import imagined_record, nothing_imagined, practised
from vla_rl.learner.readout import Bins, Scalar
from vla_rl.learner.trained_policy import TrainedPolicy
from vla_rl.policies.base.policy import Policy, PolicyInput, PolicyOutput
from vla_rl.replay.memory import (
    DrawingRule,
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
_OWN = "own."  # before the names of what a subclass keeps


@dataclass(frozen=True, slots=True)
class ActorAim:
    """States, decisions there, and the loss of what the policy says of them, with further metrics."""

    seen: PolicyInput
    record: Mapping[str, Array]
    loss: Callable[[PolicyOutput], tuple[Tensor, dict[str, float]]]


class OffPolicyLearner(TrainedPolicy, ABC):
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
        self._recorded = tuple(config.policy.spec(spec).record)  # names
        self._temperature = config.policy.temperature_at(0)
        self._branches = 0 if config.world_model is None else config.world_model.branches
        c = algorithm.config
        self.memory = ReplayMemory(c.memory_gib * 2**30, c.return_chunks)
        self._demos = ReplayMemory(math.inf, c.return_chunks)
        if demos is not None:
            chunks, mask = demos.chunks(config.policy.chunk_size)
            record = policy.encode(chunks, np.random.default_rng(config.seed))
            actions, horizon = policy.normalized_actions(record), spec.max_episode_steps
            if self._branches:
                record = {**record, **nothing_imagined(len(actions), self._branches, *actions.shape[1:])}
            self._demos.add(self._kept(episodes_of_demonstrations(demos, actions, mask, horizon, record)))
        self._pair: CriticPair[EnsembleCritic] | None = None  # made when the number of the policy's features is known
        self._inputs = 0, 0  # these, and the numbers of a chunk
        self._step = 0  # of the critic, over the whole run
        self._owed = 0.0  # part of a step
        self._first_version: int | None = None  # whose update trains the actor

    def update(self, batch: SuperBatch) -> dict[str, float]:
        """Take in the new episodes and make the steps they allow. Returns metrics.

        Steps whose gradient is not finite are skipped, and counted as ``skipped_steps``.
        """
        c = self.algorithm.config
        with self.meter.time("train"):
            time.sleep(self.config.learner.latency_ms * 1e-3)
            self._temperature = self.config.policy.temperature_at(batch.policy_version)
            record = {name: batch.record[name] for name in self._recorded}
            actions = self.policy.normalized_actions(record)
            if self._branches:
                record |= imagined_record(batch, actions, self._branches)
            new = self._kept(episodes_of(batch, actions, self._valued(batch), record))
            metrics = self._surprise(new)
            self.memory.add(new)
            self._owed += c.updates_per_step * float(sum(e.num_steps.sum() for e in new))
            metrics["lr"] = self._set_lr(batch.policy_version)
            sums: dict[str, list[float]] = defaultdict(list)
            while self._owed >= 1:
                self._owed -= 1
                for name, value in self._one_step().items():
                    sums[name].append(value)
            self._end_update()
            metrics |= {name: float(np.sum(x) if name.endswith("_steps") else np.mean(x)) for name, x in sums.items()}
            metrics |= self.memory.metrics()
            return {f"learner/{name}": value for name, value in metrics.items()}

    def _set_lr(self, version: int) -> float:
        """The actor's learning rate in the update of this version: it warms up from its own first step on."""
        steps = range(self._step, self._step + int(self._owed))
        if self._first_version is None and any(map(self._trains_actor, steps)):
            self._first_version = version
        first = version + 1 if self._first_version is None else self._first_version
        factor = self.config.learner.policy_lr_factor(version, first, self.config.train.iterations)
        group = self._optimizer.param_groups[0]
        group["lr"] = group["peak_lr"] * factor
        return float(group["lr"])

    def _kept(self, episodes: list[StoredEpisode]) -> list[StoredEpisode]:
        """As the memory keeps them: what frozen weights make of the images replaces these, if no critic reads them."""
        if self.algorithm.config.critic_reads == "images":
            return episodes
        with self._lease():
            made = [self._embedded(e) for e in episodes]
        pairs = zip(episodes, made, strict=True)
        return [e if x is None else replace(e, images=x.float().cpu().numpy()) for e, x in pairs]

    def _embedded(self, e: StoredEpisode) -> Tensor | None:
        """See ``Policy.embedded``, of all observations of an episode."""
        found, size = [], self.config.learner.micro_batch
        for start in range(0, len(e.images), size):
            seen = Seen(
                *(np.ascontiguousarray(x[start : start + size]) for x in (e.images, e.proprio, e.elapsed, e.state))
            )
            found.append(self.policy.embedded(self._seen(seen, np.full(len(seen.images), e.task, np.int32))))
        parts = [x for x in found if x is not None]
        return torch.cat(parts) if parts else None

    def _valued(self, batch: SuperBatch) -> np.ndarray:
        """bool [B]: which episodes' final observation has a value."""
        rule = self.algorithm.config.bootstrap
        return batch.truncated if rule == "truncated" else np.full_like(batch.truncated, rule == "always")

    def _trains_actor(self, step: int) -> bool:
        c = self.algorithm.config
        return step >= c.critic_warmup and step % c.actor_every == 0

    def _one_step(self) -> dict[str, float]:
        c, number = self.algorithm.config, self._step
        self._step += 1
        rng = np.random.default_rng((self.config.seed, number, _STREAM))
        drawn = self._drawn(c.critic_successes, rng)
        with self._lease(), self._timer.time("critic_step", c.batch):
            metrics = self._critic_step(drawn, rng, 1.0 if number < c.critic_warmup else c.target_rate)
        if self._trains_actor(number):
            drawn = self._drawn(c.actor_successes, rng)
            with self._lease():
                of_actor = self._actor_step(drawn, rng)
            of_actor["skipped_steps"] += metrics["skipped_steps"]
            metrics |= of_actor
        return metrics

    def _critic_step(self, t: Transitions, rng: np.random.Generator, target_rate: float) -> dict[str, float]:
        loss, q, state = self._critic_loss(t, rng)
        metrics = {"q": q.mean().item(), "critic_steps": 1.0, "skipped_steps": 0.0}
        if self._branches and (practice := practised(self._critic, state, t)) is not None:
            loss = loss + self.algorithm.config.imagined_coef * practice
            metrics["imagined_loss"] = practice.item()
        metrics["critic_loss"] = loss.item()
        if not np.isfinite(metrics["critic_loss"]):  # a step would spoil the weights
            return metrics | {"skipped_steps": 1.0}
        assert self._pair is not None
        self._pair.step(loss, target_rate)
        return metrics

    @abstractmethod
    def _critic_loss(self, t: Transitions, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The loss; the ratings [n, members] of the recorded chunks; what the critic reads of their states, [n, S]."""

    def _actor_step(self, t: Transitions, rng: np.random.Generator) -> dict[str, float]:
        """One optimizer step of the policy. Returns its metrics."""
        with self._timer.time("micro_batch", len(t.actions)):
            aim = self._actor_aim(t, rng)
            parts = self._parts(len(t.actions))
            if len(parts) == 1:
                output = self._choices(aim.seen, aim.record)
                loss, metrics = aim.loss(output)
                self._backward(loss, output, True)
            else:  # the loss is of the whole batch, and so are its gradients with respect to what the policy states
                with torch.no_grad():
                    whole = self._choices(aim.seen, aim.record)
                for stated in vars(whole).values():
                    if stated is not None:
                        stated.requires_grad_()
                loss, metrics = aim.loss(whole)
                loss.backward()
                for part in parts:
                    output = self._pass(aim.seen, aim.record, part)
                    self._backward(_along(output, whole, part), output, part is parts[-1])
        with self._timer.time("step", 1):
            skipped = not self._steps.step()
        return metrics | {
            "actor_loss": loss.item(),
            "grad_norm": self._steps.grad_norms["grad_norm"],
            "optimizer_steps": 1.0,
            "skipped_steps": float(skipped),
        }

    def _backward(self, loss: Tensor, output: PolicyOutput, is_last: bool) -> None:
        unused = 0.0 * (output.values.sum() + output.logprobs.sum())  # engines expect a gradient of every weight
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss + unused)

    @abstractmethod
    def _actor_aim(self, t: Transitions, rng: np.random.Generator) -> ActorAim:
        """What a step of the actor is about; without gradients of the policy."""

    def _executed(self, t: Transitions) -> Tensor:
        """bool [n, K]."""
        return torch.arange(t.actions.shape[1], device=self._device) < self._tensor(t.num_steps)[:, None]

    def _surprise(self, new: list[StoredEpisode]) -> dict[str, float]:
        """How well the critic predicts what new episodes return, before it has learned from them.

        It explains nothing where all of them earn the same: only their lengths would differ.
        """
        if self._pair is None:
            return {}
        rewards = [chunk_return(self._tensor(e.rewards), self._tensor(e.num_steps), 1.0)[0].sum().item() for e in new]
        rated, earned = [], []
        for e in new:
            n = len(e)
            known = Seen(e.images[:n], e.proprio[:n], e.elapsed[:n], e.state[:n])
            seen = self._seen(known, np.full(n, e.task, np.int32))
            with torch.no_grad():
                state = self._critic.state(seen, self._read(seen, known.state, e.record))
                q = self._critic.rate(state, self._tensor(e.actions))
            rated.append(q.mean(dim=1).cpu().numpy())
            gains, discounts = chunk_return(
                self._tensor(e.rewards), self._tensor(e.num_steps), self.algorithm.config.gamma
            )
            total, returns = 0.0, np.zeros(n)
            for row in reversed(range(n)):
                total = returns[row] = float(gains[row]) + float(discounts[row]) * total
            earned.append(returns)
        returns, ratings = np.concatenate(earned), np.concatenate(rated)
        found = {"critic_bias": float(ratings.mean() - returns.mean())}
        explained = explained_variance(returns, ratings) if np.ptp(rewards) else None
        return found if explained is None else found | {"explained_variance": explained}

    def _choices(self, seen: PolicyInput, record: Mapping[str, Array]) -> PolicyOutput:
        """What the policy does in these states, and what it says of these decisions."""
        return _joined([self._pass(seen, record, part) for part in self._parts(len(seen.task))])

    def _pass(self, seen: PolicyInput, record: Mapping[str, Array], part: slice) -> PolicyOutput:
        given = {name: self._tensor(record[name][part]) for name in self._recorded}
        output: PolicyOutput = self._engine(some(seen, part), given, self._temperature)
        return output

    def _parts(self, n: int) -> list[slice]:
        """What passes the policy at a time, of n chunks."""
        size = self.algorithm.config.micro_batch or n
        return [slice(start, min(n, start + size)) for start in range(0, n, size)]

    def _read(self, seen: PolicyInput, state: np.ndarray, record: Mapping[str, Array]) -> Tensor:
        """[N, F], what the critic reads of the policy, or of the simulator; F is 0 if it reads images.

        ``record``: any decisions, which a pass of the policy takes.
        """
        reads = self.algorithm.config.critic_reads
        if reads == "features":
            return self._choices(seen, record).features
        return self._tensor(state if reads == "state" else state[:, :0])

    def _drawn(self, successes: float | None, rng: np.random.Generator) -> Transitions:
        """A batch, ``demo_share`` of it from demonstrations, its images moved at random."""
        c = self.algorithm.config
        shown = round(c.demo_share * c.batch) if len(self._demos) else 0
        rule = DrawingRule(successes, c.tasks_evenly, c.half_life)
        parts = [self.memory.sample(c.batch - shown, rule, rng)] if shown < c.batch else []
        t = joined([*parts, *([self._demos.sample(shown, DrawingRule(), rng)] if shown else [])])
        if t.before.images.dtype != np.uint8:  # embedded: there is nothing left to be moved
            return t
        before, after = (replace(s, images=random_shift(s.images, c.shift, rng)) for s in (t.before, t.after))
        return replace(t, before=before, after=after)

    def _seen(self, seen: Seen, task: np.ndarray) -> PolicyInput:
        return PolicyInput(*map(self._tensor, (seen.images, seen.proprio, task, seen.elapsed)))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    @property
    def _critic(self) -> EnsembleCritic:
        assert self._pair is not None  # the critic's first step is made before the actor's
        return self._pair.online

    def _made(self, given: int, chunk: int) -> CriticPair[EnsembleCritic]:
        if self._pair is None:
            c = self.algorithm.config
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.config.seed)
                sizes = given, chunk, c.critics, c.critic_width
                readout = Bins(c.q_min, c.q_max, c.q_bins) if c.critic_loss == "hl_gauss" else Scalar()
                limits, rates = self._limits(), c.rates_states
                made = EnsembleCritic(c.critic_reads, self._spec, *sizes, readout=readout, values=rates, limits=limits)
            if isinstance(made.scale, Standardized):
                made.scale.fit(torch.from_numpy(self.memory.states()))
            self._inputs = given, chunk
            self._pair = CriticPair(made.to(self._device), c.critic_lr, fused=True)
        return self._pair

    def _limits(self) -> Tensor | None:
        """[2, K, A]: see ``EnsembleCritic``."""
        actions = self._spec.actions
        ends = np.array([actions.low, actions.high], np.float32)[:, None].repeat(self.config.policy.chunk_size, axis=1)
        if (found := self.policy.action_limits(ends)) is None:
            return None
        ordered = np.sort(found, axis=0)
        ordered[:, np.ptp(ordered, axis=0) == 0] = [[-np.inf], [np.inf]]  # what never changes does what it always did
        return torch.from_numpy(ordered)

    def _own_state(self) -> dict[str, Tensor]:
        """What a subclass learns beside critic and actor."""
        return {}

    def _load_own(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``_own_state``."""

    def save(self, folder: Path) -> None:
        """Also the critic and the memory."""
        super().save(folder)
        first = -1 if self._first_version is None else self._first_version
        count = torch.tensor([self._step, self._owed, *self._inputs, first], dtype=torch.float64)
        state = {"count.all": count, **{f"{_OWN}{name}": x for name, x in self._own_state().items()}}
        save_tensors(state | ({} if self._pair is None else self._pair.state()), folder / _CRITIC)
        self.memory.save(folder / _MEMORY)

    def load(self, folder: Path) -> None:
        super().load(folder)
        state = load_tensors(folder / _CRITIC, self._device)
        self.memory.load(folder / _MEMORY)
        self._load_own({name.removeprefix(_OWN): x for name, x in state.items() if name.startswith(_OWN)})
        step, self._owed, given, chunk, *rest = state["count.all"].tolist()
        (first,) = rest or (0,)  # earlier commits counted from the start of the run
        self._step, self._first_version = int(step), None if first < 0 else int(first)
        if any(name.startswith("online.") for name in state):
            self._made(int(given), int(chunk)).load(state)


def some(seen: PolicyInput, part: slice) -> PolicyInput:
    """Those of these rows."""
    return PolicyInput(*(getattr(seen, field.name)[part] for field in fields(seen)))


def _joined(parts: Sequence[PolicyOutput]) -> PolicyOutput:
    if len(parts) == 1:
        return parts[0]
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(PolicyOutput)}
    return PolicyOutput(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})


def _along(output: PolicyOutput, whole: PolicyOutput, part: slice) -> Tensor:
    """A number whose gradient is that of the loss of ``whole``, as far as it is of these rows."""
    pairs = zip(vars(output).values(), vars(whole).values(), strict=True)
    return torch.stack([(x * y.grad[part]).sum() for x, y in pairs if y is not None and y.grad is not None]).sum()
