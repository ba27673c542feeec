"""One rank of the learner: DeepSpeed around the policy, and the update on one super-batch.

    super-batch ──▶ targets (all ranks alike) ──▶ epochs x minibatches x micro-batches ──▶ version + 1 ──▶ publish

Every rank sees the whole super-batch (it is mapped, not copied) and computes the same targets from it. Only the forward
and backward passes are divided, so no statistic depends on the number of ranks.
"""

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algos.actor_critic import ClippedValue
from algos.algorithm import Algorithm
from algos.critic import CriticAlgorithm
from algos.denominators import LossDenominators
from algos.targets import Targets
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.errors import NotFiniteError
from vla_rl.core.records import EXPERT, EXPERT_STEPS, Observation, SuperBatch, take_rows
from vla_rl.learner.anchors import Anchors
from vla_rl.learner.critic import CriticTrainer
from vla_rl.learner.forward_passes import ForwardPasses
from vla_rl.learner.optimizer_steps import GRAD_NORMS
from vla_rl.learner.trained_policy import TrainedPolicy
from vla_rl.learner.update_probe import UpdateProbe
from vla_rl.learner.value_memory import FIGURES, ValueMemory
from vla_rl.policies.base.policy import Policy

_STREAM = 5  # separates the draws of conditions from those of minibatches

Share = Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]  # a share of a loss, and sums for the metrics


