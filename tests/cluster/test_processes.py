"""What runs inside the processes of a cluster, here in the test's own."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import SPEC, config
from vla_rl.cluster.deadlines import Deadlines
from vla_rl.cluster.processes.common import device_lease
from vla_rl.cluster.processes.inference import InferenceProcess
from vla_rl.cluster.processes.weight_relay import WeightRelayProcess
from vla_rl.core.devices.lock import DeviceLockServer
from vla_rl.core.errors import StallError, UserError
from vla_rl.core.ipc.weights import WeightReader, WeightRelay, create_weight_buffers
from vla_rl.observability.spans import SpanLog, read_trace
from vla_rl.placement.plan import Process
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources
from vla_rl.policies.build import build_policy, save_policy


def test_weights_that_are_not_finite_are_not_evaluated(tmp_path: Path) -> None:
    """Each of their answers would be the same action, and the success rate 0."""
    policy = {"name": "openvla_oft", "chunk_size": 4, "size": "nano"}
    settings = config(policy=policy)
    sick = build_policy(settings.policy, SPEC, 0)
    with torch.no_grad():
        next(sick.parameters()).view(-1)[-1] = float("nan")
    save_policy(settings.policy, sick, tmp_path / "policy", {})
    settings = config(policy=policy | {"checkpoint": str(tmp_path / "policy")})
    (server,) = make_plan(settings, Resources(4, 1, "cpu"), training=False).servers
    with pytest.raises(UserError, match=r"policy holds weights that are not finite"):
        InferenceProcess(settings, SPEC, server, tmp_path).build()


def test_a_relay_that_cannot_have_a_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its node acts with old weights, and the run believes that these are published."""
    create_weight_buffers(tmp_path / "weights", 8)
    relay = WeightRelayProcess(Process("weight relay", 0, "cpu", (), 1, None, node=1), tmp_path / "weights")
    relay._relay = WeightRelay(tmp_path / "weights")
    monkeypatch.setattr(relay, "_buckets", lambda version: iter([None]))
    with pytest.raises(StallError, match="weights 3 were replaced at their source"):
        relay.pull(3)
    monkeypatch.setattr(relay, "_buckets", lambda version: iter([np.zeros(8, np.uint8)]))
    relay.pull(4)
    assert WeightReader(tmp_path / "weights").published_version == 4


def test_deadlines_fit_what_a_stage_costs() -> None:
    tiny = Deadlines.of(config(policy={"size": "tiny"}), SPEC)
    large = Deadlines.of(config(policy={"size": "7b", "chunk_size": 4}, learner={"precision": "bf16"}), SPEC)
    assert 600 <= tiny.setup < 610
    assert large.checkpoint > 100e9 / 20e6, "weights, masters and moments of 7 billion, by a slow disk"
    assert 600 <= tiny.publish < 610
    assert 600 + 10e9 / 50e6 < large.publish < 3600, "two bytes a weight, by the network"
    assert [large.update_after(seconds) for seconds in (0.0, 1.0, 600.0)] == [3600.0, 600.0, 12000.0]


def test_how_long_a_lease_was_waited_for_is_recorded() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: a socket's path must be short
        server, log = DeviceLockServer(Path(folder) / "lock"), SpanLog("learner", 0, 0)
        learner, other = (Process(role, 0, "cpu", (0,), 1, "device 0") for role in ("learner", "inference server"))
        lease = device_lease(learner, server.path, log)

        def compute() -> None:
            with lease():
                pass

        with ThreadPoolExecutor(1) as thread:
            with device_lease(other, server.path)():
                waits = thread.submit(compute)
                time.sleep(0.1)
                assert not waits.done()
            waits.result(5.0)
        server.stop()
        (Path(folder) / "learner-0.jsonl").write_bytes(log.take())
        (span,) = read_trace(Path(folder)).spans
    assert span.activity == "lease"
    assert 0.05 < span.end - span.start < 5.0
