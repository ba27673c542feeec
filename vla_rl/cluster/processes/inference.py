"""The process of an inference server."""

from pathlib import Path
from typing import Any

from vla_rl.cluster.processes.common import LEASE_TIMEOUT_S, PulseAddress, Traced, device_lease
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.records import EnvSpec
from vla_rl.inference.inference_server import BatchPolicy
from vla_rl.placement.plan import Process


class InferenceProcess(Traced):
    def __init__(self, config: RunConfig, spec: EnvSpec, process: Process, lock_server: Path) -> None:
        self._config, self._spec, self._process, self._lock_server = config, spec, process, lock_server
        self.record_spans(process, config.log.trace)
        self._policy: Any = None
        self._server: Any = None

    def build(self, attaches: bool = False) -> None:
        """Import libraries and build the policy: what takes long and needs no other process.

        ``attaches``: ``connect`` will be given a learner's frozen weights, so that there must be none here before.
        Raises UserError if the checkpoint's weights are not finite.
        """
        from vla_rl.core.devices.settings import set_up_torch
        from vla_rl.core.finite import require_finite
        from vla_rl.policies.build import build_policy, torch_dtype

        config, device = self._config, self._process.torch_device
        set_up_torch(device, self._process.threads, config.learner.matmul)
        prompts = config.algo.prompts(self._spec.instructions)
        self._policy = build_policy(
            config.policy,
            self._spec,
            config.seed,
            prompts,
            device="meta" if attaches else device,
            dtype=torch_dtype(config.learner.precision),
        )
        if not attaches and config.policy.checkpoint is not None:
            require_finite(self._policy.parameters(), config.policy.checkpoint)

    def connect(self, address: PoolAddress, weights: Path | None, max_batch: int, frozen: bytes | None = None) -> None:
        """Call after ``build``, and after the learner has published its first weights.

        ``frozen``: message with which to attach the learner's frozen weights, instead of holding a copy.
        """
        from vla_rl.core.ipc.frozen_weights import attach_frozen_weights
        from vla_rl.core.ipc.mailbox import ServerMailbox
        from vla_rl.inference.inference_server import BatchRule, InferenceServer

        if frozen is not None:
            attach_frozen_weights(self._policy, frozen)
        rule = BatchRule(max_batch, self._config.placement.max_wait_ms * 1e-3)
        self._server = InferenceServer(self._make_policy_runner(weights), ServerMailbox(address), rule)

    def _make_policy_runner(self, weights: Path | None) -> BatchPolicy:
        from vla_rl.core.ipc.weights import WeightReader
        from vla_rl.inference.policy_runner import PolicyRunner

        return PolicyRunner(
            policy=self._policy,
            config=self._config,
            weights=WeightReader(weights) if weights else None,
            device=self._process.torch_device,
            lease=device_lease(self._process, self._lock_server, self.spans),
        )

    def run(self, pulse: PulseAddress) -> None:
        progress = pulse.open(self._process)
        for meter in (self._server.meter, self._server.policy.meter):
            meter.observer, meter.spans = progress, self.spans
        try:
            self._server.run()
        finally:
            progress.rest()
            self._server = None  # with what it has mapped; ``connect`` makes another one

    def offload(self) -> None:
        """Free the device; requests wait until ``onload``. Nothing happens after the end of ``run``."""
        if server := self._server:
            server.offload(LEASE_TIMEOUT_S)

    def onload(self) -> None:
        if server := self._server:
            server.onload()

    def stats(self) -> dict[str, float]:
        """Meters of the server, including its waits for leases, and of the policy, without them."""
        server = self._server
        return server.meter.snapshot() | server.policy.meter.snapshot() if server else {}

    def pause(self) -> None:
        """End ``run``; the policy stays for another ``connect``."""
        self.stop()

    def stop(self) -> None:
        if server := self._server:
            server.stop()
