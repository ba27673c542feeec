"""What a policy's products of matrices take alone: the least time of acting and of learning."""

import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.settings import set_up_torch
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.policy import Policy, PolicyInput
from vla_rl.policies.build import build_policy, torch_dtype

_TRIALS = 7
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")  # and attention


class Products(TorchDispatchMode):
    """Notes the products of matrices within the block; ``seconds`` repeats each kind of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[Any, tuple[Callable[..., Any], Any, Any]] = {}
        self._counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or name.startswith("_scaled_dot_product"):
            leaves = tree_flatten((args, kwargs or {}))[0]
            kind = name, tuple((tuple(x.shape), x.stride()) if isinstance(x, Tensor) else repr(x) for x in leaves)
            self._calls.setdefault(kind, (func, args, kwargs or {}))
            self._counts[kind] += 1
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def seconds(self) -> float:
        """Of all of them together."""
        return sum(count * _seconds(*self._calls[kind]) for kind, count in self._counts.items())


def products_of(config: RunConfig, spec: EnvSpec) -> dict[str, float]:
    """Seconds for a chunk: "inference" in a full batch, and "learner" in a micro-batch, in all of its epochs.

    On the first GPU, or on one core.
    """
    device = "cuda" if Machine.detect().gpus else "cpu"
    set_up_torch(device, 1, config.learner.matmul)
    prompts = config.algo.prompts(spec.instructions)
    dtype = torch_dtype(config.learner.precision)
    policy = build_policy(config.policy, spec, config.seed, prompts, device=device, dtype=dtype)
    acting, learning = config.placement.max_batch, config.learner.micro_batch
    with Products() as acted:
        _act(policy.eval(), config, spec, acting)
    found = {"inference": acted.seconds() / acting}
    record = {name: x.to(device) for name, x in _act(policy, config, spec, learning).record.items()}
    with Products() as learned:
        output = policy.train()(_observations(spec, learning, device), record, config.policy.temperature_at(0))
        (output.logprobs.exp().mean() + output.values.square().mean()).backward()
    return found | {"learner": learned.seconds() / learning * config.algo.work(config.policy.chunk_size).epochs}


def _act(policy: Policy, config: RunConfig, spec: EnvSpec, rows: int) -> Any:
    rng, device = np.random.default_rng(0), str(next(policy.parameters()).device)
    draws = {
        name: torch.from_numpy(np.stack([numbers.draw(rng) for _ in range(rows)])).to(device)
        for name, numbers in config.policy.spec(spec).draws.items()
    }
    greedy = torch.zeros(rows, dtype=torch.bool, device=device)
    return policy.act(_observations(spec, rows, device), draws, greedy, config.policy.temperature_at(0))


def _observations(spec: EnvSpec, rows: int, device: str) -> PolicyInput:
    size = spec.image_size
    images = torch.randint(0, 256, (rows, len(spec.views), size, size, 3), dtype=torch.uint8)
    task, zeros = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    inputs = images, torch.zeros(rows, spec.proprio_dim), task, zeros
    return PolicyInput(*(x.to(device) for x in inputs))


def _seconds(product: Callable[..., Any], args: Any, kwargs: Any) -> float:
    trials = []
    for _ in range(_TRIALS):
        _wait()
        start = time.perf_counter()
        product(*args, **kwargs)
        _wait()
        trials.append(time.perf_counter() - start)
    return median(trials)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
