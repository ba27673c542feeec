"""Forward passes over the chunks of a super-batch: one rank's share, micro-batch by micro-batch.

Where only the value head is trained, its features are enough: they are computed without gradients, and the backward
pass ends at the head.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from algos.algorithm import Algorithm
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import Array, Observation, SuperBatch, take_rows
from vla_rl.policies.base.policy import PolicyInput, PolicyOutput
from vla_rl.policies.base.value_head import ValueHead


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What a model says about the chunks of a super-batch."""

    logprobs: np.ndarray  # float32 [M, K, A], of the recorded decisions
    values: np.ndarray  # float32 [M]
    features: np.ndarray | None  # float32 [M, F], see ``PolicyOutput``; for algorithms that need them


class ForwardPasses:
    """Runs a model over rows of a super-batch, as the algorithm and the policy's settings ask."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        rank: int,
        world_size: int,
        device: torch.device,
        lease: DeviceLease,
        num_tasks: int,
        value_head: ValueHead,
    ) -> None:
        self._config, self._algorithm, self._value_head = config, algorithm, value_head
        self._rank, self._world_size, self._device = rank, world_size, device
        self._lease = lease
        self._num_tasks = num_tasks

    def micro_batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """This rank's share of ``rows`` as (chunk rows, is padding); equally many on every rank."""
        mine = rows[self._rank :: self._world_size]
        largest_share = -(-len(rows) // self._world_size)
        parts = max(1, -(-largest_share // self._config.learner.micro_batch))
        for part in np.array_split(mine, parts):
            yield (part, False) if part.size else (rows[:1], True)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def call(
        self,
        model: Any,
        seen: Observation,
        record: Mapping[str, Array],
        policy_version: int,
        *,
        value_only: bool = False,
    ) -> PolicyOutput:
        """The output of a model for some observations and the decisions in them.

        ``value_only``: of the model in training; its values alone have gradients, which end at the value head.
        """
        policy = self._config.policy
        inputs = PolicyInput(**{f.name: self.tensor(getattr(seen, f.name)) for f in fields(seen)})
        recorded = {name: self.tensor(array) for name, array in record.items()}
        with torch.no_grad() if value_only else nullcontext():
            output: PolicyOutput = model(inputs, recorded, policy.temperature_at(policy_version), policy.detach_value)
        if not value_only:
            return output
        time = inputs.elapsed if policy.value_time else torch.zeros_like(inputs.elapsed)
        return replace(output, values=self._value_head(output.features, time).float())

    def of_chunks(
        self,
        model: Any,
        batch: SuperBatch,
        rows: np.ndarray,
        condition: np.ndarray | None = None,
        *,
        value_only: bool = False,
    ) -> PolicyOutput:
        """The output for these chunks; ``condition`` [n]: see ``AlgorithmConfig``; ``value_only`` as ``call``."""
        task = batch.task[rows] if condition is None else self.under(condition, batch.task[rows])
        seen = _seen(batch, batch.obs_row[rows], task)
        record = take_rows(batch.record, rows)
        return self.call(model, seen, record, batch.policy_version, value_only=value_only)

    def under(self, condition: np.ndarray, task: np.ndarray) -> np.ndarray:
        """Numbers of the prompts of these tasks under these conditions (``AlgorithmConfig.prompts``)."""
        return task + condition * self._num_tasks

    @torch.no_grad()
    def evaluate(self, model: Any, batch: SuperBatch) -> Evaluated:
        """What a model says about all chunks, on every rank."""
        logprobs = torch.zeros(batch.logprobs.shape, device=self._device)
        values = torch.zeros(batch.values.shape, device=self._device)
        features: torch.Tensor | None = None
        for part, padding in self.micro_batches(np.arange(batch.num_chunks)):
            with self._lease():
                output = self.of_chunks(model, batch, part)
                features = self._holder(features, batch.num_chunks, output)
                if not padding:
                    index = self.tensor(part)
                    logprobs[index] = output.logprobs
                    values[index] = output.values
                    if features is not None:
                        features[index] = output.features.float()
                self.finish_on_device()
        gathered = None if features is None else self._gathered(features)
        return Evaluated(self._gathered(logprobs), self._gathered(values), gathered)

    @torch.no_grad()
    def evaluate_ends(self, model: Any, batch: SuperBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Of the final observations, 0 where there is none: values [B], and features [B, F] as in ``Evaluated``."""
        values = torch.zeros(batch.num_episodes, device=self._device)
        features: torch.Tensor | None = None
        with_final = np.flatnonzero(batch.final_obs_row >= 0)
        if not with_final.size:
            return batch.bootstrap_value, None
        for part, padding in self.micro_batches(with_final):
            with self._lease():
                seen = _seen(batch, batch.final_obs_row[part], batch.task[batch.offsets[part]])
                record = take_rows(batch.record, batch.offsets[part])  # any: the value does not depend on it
                output = self.call(model, seen, record, batch.policy_version)
                features = self._holder(features, batch.num_episodes, output)
                if not padding:
                    index = self.tensor(part)
                    values[index] = output.values
                    if features is not None:
                        features[index] = output.features.float()
                self.finish_on_device()
        return self._gathered(values), None if features is None else self._gathered(features)

    def _holder(self, features: torch.Tensor | None, count: int, output: PolicyOutput) -> torch.Tensor | None:
        """``features``, or float32 zeros for as many rows after the first output, which shows their number."""
        if features is not None or not self._algorithm.config.needs_features:
            return features
        return torch.zeros(count, output.features.shape[1], device=self._device)

    def _gathered(self, tensor: torch.Tensor) -> np.ndarray:
        """The rows of all ranks; every rank has filled its own and left zeros elsewhere."""
        if self._world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor.cpu().numpy()

    def finish_on_device(self) -> None:
        """Wait for the GPU, which is still computing when its calls have returned: the lease must not end earlier."""
        if self._device.type == "cuda" and self._lease is not nullcontext:
            torch.cuda.synchronize(self._device)


def _seen(batch: SuperBatch, obs_rows: np.ndarray, task: np.ndarray) -> Observation:
    return Observation(batch.images[obs_rows], batch.proprio[obs_rows], task, batch.elapsed[obs_rows])
