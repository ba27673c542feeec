"""One rank of the learner: DeepSpeed around the policy, and the update on one super-batch.

    super-batch ──▶ targets (all ranks alike) ──▶ epochs x minibatches x micro-batches ──▶ version + 1 ──▶ publish

Every rank sees the whole super-batch (it is mapped, not copied) and computes the same targets from it. Only the forward
and backward passes are divided, so no statistic depends on the number of ranks.
"""

import copy
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algos.algorithm import Algorithm
from algos.denominators import LossDenominators
from algos.targets import Targets
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.ipc.weights import WeightPublisher
from vla_rl.core.records import SuperBatch
from vla_rl.learner.deepspeed_engine import load_trained, make_engine, make_offloader, reset_unused_steps
from vla_rl.learner.device_timer import DeviceTimer
from vla_rl.observability.meter import Meter
from vla_rl.policies.build import torch_dtype
from vla_rl.policies.openvla_oft.model import OpenVLAOFT, PolicyOutput, token_entropy, token_logprobs


def join_ranks(rank: int, world_size: int, address: str, port: int, device: str) -> None:
    """Enter the learner's process group. Collective; called once, before a Learner is created."""
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0" if device == "cuda" else str(rank),
        "DS_ACCELERATOR": device,
    }
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use, for tens of seconds
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)


