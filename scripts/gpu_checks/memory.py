"""Steps 6 and 7: how weights get from one process to another, and off a device and back."""

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_checks.learning import make_learner, shared_folder, super_batch
from gpu_checks.report import Report
from gpu_checks.setting import (
    Setting,
    checksum,
    config_of,
    copy_rates,
    fill_policy,
    forget_peak,
    make_policy,
    seconds,
    wait,
)
from gpu_checks.training import adapted_policy
from vla_rl.core.ipc.frozen_weights import attach_frozen_weights, share_frozen_weights
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers, weights_nbytes
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.lora import add_adapters

_BORROW = "import sys; sys.path[:0] = sys.argv[1:3]; from gpu_checks.memory import borrow; borrow(sys.argv[3])"


def hand_over(setting: Setting, report: Report) -> None:
    """Step 6."""
    for way, rate in copy_rates(setting).items():
        report.add(f"copy {way}", rate / 1e9, "GB/s")
    policy = adapted_policy(setting)
    report.attempt("sync of adapters", partial(_sync, setting, report, policy.trained_parameters(), "adapters"))
    report.attempt("lent weights", partial(_lend, setting, report, policy))
    report.attempt("sync of all weights", partial(_sync, setting, report, dict(policy.named_parameters()), "all"))


def _sync(setting: Setting, report: Report, source: dict[str, Any], which: str) -> str:
    tensors = {name: tensor.detach() for name, tensor in source.items()}
    nbytes = weights_nbytes(t.numel() * t.element_size() for t in tensors.values())
    with shared_folder() as folder:
        start = time.perf_counter()
        create_weight_buffers(folder / "weights", nbytes)
        report.add("allocation of both buffers", time.perf_counter() - start, "s", weights=which)
        publisher, reader = WeightPublisher(folder / "weights"), WeightReader(folder / "weights")
        publisher.publish(0, tensors.values())  # locks the pages
        taken = seconds(setting, lambda: publisher.publish(1, tensors.values()), 2)
        report.add("publish", nbytes / taken / 1e9, "GB/s", weights=which, nbytes=nbytes)
        expected = checksum(tensors.values())
        for tensor in tensors.values():
            tensor.zero_()
        reader.refresh(tensors)
        same = checksum(tensors.values()) == expected
        publisher.publish(2, tensors.values())
        start = time.perf_counter()
        reader.refresh(tensors)
        wait(setting)
        report.add("refresh", nbytes / (time.perf_counter() - start) / 1e9, "GB/s", weights=which)
    return "the same bits" if same else "OTHER BITS"


def _frozen(policy: Any) -> Iterable[Tensor]:
    return (p for p in policy.parameters() if not p.requires_grad)


def _lend(setting: Setting, report: Report, policy: Any) -> str:
    expected, root = checksum(_frozen(policy)), Path(__file__).resolve().parents[2]
    forget_peak(setting)  # and what the checksum took
    before = torch.cuda.mem_get_info()[0] if setting.on_gpu else 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "message"
        file.write_bytes(pickle.dumps((setting, share_frozen_weights(policy, Path(folder) / "frozen"))))
        command = [sys.executable, "-c", _BORROW, str(root), str(root / "scripts"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found, used = map(int, done.stdout.split()[-2:])
    if setting.on_gpu:
        report.add("memory of the device while another process had the weights", (before - used) / 2**30, "GiB more")
    return "the same bits" if found == expected else "OTHER BITS"


def borrow(file: str) -> None:
    """In another process: attach the weights of the message, and print their checksum and the device's free memory."""
    setting, message = pickle.loads(Path(file).read_bytes())
    policy = make_policy(setting, "cpu")  # pages that nothing writes to take no memory
    add_adapters(policy, LoraConfig(), seed=0)
    attach_frozen_weights(policy, message)
    free = torch.cuda.mem_get_info()[0] if setting.on_gpu else 0  # before the checksum takes some
    print(checksum(_frozen(policy)), free)


def offload(setting: Setting, report: Report) -> None:
    """Step 7."""
    config = config_of(setting, learner={"precision": "bf16", "zero_stage": 1, "micro_batch": setting.rows[0]})
    runner = PolicyRunner(fill_policy(setting), config, None, setting.device)
    _round_trip(setting, report, "inference", runner, runner.policy.parameters)
    del runner
    learner = make_learner(config, adapted_policy(setting), setting.device)
    learner.update(super_batch(config, 2, 2))
    _round_trip(setting, report, "learner", learner, learner.policy.parameters)
    learner.update(super_batch(config, 2, 2, 1))
    report.add("an update after the round trips", "done")


def _round_trip(setting: Setting, report: Report, which: str, part: Any, tensors: Any) -> None:
    expected = checksum(tensors())
    for trip in range(2):  # the first one allocates host memory
        for move in (part.offload, part.onload):
            start = time.perf_counter()
            move()
            wait(setting)
            taken = time.perf_counter() - start
            gib = part._memory.gib
            report.add(move.__name__, gib * 2**30 / taken / 1e9, "GB/s", part=which, gib=round(gib, 3), trip=trip)
    report.add("after a round trip", "the same bits" if checksum(tensors()) == expected else "OTHER BITS", part=which)