class Learner(TrainedPolicy):
    """Trains a policy on super-batches and publishes its weights."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        algorithm: Algorithm,
        *,
        rank: int,
        world_size: int,
        device: str,  # "cuda" or "cpu"
        lease: DeviceLease = nullcontext,  # of the device, if others share it; for each micro-batch
        anchors: Anchors | None = None,  # cloned in each optimizer step
    ) -> None:
        """See ``TrainedPolicy``."""
        needs_copy = algorithm.needs_reference and not policy.has_reference
        ranks: Any = {"rank": rank, "world_size": world_size, "device": device, "lease": lease}
        self._values: ValueMemory | None = None
        if isinstance(algorithm, ClippedValue) and algorithm.config.value_memory:
            head = copy.deepcopy(policy.value_head)  # before ZeRO divides it
            self._values = ValueMemory(algorithm, head, config.seed, torch.device(device))
        super().__init__(config, policy, **ranks, keeps_copy=needs_copy)
        self.algorithm = algorithm
        self._skipped = 0  # optimizer steps of the update under way
        self._anchors = anchors
        self._critic: CriticTrainer | None = None
        if isinstance(algorithm, CriticAlgorithm):
            self._critic = CriticTrainer(algorithm, config.seed, self._device)
        tasks = len(policy.instructions) // len(config.algo.conditions)
        where = rank, world_size, self._device, lease
        self._passes = ForwardPasses(config, algorithm, *where, tasks, self.policy.value_head)

    def update(self, batch: SuperBatch) -> dict[str, float]:
        """Update policy ``batch.policy_version`` to the next version, by all epochs and minibatches.

        Optimizer steps whose gradient is not finite are skipped, and counted as ``skipped_steps``: all of them if the
        batch itself is not finite. Returns metrics over all ranks, the same on every rank.
        """
        target_kl = self.algorithm.config.target_kl
        with self.meter.time("train"):
            time.sleep(self.config.learner.latency_ms * 1e-3)
            self._set_learning_rates(batch.policy_version)
            batch = self._as_shown(batch)
            try:
                batch, targets, more = self._targets(batch)
            except NotFiniteError:
                steps = sum(1 for _ in self._minibatches(np.arange(batch.num_chunks), batch.policy_version))
                return {"learner/optimizer_steps": steps, "learner/skipped_steps": steps}
            sums: dict[str, float] = defaultdict(float)
            norms: list[dict[str, float]] = []  # of the gradients of each step
            self._skipped = 0
            if self._anchors is not None:
                self._anchors.observe(batch, self.algorithm.kept_chunks(batch))
            moves = self.algorithm.moves_policy(targets, batch.policy_version)
            probe = UpdateProbe(self._passes, batch, targets.condition, self._lease) if moves else None
            minibatches = [*self._minibatches(self.algorithm.trained_chunks(targets), batch.policy_version)]
            drawn = self.algorithm.config.teacher is None  # by the policy: the estimate does not hold for an expert's
            update_kl = 0.0
            for number, rows in enumerate(minibatches):
                step = self._optimizer_step(batch, targets, rows, number, probe)
                for name, value in step.items():
                    sums[name] += value
                norms.append(self._steps.grad_norms)
                if probe is not None and drawn and (target_kl is not None or number == len(minibatches) - 1):
                    found = self._sum_over_ranks(probe.sums(self._engine))
                    update_kl = found["update_k3"] / max(1.0, found["update_actions"])
                    if target_kl is not None and update_kl > target_kl:
                        break
            if self._values is not None:
                more |= self._remember_values(self._values, batch.policy_version)
            self._end_update()
            metrics = self.algorithm.finish_metrics(dict(sums), targets) | more
            metrics |= {"update_kl": update_kl} if drawn else {}
            metrics |= {name: float(np.mean([each[name] for each in norms] or [0.0])) for name in GRAD_NORMS}
            metrics |= {"lr": self._optimizer.param_groups[0]["lr"]}
            metrics |= {"optimizer_steps": len(norms), "skipped_steps": self._skipped}
            if self._memory.gib:
                metrics["offloaded_gib"] = self._memory.gib
            return {f"learner/{name}": value for name, value in metrics.items()}

    def _as_shown(self, batch: SuperBatch) -> SuperBatch:
        """The batch with the expert's actions, where it has acted, in the terms of the policy's own decisions."""
        if EXPERT not in batch.record:
            return batch
        shown = np.flatnonzero(batch.record[EXPERT_STEPS])
        record = dict(batch.record)
        encoded = self.policy.encode(record[EXPERT][shown], np.random.default_rng(batch.policy_version))
        for name, values in encoded.items():
            record[name] = record[name].copy()
            record[name][shown] = values
        return replace(batch, record=record)

    def _targets(self, batch: SuperBatch) -> tuple[SuperBatch, Targets, dict[str, float]]:
        """The batch, with recomputed bootstrap values if the algorithm needs recomputed numbers, the targets, metrics.

        The critic is trained on the way, if there is one.
        """
        logprobs = values = reference = q = features = features_after = None
        metrics: dict[str, float] = {}
        if self.algorithm.needs_reference:
            with self._as_reference() as model:
                reference = self._passes.evaluate(model, batch).logprobs
        if self.algorithm.needs_recompute:
            found = self._passes.evaluate(self._engine, batch)
            logprobs, values, features = found.logprobs, found.values, found.features
            after, features_after = self._passes.evaluate_ends(self._engine, batch)
            batch = replace(batch, bootstrap_value=after)
            if self._critic is not None and features is not None:
                with self._lease():
                    actions = self.policy.normalized_actions(batch.record)
                    metrics = self._critic.train(batch, features, actions)
                    q, values = self._critic.rate(
                        batch, features, actions
                    )  # copies to the host: the device has finished
        targets = self.algorithm.targets(batch, logprobs, values, reference, q)  # of numbers that are finite
        if self._values is not None and self._rank == 0 and features is not None:
            self._values.observe(batch, features, features_after, reads_time=self.config.policy.value_time)
        return batch, targets, metrics

    def _remember_values(self, memory: ValueMemory, policy_version: int) -> dict[str, float]:
        """Let the first rank train the value head on old episodes, and bring it to all ranks. Collective."""
        theirs, ours = list(self.policy.value_parameters()), list(memory.head.parameters())
        with self._lease():
            for whole, weight in zip(ours, theirs, strict=True):
                whole.detach().copy_(self._state.weight(weight))
            found = memory.train(policy_version) if self._rank == 0 else {}
            figures = torch.tensor([found.get(name, math.nan) for name in FIGURES], device=self._device)
            for tensor in (*(whole.detach() for whole in ours), figures) if self._world_size > 1 else ():
                torch.distributed.broadcast(tensor, 0)
            for whole, weight in zip(ours, theirs, strict=True):
                self._state.set_weight(weight, whole.detach())
            self._passes.finish_on_device()
        return {name: x for name, x in zip(FIGURES, figures.tolist(), strict=True) if not math.isnan(x)}

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The policy at the start of the run: a copy, or the trained policy without its adapters."""
        if self._copy is not None:
            yield self._copy
        else:
            with self.policy.reference():
                yield self._engine

    def _minibatches(self, trained: np.ndarray, policy_version: int) -> Iterator[np.ndarray]:
        """Rows of each optimizer step: every epoch divides the trained ones at random, the same on every rank."""
        parts = min(len(trained), self.algorithm.minibatches)
        for epoch in range(self.algorithm.epochs if parts else 0):
            rng = np.random.default_rng((self.config.seed, policy_version, epoch))
            yield from np.array_split(rng.permutation(trained), parts)

    def _set_learning_rates(self, policy_version: int) -> None:
        settings, iterations = self.config.learner, self.config.train.iterations
        first = self.algorithm.first_policy_version
        policy, value = self._optimizer.param_groups
        policy["lr"] = policy["peak_lr"] * settings.policy_lr_factor(policy_version, first, iterations)
        value["lr"] = value["peak_lr"] * settings.schedule_factor(policy_version, 0, iterations)

    def _optimizer_step(
        self, batch: SuperBatch, targets: Targets, rows: np.ndarray, number: int, probe: UpdateProbe | None
    ) -> dict[str, float]:
        """One step of the weights; ``probe``: None if the policy's own are not to move."""
        sums: dict[str, torch.Tensor] = {}
        first, value_only = probe if number == 0 else None, probe is None
        update = self._update_shares(batch, targets, rows, first, value_only)
        shares = [*update, *self._cloning_shares(batch.policy_version, number, value_only)]
        if value_only:
            self._steps.leave_out_policy()
        for i, (size, share) in enumerate(shares):
            with self._lease():
                with self._timer.time("micro_batch", size):
                    loss, metrics = share()
                    self._engine.set_gradient_accumulation_boundary(i == len(shares) - 1)
                    # DeepSpeed averages gradients over the ranks; the losses are shares of one sum
                    self._engine.backward(loss * self._world_size)
                if i < len(shares) - 1:
                    self._engine.step()  # counts the micro-batch; the weights stay as they are
                else:
                    with self._timer.time("step", 1):
                        self._skipped += not self._steps.step(moves_policy=probe is not None)
                self._passes.finish_on_device()
            for name, value in metrics.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return self._sum_over_ranks(sums)

    def _update_shares(
        self, batch: SuperBatch, targets: Targets, rows: np.ndarray, probe: UpdateProbe | None, value_only: bool
    ) -> Iterator[tuple[int, Share]]:
        """This rank's micro-batches of ``rows``: size, and what computes their share of the loss."""
        denominators = LossDenominators.of(batch.num_steps[rows], targets.trains_value[rows])

        def share(part: np.ndarray, padding: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            tensors = targets.rows(part, self._device)
            if padding:  # chunks without an executed step do not count
                tensors = replace(tensors, num_steps=torch.zeros_like(tensors.num_steps))
            condition = targets.condition[part]
            output = self._passes.of_chunks(self._engine, batch, part, condition, value_only=value_only)
            if probe is not None:
                probe.observe(part, padding, output.logprobs)
            outputs = output.logprobs, output.entropy, output.values
            return self.algorithm.loss(*outputs, tensors, denominators, batch.policy_version)

        return ((len(part), partial(share, part, padding)) for part, padding in self._passes.micro_batches(rows))

    def _cloning_shares(self, policy_version: int, number: int, value_only: bool) -> Iterator[tuple[int, Share]]:
        """Likewise, of the chunks that the optimizer step ``number`` clones."""
        algo = self.algorithm.config
        count = algo.bc_batch
        if self._anchors is None:
            return iter(())
        drawn = self._anchors.draw(count, self.config.seed, policy_version, number)
        if drawn is None:
            return iter(())
        draws = np.random.default_rng((self.config.seed, policy_version, number, _STREAM)).random(count)
        task = self._passes.under(algo.demonstration_conditions(draws), drawn.task)
        no_time = np.zeros(count, np.float32)  # only values depend on it
        steps = int(drawn.num_steps.sum())

        def share(part: np.ndarray, padding: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen = Observation(drawn.images[part], drawn.proprio[part], task[part], no_time[part])
            record = take_rows(drawn.record, part)
            output = self._passes.call(self._engine, seen, record, policy_version, value_only=value_only)
            num_steps = self._passes.tensor(drawn.num_steps[part] * (not padding)).long()
            loss, sums = self.algorithm.cloning_loss(output.logprobs, num_steps, steps, policy_version)
            return loss + 0.0 * output.values.sum(), sums  # engines expect a gradient of every weight

        return (
            (len(part), partial(share, part, padding)) for part, padding in self._passes.micro_batches(np.arange(count))
        )

    def _sum_over_ranks(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        stacked = torch.stack([sums[name].double() for name in sorted(sums)])
        if self._world_size > 1:
            torch.distributed.all_reduce(stacked)
        return dict(zip(sorted(sums), stacked.tolist(), strict=True))

    def save(self, folder: Path) -> None:
        """Save trained weights and their moments (``WholeState``); collective. Frozen weights stay in their checkpoint.

        Files are written now or later (``postponed``).
        """
        super().save(folder)
        if self._anchors is not None and self._rank == 0:
            self._anchors.save(folder / "anchors.npz")
        if self._critic is not None and self._rank == 0:
            self._critic.save(folder / "critic.safetensors")
        if self._values is not None and self._rank == 0:
            self._values.save(folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        if self._anchors is not None and (folder / "anchors.npz").is_file():
            self._anchors.load(folder / "anchors.npz")
        if self._critic is not None and (folder / "critic.safetensors").is_file():
            self._critic.load(folder / "critic.safetensors")
        if self._values is not None and self._rank == 0:
            self._values.load(folder)
