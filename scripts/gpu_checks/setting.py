"""What the steps share: shapes that fit the device, policies, observations, timing and the ceilings of the device."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers.initialization import no_init_weights

from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import PRESETS
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer

INSTRUCTIONS = ("put the black bowl on the plate", "open the top drawer of the cabinet")
CODEC = ActionCodec(Bounds((-1.0,) * 7, (1.0,) * 7, (True,) * 6 + (False,)))


@dataclass(frozen=True, slots=True)
class Setting:
    """Shapes: the published ones on a GPU, small ones on processor cores, where only the code is checked."""

    device: str
    size: str  # of the policy in steps 2 to 7
    dtype: str
    rows: tuple[int, ...]  # of inference and of micro-batches
    matrix: int  # of the product that measures the ceiling
    copied: int  # bytes of the copies that measure rates
    repeats: int

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def describe(self) -> dict[str, Any]:
        about = asdict(self) | {"torch": torch.__version__, "cuda": torch.version.cuda}
        about |= {"small_shapes": self.size != "7b"}
        if self.on_gpu:
            from vla_rl.core.gpus import GpuReport

            report = GpuReport.detect()
            about |= {"gpus": [gpu.name for gpu in report.gpus], "driver": report.driver}
        return about


def choose_setting(small: bool = False) -> Setting:
    """By the presence of an NVIDIA driver; the process that asks must not touch the device, since it forks."""
    from vla_rl.core.gpus import GpuReport

    if GpuReport.detect().usable:
        if small:
            return Setting("cuda", "nano", "bf16", (2, 4), 1024, 1 << 26, 3)
        return Setting("cuda", "7b", "bf16", (1, 2, 4, 8, 16, 32), 8192, 1 << 30, 5)
    return Setting("cpu", "nano", "fp32", (1, 2), 256, 1 << 22, 2)


def spec_of(size: str) -> EnvSpec:
    pixels = {"nano": 64, "tiny": 96, "7b": 224}[size]
    return EnvSpec("check", ("main",), pixels, 0, end_effector(), 64, INSTRUCTIONS)


def config_of(setting: Setting, **groups: dict[str, Any]) -> RunConfig:
    parts: dict[str, dict[str, Any]] = {
        "policy": {"name": "openvla_oft", "size": setting.size},
        "algo": {"name": "ppo", "minibatches": 1},
        "learner": {"precision": setting.dtype, "zero_stage": int(setting.dtype == "bf16")},
    }
    return RunConfig.model_validate({name: parts.get(name, {}) | groups.get(name, {}) for name in parts | groups})


def make_policy(setting: Setting, device: str) -> OpenVLAOFT:
    """A policy whose weights are not written yet, so that nothing of its size is ever anywhere else."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[setting.dtype]
    spec, default = spec_of(setting.size), torch.get_default_dtype()
    architecture = PRESETS[setting.size](views=len(spec.views), proprio_dim=0, chunk_size=8, action_dim=7)
    tokenizer = PromptTokenizer(build_tiny_tokenizer(INSTRUCTIONS, architecture.text_vocab_size), architecture)
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), torch.device(device):
            policy = OpenVLAOFT(architecture, CODEC, tokenizer)
    finally:
        torch.set_default_dtype(default)
    policy.to(dtype)  # for parts that ignore the default
    policy.set_instructions(INSTRUCTIONS)
    return policy


@torch.no_grad()
def fill_policy(setting: Setting) -> OpenVLAOFT:
    """A policy of random weights on the device."""
    policy = make_policy(setting, setting.device)
    for name, weight in policy.named_parameters():
        if weight.dim() > 1:
            weight.normal_(std=0.02)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return policy


def observations(setting: Setting, rows: int, seed: int = 0, device: str | None = None) -> PolicyInput:
    rng, spec = np.random.default_rng(seed), spec_of(setting.size)
    images = rng.integers(0, 256, (rows, len(spec.views), spec.image_size, spec.image_size, 3)).astype(np.uint8)
    arrays = images, np.zeros((rows, 0), np.float32), np.arange(rows) % 2, rng.random(rows).astype(np.float32)
    return PolicyInput(*(torch.from_numpy(array).to(device or setting.device) for array in arrays))


def wait(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()


def seconds(setting: Setting, call: Callable[[], Any], repeats: int | None = None) -> float:
    """Mean seconds of a call, after one that is not counted."""
    call()
    wait(setting)
    repeats, start = repeats or setting.repeats, time.perf_counter()
    for _ in range(repeats):
        call()
    wait(setting)
    return (time.perf_counter() - start) / repeats


def peak_gib(setting: Setting) -> float:
    """Memory of the device that this process has held at most since ``forget_peak``; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if setting.on_gpu else 0.0


def forget_peak(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def flops_of(call: Callable[[], Any], *, training: bool = False) -> float:
    """Floating point operations of the matrix products of a call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, nullcontext() if training else torch.no_grad():
        call()
    return float(counter.get_total_flops())


def matrix_rate(setting: Setting) -> float:
    """FLOP/s of a large product of square matrices: the ceiling for what follows."""
    n = setting.matrix
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * n**3 / seconds(setting, lambda: a @ b)


def copy_rates(setting: Setting) -> dict[str, float]:
    """Bytes per second of copies on the device, and between it and page-locked host memory."""
    n = setting.copied
    device, other = (torch.empty(n, dtype=torch.uint8, device=setting.device) for _ in range(2))
    host = torch.empty(n, dtype=torch.uint8, pin_memory=setting.on_gpu)
    return {
        "on the device": 2 * n / seconds(setting, lambda: other.copy_(device)),  # reads and writes
        "host to device": n / seconds(setting, lambda: device.copy_(host, non_blocking=True)),
        "device to host": n / seconds(setting, lambda: host.copy_(device, non_blocking=True)),
    }


def checksum(tensors: Any) -> int:
    """Of all bits."""
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
        weights = torch.arange(data.numel(), device=data.device) % 8191 + 1
        total = (total * 31 + int((data.view(kind).long() * weights).sum())) % (1 << 61)
    return total