class Learner:
    """Trains a policy on super-batches and publishes its weights.

    The tensors are on the device except between ``offload`` and ``onload``; only these two methods move them.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: OpenVLAOFT,
        algorithm: Algorithm,
        *,
        rank: int,
        world_size: int,
        device: str,  # "cuda" or "cpu"
        lease: DeviceLease = nullcontext,  # of the device, if others share it; for each micro-batch
    ) -> None:
        """Call ``join_ranks`` first. ``policy`` is moved to ``device`` and to the configured precision."""
        self.config = config
        self.algorithm = algorithm
        self.meter = Meter()
        self._grad_norm = 0.0
        self._lease = lease
        self._rank, self._world_size, self._device = rank, world_size, torch.device(device)
        self._timer = DeviceTimer(self._device, self.meter)
        policy.to(device=self._device, dtype=torch_dtype(config.learner.precision))
        needs_copy = algorithm.needs_reference and not policy.adapted  # adapters: the frozen weights are the reference
        self._reference = copy.deepcopy(policy).requires_grad_(False) if needs_copy else None
        self._engine, self._optimizer = make_engine(policy, config.learner)
        self.policy: OpenVLAOFT = self._engine.module
        self._memory = make_offloader(self._engine, self._reference, self._device)

    def update(self, batch: SuperBatch) -> dict[str, float]:
        """Update policy ``batch.policy_version`` to the next version, by all epochs and minibatches.

        Returns metrics over all ranks, the same on every rank.
        """
        with self.meter.time("train"):
            time.sleep(self.config.learner.latency_ms * 1e-3)
            self._set_learning_rates(batch.policy_version)
            batch, targets = self._targets(batch)
            sums: dict[str, float] = defaultdict(float)
            grad_norms: list[float] = []
            for rows in self._minibatches(batch):
                step = self._optimizer_step(batch, targets, rows)
                for name, value in step.items():
                    sums[name] += value
                grad_norms.append(self._grad_norm)
                if self.algorithm.ends_update(step):
                    break
            if not self.algorithm.trains_policy(batch.policy_version):
                reset_unused_steps(self._optimizer)
            self._timer.read()
            self.meter.count("updates")
            metrics = self.algorithm.finish_metrics(dict(sums), targets)
            metrics |= {"grad_norm": float(np.mean(grad_norms)), "lr": self._optimizer.param_groups[0]["lr"]}
            metrics["optimizer_steps"] = len(grad_norms)
            if self._memory.gib:
                metrics["offloaded_gib"] = self._memory.gib
            return {f"learner/{name}": value for name, value in metrics.items()}

    def _targets(self, batch: SuperBatch) -> tuple[SuperBatch, Targets]:
        """The targets, and the batch, with recomputed bootstrap values if the algorithm needs recomputed numbers."""
        logprobs = values = reference = None
        if self.algorithm.needs_reference:
            with self._as_reference() as model:
                reference, _ = self._evaluate(model, batch)
        if self.algorithm.needs_recompute:
            logprobs, values = self._evaluate(self._engine, batch)
            batch = replace(batch, bootstrap_value=self._bootstrap_values(batch))
        return batch, self.algorithm.targets(batch, logprobs, values, reference)

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The policy at the start of the run: a copy, or the trained policy without its adapters."""
        if self._reference is not None:
            yield self._reference
        else:
            with self.policy.reference():
                yield self._engine

    def _minibatches(self, batch: SuperBatch) -> Iterator[np.ndarray]:
        """Rows of each optimizer step: every epoch divides all chunks at random, the same on every rank."""
        parts = min(batch.num_chunks, self.algorithm.minibatches)
        for epoch in range(self.algorithm.epochs):
            rng = np.random.default_rng((self.config.seed, batch.policy_version, epoch))
            yield from np.array_split(rng.permutation(batch.num_chunks), parts)

    def _set_learning_rates(self, policy_version: int) -> None:
        factor = self.config.learner.lr_factor(policy_version, self.config.train.iterations)
        policy, value = self._optimizer.param_groups
        value["lr"] = value["peak_lr"] * factor
        # with 0, weight decay does not act either
        policy["lr"] = policy["peak_lr"] * factor * self.algorithm.trains_policy(policy_version)

    def _micro_batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """This rank's share of ``rows`` as (chunk rows, is padding); equally many on every rank."""
        mine = rows[self._rank :: self._world_size]
        largest_share = -(-len(rows) // self._world_size)
        parts = max(1, -(-largest_share // self.config.learner.micro_batch))
        for part in np.array_split(mine, parts):
            yield (part, False) if part.size else (rows[:1], True)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _output(self, model: Any, batch: SuperBatch, obs_rows: np.ndarray, task: np.ndarray) -> PolicyOutput:
        policy = self.config.policy
        return model(
            self._tensor(batch.images[obs_rows]),
            self._tensor(batch.proprio[obs_rows]),
            self._tensor(task),
            self._tensor(batch.elapsed[obs_rows]),
            policy.temperature_at(batch.policy_version),
            policy.detach_value or not self.algorithm.trains_policy(batch.policy_version),
        )

    def _forward(self, batch: SuperBatch, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """logprobs [n, K, A], entropy [n, K, A], values [n] of these chunks under the current weights."""
        output = self._output(self._engine, batch, batch.obs_row[rows], batch.task[rows])
        logprobs = token_logprobs(output.logits, self._tensor(batch.tokens[rows]))
        return logprobs, token_entropy(output.logits), output.values.float()

    def _optimizer_step(self, batch: SuperBatch, targets: Targets, rows: np.ndarray) -> dict[str, float]:
        denominators = LossDenominators.of(batch.num_steps[rows])
        sums: dict[str, torch.Tensor] = {}
        parts = list(self._micro_batches(rows))
        for i, (part, padding) in enumerate(parts):
            tensors = targets.rows(part, self._device)
            if padding:  # chunks without an executed step do not count
                tensors = replace(tensors, num_steps=torch.zeros_like(tensors.num_steps))
            with self._lease():
                with self._timer.time("micro_batch", len(part)):
                    logprobs, entropy, values = self._forward(batch, part)
                    loss, metrics = self.algorithm.loss(
                        logprobs, entropy, values, tensors, denominators, batch.policy_version
                    )
                    self._engine.set_gradient_accumulation_boundary(i == len(parts) - 1)
                    # DeepSpeed averages gradients over the ranks; the losses are shares of one sum
                    self._engine.backward(loss * self._world_size)
                if i < len(parts) - 1:
                    self._engine.step()  # counts the micro-batch; the weights stay as they are
                else:
                    with self._timer.time("step", 1):
                        self._grad_norm = self._measure_grad_norm()
                        self._engine.step()
                self._finish_on_device()
            for name, value in metrics.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return self._sum_over_ranks(sums)

    def _finish_on_device(self) -> None:
        """Wait for the GPU, which is still computing when its calls have returned: the lease must not end earlier."""
        if self._device.type == "cuda" and self._lease is not nullcontext:
            torch.cuda.synchronize(self._device)

    def _measure_grad_norm(self) -> float:
        """Gradient norm before clipping. ZeRO's optimizers only know the one of the previous step."""
        if self.config.learner.zero_stage or self.config.learner.precision != "fp32":
            return float(self._engine.get_global_grad_norm() or 0.0)
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _sum_over_ranks(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        stacked = torch.stack([sums[name].double() for name in sorted(sums)])
        if self._world_size > 1:
            torch.distributed.all_reduce(stacked)
        return dict(zip(sorted(sums), stacked.tolist(), strict=True))

    @torch.no_grad()
    def _evaluate(self, model: Any, batch: SuperBatch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities [M, K, A] of the recorded tokens and values [M] under a model, on every rank."""
        logprobs = torch.zeros(batch.logprobs.shape, device=self._device)
        values = torch.zeros(batch.values.shape, device=self._device)
        for part, padding in self._micro_batches(np.arange(batch.num_chunks)):
            with self._lease():
                output = self._output(model, batch, batch.obs_row[part], batch.task[part])
                if not padding:
                    index = self._tensor(part)
                    logprobs[index] = token_logprobs(output.logits, self._tensor(batch.tokens[part]))
                    values[index] = output.values.float()
                self._finish_on_device()
        return self._gathered(logprobs), self._gathered(values)

    @torch.no_grad()
    def _bootstrap_values(self, batch: SuperBatch) -> np.ndarray:
        """[B]: values of the final observations under the weights before the update; 0 where there is none."""
        values = torch.zeros(batch.num_episodes, device=self._device)
        with_final = np.flatnonzero(batch.final_obs_row >= 0)
        if not with_final.size:
            return batch.bootstrap_value
        for part, padding in self._micro_batches(with_final):
            with self._lease():
                output = self._output(self._engine, batch, batch.final_obs_row[part], batch.task[batch.offsets[part]])
                if not padding:
                    values[self._tensor(part)] = output.values.float()
                self._finish_on_device()
        return self._gathered(values)

    def _gathered(self, tensor: torch.Tensor) -> np.ndarray:
        """The rows of all ranks; every rank has filled its own and left zeros elsewhere."""
        if self._world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor.cpu().numpy()

    def parameters(self) -> dict[str, torch.Tensor]:
        """All trained parameters, whole, on every rank; collective under ZeRO-3. May be views of the live weights."""
        trained = self.policy.trained_parameters()
        if self.config.learner.zero_stage < 3:
            return dict(trained)
        import deepspeed

        whole = {}
        for name, parameter in trained.items():
            with deepspeed.zero.GatheredParameters([parameter]):
                whole[name] = parameter.detach().clone()
        return whole

    @contextmanager
    def whole_policy(self) -> Iterator[OpenVLAOFT]:
        """The policy with all of its weights gathered, within the block; collective under ZeRO-3."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(self.policy.parameters()):  # leaves undivided weights alone
            yield self.policy

    def publish(self, policy_version: int, publisher: WeightPublisher | None) -> None:
        """Publish the weights as ``policy_version``. All ranks call it; the one with a publisher writes."""
        with self.meter.time("publish", None if publisher is None else 1):
            parameters = self.parameters()
            if publisher is not None:
                publisher.publish(policy_version, parameters)

    def save(self, folder: Path) -> None:
        """Save trained weights, optimizer and sharded state; collective. Frozen weights stay in their checkpoint."""
        self._engine.save_checkpoint(str(folder), tag="state", exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        """Raises FileNotFoundError if ``folder`` holds no state, UserError if it is the state of another policy."""
        if not (folder / "state").is_dir():
            raise FileNotFoundError(f"no learner state in {folder}")
        self._engine.load_checkpoint(str(folder), tag="state", custom_load_fn=load_trained)

    def offload(self) -> None:
        """Move all tensors to the host. Nothing but ``onload`` may be called then."""
        with self._lease(), self.meter.time("offload", 1):
            self._memory.offload()

    def onload(self) -> None:
        """Bring all tensors back to the device."""
        with self._lease(), self.meter.time("onload", 1):
            self._memory.onload()
