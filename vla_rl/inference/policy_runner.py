"""The policy as an inference server uses it: torch on one side, plain numpy on the other."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import torch

from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.devices.offload import Offloader
from vla_rl.core.ipc.publication import policy_version_of
from vla_rl.core.ipc.weights import WeightReader
from vla_rl.core.records import ActionBatch, Array, Observation
from vla_rl.inference.graphed_act import GraphedAct
from vla_rl.observability.meter import Meter
from vla_rl.policies.base.policy import Policy, PolicyInput


class PolicyRunner:
    """A ``BatchPolicy`` that acts with the newest published weights."""

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        weights: WeightReader | None,  # None keeps the policy's own weights, as policy version 0
        device: str,
        lease: DeviceLease = nullcontext,  # of the device, if others share it; for each batch
    ) -> None:
        self.meter = Meter()
        self.policy = policy.to(device).eval()
        self._config = config
        self._num_tasks = len(policy.instructions) // len(config.algo.conditions)
        self._lease = lease
        self._device = torch.device(device)
        self._weights = weights
        self._parameters = policy.trained_parameters()
        if config.placement.compile_blocks:
            from vla_rl.policies.base.blocks import compile_blocks

            compile_blocks(self.policy)
        self._graphs = GraphedAct(policy.act) if config.placement.cuda_graphs else None
        if weights is None:  # otherwise ``refresh`` prepares every version
            policy.prepare_to_act()
        frozen = [weight for weight in policy.parameters() if not weight.requires_grad]
        self._memory = Offloader(
            self._device,
            lambda: (*policy.parameters(), *policy.buffers()),
            constant=() if config.policy.own_weights_key else frozen,
        )

    def refresh(self) -> int:
        if self._weights is not None and self._weights.published_version != self._weights.version:
            with self.meter.time("refresh", 1):
                if self._weights.refresh(self._parameters):
                    self.policy.prepare_to_act()
        return self._version

    @property
    def _version(self) -> int:
        return 0 if self._weights is None else policy_version_of(self._weights.version)

    @property
    def _progress(self) -> int:
        """The iteration by which schedules go; a policy without published weights is taken for a trained one."""
        return self._config.train.iterations if self._weights is None else self._version

    def offload(self) -> None:
        with self._lease(), self.meter.time("offload", 1):
            if self._graphs is not None:
                self._graphs.forget()
            self._memory.offload()

    def onload(self) -> None:
        with self._lease(), self.meter.time("onload", 1):
            self._memory.onload()

    def act(self, observation: Observation, draws: Mapping[str, Array], greedy: Array) -> ActionBatch:
        rows = len(greedy)
        # of a padded batch, the first row again and again: what no simulator shows might not be finite
        index = np.arange(self._config.placement.padded_rows(rows))
        index[rows:] = 0
        seen = PolicyInput(**{f.name: self._tensor(getattr(observation, f.name), index) for f in fields(observation)})
        numbers = {name: self._tensor(array, index) for name, array in draws.items()}
        most_likely = self._tensor(greedy, index)
        with self._lease(), self.meter.time("act", rows):
            time.sleep(self._config.policy.latency_ms * 1e-3)
            condition = self._config.algo.acting_condition(self._progress)
            seen = replace(seen, task=seen.task + condition * self._num_tasks)
            temperature = self._config.policy.temperature_at(self._progress)
            chosen = (self._graphs or self.policy.act)(seen, numbers, most_likely, temperature)
            # copies to the host: waits until the device has finished
            record = {name: tensor[:rows].cpu().numpy() for name, tensor in chosen.record.items()}
            logprobs, values = (x[:rows].float().cpu().numpy() for x in (chosen.logprobs, chosen.values))
        actions = self.policy.decode(record)
        return ActionBatch(actions, record, logprobs, values, policy_version=self._version)

    def _tensor(self, array: Array, index: Array) -> torch.Tensor:
        """The rows of ``index``, on the device."""
        return torch.from_numpy(array if len(index) == len(array) else array[index]).to(self._device)
