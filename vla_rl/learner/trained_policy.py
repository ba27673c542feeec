"""A policy in training: DeepSpeed around it, publication, and its state on disk. One rank of any learner."""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path

import torch

from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.finite import require_finite
from vla_rl.core.ipc.publication import publication
from vla_rl.core.ipc.weights import WeightPublisher, weights_nbytes
from vla_rl.learner.deepspeed_engine import make_engine, make_offloader
from vla_rl.learner.device_timer import DeviceTimer
from vla_rl.learner.optimizer_steps import OptimizerSteps
from vla_rl.learner.weight_average import take_in
from vla_rl.learner.whole_state import WholeState
from vla_rl.observability.meter import Meter
from vla_rl.policies.base.policy import Policy
from vla_rl.policies.build import torch_dtype


class TrainedPolicy:
    """What learners share: a policy on a device, its optimizer, and its weights as others see them.

    The tensors are on the device except between ``offload`` and ``onload``; only these two methods move them.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        *,
        rank: int,
        world_size: int,
        device: str,  # "cuda" or "cpu"
        lease: DeviceLease = nullcontext,  # of the device, if others share it; for each micro-batch
        keeps_copy: bool = False,  # of the policy as it is now
    ) -> None:
        """Call ``join_ranks`` first. ``policy`` is moved to ``device`` and to the configured precision."""
        self.config = config
        self.meter = Meter()
        self._lease = lease
        self._rank, self._world_size, self._device = rank, world_size, torch.device(device)
        self._timer = DeviceTimer(self._device, self.meter)
        policy.to(device=self._device, dtype=torch_dtype(config.learner.precision))
        self._copy = copy.deepcopy(policy).requires_grad_(False) if keeps_copy else None
        self._engine, self._optimizer = make_engine(policy, config.learner)
        self.policy: Policy = self._engine.module
        limit = config.learner.max_grad_norm
        self._steps = OptimizerSteps(self._engine, self.policy, world_size, self._device, limit)
        self._state = WholeState(self._engine, self.policy, rank, world_size)
        self._memory = make_offloader(self._engine, self._copy, self._device)

    def parameters(self, *, average: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each parameter to publish, whole, one after the other; collective under ZeRO.

        ``average``: of their average (``learner.ema``), where there is one. A value may be a view of the live weights.
        Otherwise it is valid until the next is asked for: a rank holds one whole parameter at a time.
        """
        trained = self.policy.trained_parameters()
        if average and self._state.has_average():
            for name, parameter in trained.items():
                yield name, self._state.average(parameter).to(parameter.dtype)
                self._finish_on_device()  # what reads it may only have been queued
            return
        if self.config.learner.zero_stage < 3:
            yield from ((name, parameter.detach()) for name, parameter in trained.items())
            return
        import deepspeed

        for name, parameter in trained.items():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
                self._finish_on_device()

    def published_nbytes(self) -> int:
        """Bytes of one published version; not collective."""
        trained = self.policy.trained_parameters().values()
        return weights_nbytes(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trained)

    @contextmanager
    def whole_policy(self) -> Iterator[Policy]:
        """The policy with whole weights on rank 0, within the block; collective under ZeRO.

        They are their average where there is one (``learner.ema``). Under ZeRO-3 they lie on the host there, gathered
        one after the other: no device holds the whole policy.
        """
        parts: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        averaged = self._state.has_average()
        try:
            for parameter in self.policy.parameters():
                whole = self._whole(parameter, averaged and parameter.requires_grad)
                if whole is not None:
                    parts.append((parameter, parameter.data))
                    parameter.data = whole
            yield self.policy
        finally:
            for parameter, part in parts:
                parameter.data = part

    def _whole(self, parameter: torch.nn.Parameter, average: bool) -> torch.Tensor | None:
        """What ``whole_policy`` has in place of a parameter, or its ``average``; None: itself."""
        divided = self.config.learner.zero_stage == 3
        if average:
            found = self._state.average(parameter)
            return found.to("cpu" if divided else parameter.device, parameter.dtype) if self._rank == 0 else None
        if not divided:
            return None
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):  # leaves undivided weights alone
            return parameter.detach().to("cpu", copy=True) if self._rank == 0 else None

    def publish(self, policy_version: int, publisher: WeightPublisher | None, *, average: bool = False) -> None:
        """Publish the weights as ``policy_version``, or their ``average``, before them (``publication``).

        All ranks call it; the one with a publisher writes.
        """
        with self.meter.time("publish", None if publisher is None else 1):
            tensors = map(itemgetter(1), self.parameters(average=average))  # unlike a generator, it keeps none of them
            if publisher is not None:
                publisher.publish(publication(policy_version, average=average), tensors)
            else:
                deque(tensors, maxlen=0)  # take part in gathering, and keep nothing

    def _end_update(self) -> None:
        """Call at the end of each update."""
        decay = self.config.learner.ema
        if decay is not None:
            with self._lease():
                take_in(self._state, decay)
                self._finish_on_device()
        self._timer.read()
        self.meter.count("updates")

    def _finish_on_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def save(self, folder: Path) -> None:
        """Save trained weights and their moments (``WholeState``); collective. Frozen weights stay in their checkpoint.

        Files are written now or later (``postponed``).
        """
        self._state.save(folder / "state")

    def load(self, folder: Path) -> None:
        """Raises FileNotFoundError if ``folder`` holds no state, and UserError if that is of another policy or not
        finite."""
        if not (folder / "state").is_dir():
            raise FileNotFoundError(f"no learner state in {folder}")
        self._state.load(folder / "state", average=self.config.learner.ema is not None)
        require_finite(self.policy.trained_parameters().values(), str(folder))

    def offload(self) -> None:
        """Move all tensors to the host. Nothing but ``onload`` may be called then."""
        with self._lease(), self.meter.time("offload", 1):
            self._memory.offload()

    def onload(self) -> None:
        """Bring all tensors back to the device."""
        with self._lease(), self.meter.time("onload", 1):
            self._memory.onload()
