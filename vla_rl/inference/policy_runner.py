"""The policy as an inference server uses it: torch on one side, plain numpy on the other."""

import time
from contextlib import nullcontext
from dataclasses import fields

import numpy as np
import torch

from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.devices.offload import Offloader
from vla_rl.core.ipc.weights import WeightReader
from vla_rl.core.records import ActionBatch, Observation
from vla_rl.observability.meter import Meter
from vla_rl.policies.openvla_oft.model import OpenVLAOFT


class PolicyRunner:
    """A ``BatchPolicy`` that acts with the newest published weights."""

    def __init__(
        self,
        policy: OpenVLAOFT,
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
        self._memory = Offloader(
            self._device,
            lambda: (*policy.parameters(), *policy.buffers()),
            constant=[weight for weight in policy.parameters() if not weight.requires_grad],
        )

    def refresh(self) -> int:
        if self._weights is not None and self._weights.published_version != self._weights.policy_version:
            with self.meter.time("refresh", 1):
                self._weights.refresh(self._parameters)
        return self._version

    @property
    def _version(self) -> int:
        return 0 if self._weights is None else self._weights.policy_version

    @property
    def _progress(self) -> int:
        """The iteration by which schedules go; a policy without published weights is taken for a trained one."""
        return self._config.train.iterations if self._weights is None else self._version

    def offload(self) -> None:
        with self._lease(), self.meter.time("offload", 1):
            self._memory.offload()

    def onload(self) -> None:
        with self._lease(), self.meter.time("onload", 1):
            self._memory.onload()

    def act(self, observation: Observation, uniforms: np.ndarray, greedy: np.ndarray) -> ActionBatch:
        arrays = (*(getattr(observation, f.name) for f in fields(observation)), uniforms, greedy)
        images, proprio, task, elapsed, draws, most_likely = (torch.from_numpy(a).to(self._device) for a in arrays)
        with self._lease(), self.meter.time("act", len(observation.task)):
            time.sleep(self._config.policy.latency_ms * 1e-3)
            temperature = self._config.policy.temperature_at(self._progress)
            prompt = task + self._config.algo.acting_condition(self._progress) * self._num_tasks
            results = self.policy.act(images, proprio, prompt, elapsed, draws, most_likely, temperature)
            tokens, logprobs, values = (x.cpu() for x in results)  # waits until the device has finished
        return ActionBatch(
            actions=self.policy.codec.decode(tokens.numpy()),
            tokens=tokens.numpy(),
            logprobs=logprobs.float().numpy(),
            values=values.float().numpy(),
            policy_version=self._version,
        )
