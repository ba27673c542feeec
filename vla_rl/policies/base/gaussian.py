"""The shortest way to a policy of your own: bring a network, and get a Gaussian over action chunks around it.

``GaussianPolicy`` has all that the rest of the system asks of a policy (``vla_rl.policies.base.policy``), and all that
``vla_rl.policies.build`` asks of a class from outside: checkpoints, sizes, statistics of demonstrations. A subclass has

    class Config(GaussianPolicyConfig)    its own keys, with defaults
    __init__(self, config, spec)          calls the base's with the width of its features, then makes its layers
    features(self, seen)                  [N, width], what actions and values are read from
    TASK_ROWS                             names of its weights with a row for each task, if it has any

    mean = head(features)     action = mean + temperature * exp(log_std) * noise     (normalized actions)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.core.errors import UserError
from vla_rl.core.records import Array, EnvSpec, Record
from vla_rl.policies.base.checkpoint_folder import WEIGHTS, Tensors, read_weights, write_checkpoint
from vla_rl.policies.base.export import Export
from vla_rl.policies.base.gaussian_config import ABOUT, GaussianPolicyConfig
from vla_rl.policies.base.policy import Decisions, Policy, PolicyInput, PolicyOutput
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.base.value_head import ValueHead

__all__ = ["GaussianPolicy", "GaussianPolicyConfig"]

_METADATA = "metadata.json"
_VALUE_WIDTHS = 128, 64
_NARROWEST = 1e-3  # range of a dimension that hardly moves in demonstrations


class GaussianPolicy(Policy):
    """See the module. A record holds the normalized actions: float32 [N, K, A]."""

    Config: ClassVar[type[GaussianPolicyConfig]] = GaussianPolicyConfig
    TASK_ROWS: ClassVar[tuple[str, ...]] = ()
    low: Tensor  # float32 [A], the action that -1 stands for
    high: Tensor  # float32 [A]

    def __init__(self, config: GaussianPolicyConfig, spec: EnvSpec, width: int) -> None:
        """``width``: numbers in a row of ``features``."""
        super().__init__()
        self.config, self.spec = config, spec
        self.action_head = nn.Linear(width, config.chunk_size * spec.action_dim)
        self.log_std = nn.Parameter(torch.full((spec.action_dim,), math.log(config.initial_std)))
        self.value_head = ValueHead(width, *_VALUE_WIDTHS)
        self.register_buffer("low", torch.tensor(spec.actions.low, dtype=torch.float32))
        self.register_buffer("high", torch.tensor(spec.actions.high, dtype=torch.float32))

    @abstractmethod
    def features(self, seen: PolicyInput) -> Tensor:
        """[N, width] of N observations: uint8 images [N, V, H, W, 3], proprio [N, P], task [N]."""

    def set_instructions(self, instructions: Sequence[str]) -> None:
        """Raises UserError for more instructions than the simulator has tasks: algorithms with conditions make them."""
        if len(instructions) > len(self.spec.instructions):
            raise UserError(
                f"{type(self).__name__} tells tasks apart by number and has {len(self.spec.instructions)} of them, not "
                f"{len(instructions)}: choose an algorithm without conditions, such as algo=ppo"
            )
        if not instructions:
            raise ValueError("no instructions: name one for each task")
        self.instructions = tuple(instructions)

    @torch.no_grad()
    def set_statistics(self, actions: Array, proprio: Array) -> None:
        """Normalized actions become -1 and 1 at the limits of ``actions``; ``proprio`` stays as it is."""
        low, high = actions.min(axis=0), actions.max(axis=0)
        middle, half = (low + high) / 2, np.maximum(high - low, _NARROWEST) / 2
        self.low.copy_(torch.from_numpy(middle - half))
        self.high.copy_(torch.from_numpy(middle + half))

    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        mean, log_std, features = self._distribution(seen, temperature)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(mean)
        logprobs = _logprobs(mean, log_std, record["actions"])
        values, deviation = self._values(features, seen, detach_value), log_std.exp().expand_as(mean)
        return PolicyOutput(logprobs, entropy, values, features.detach(), mean, deviation)

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        mean, log_std, features = self._distribution(seen, temperature)
        actions = torch.where(greedy[:, None, None], mean, mean + log_std.exp() * draws["noise"])
        return Decisions(
            {"actions": actions}, _logprobs(mean, log_std, actions), self._values(features, seen, detach_value=True)
        )

    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """The mean squared distance of normalized actions; the deviation is not trained."""
        mean, _, _ = self._distribution(seen, 1.0)
        wanted = torch.from_numpy(self.encode(actions, rng)["actions"]).to(mean.device)
        weights = mask.unsqueeze(-1).expand_as(mean).to(mean.dtype)
        return ((mean - wanted).square() * weights).sum() / weights.sum()

    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        low, high = self._limits()
        return {"actions": (2 * (actions - low) / (high - low) - 1).astype(np.float32)}

    def decode(self, record: Mapping[str, Array]) -> Array:
        low, high = self._limits()
        decoded: Array = (low + (record["actions"] + 1) * (high - low) / 2).astype(np.float32)
        return decoded

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return record["actions"]

    def _distribution(self, seen: PolicyInput, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Means [N, K, A], logarithms of deviations [A], features [N, width]; the first two in float32."""
        if not self.instructions:
            raise RuntimeError("call set_instructions first: it defines the task numbers")
        features = self.features(seen)
        mean = self.action_head(features).float().unflatten(1, (self.config.chunk_size, self.spec.action_dim))
        return mean, self.log_std.float() + math.log(temperature), features

    def _values(self, features: Tensor, seen: PolicyInput, detach_value: bool) -> Tensor:
        time = seen.elapsed if self.config.value_time else torch.zeros_like(seen.elapsed)
        value: Tensor = self.value_head(features.detach() if detach_value else features, time)
        return value.float()

    def _limits(self) -> tuple[Array, Array]:
        return self.low.float().cpu().numpy(), self.high.float().cpu().numpy()

    # What ``vla_rl.policies.build`` asks of a policy's class.

    @classmethod
    def check_policy(cls, config: GaussianPolicyConfig, spec: EnvSpec) -> None:
        """Raise UserError if the checkpoint is another policy's, or was made for other observations or actions."""
        config.check_checkpoint(cls.__qualname__, spec)

    @classmethod
    def build_policy(
        cls,
        config: GaussianPolicyConfig,
        spec: EnvSpec,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The checkpoint's policy, or one with random weights. Its rows of tasks are found by their instructions."""
        policy = cls._random(config, spec, seed)
        if config.checkpoint is not None:
            cls.check_policy(config, spec)
            policy.load_state_dict(policy._read(Path(config.checkpoint)))
        return policy.to(device, dtype)

    def _read(self, checkpoint: Path) -> dict[str, Tensor]:
        """Its weights, with the rows of the simulator's tasks; that of a new task is the mean of all."""
        known = self.config.known_tasks(self.spec)
        expected = self.state_dict()
        expected |= {name: expected[name][:1].expand(len(known), -1) for name in self.TASK_ROWS}
        weights = read_weights(checkpoint, expected, fits=ABOUT)
        if known != self.spec.instructions:
            for name in self.TASK_ROWS:
                table, tasks = weights[name], self.spec.instructions
                rows = [table[known.index(text)] if text in known else table.mean(dim=0) for text in tasks]
                weights[name] = torch.stack(rows)
        return weights

    @classmethod
    def policy_sizes(
        cls, config: GaussianPolicyConfig, spec: EnvSpec, element_size: int, activation_checkpointing: bool
    ) -> PolicySizes:
        """Weights are counted, and so are the outputs of all layers for one observation."""
        policy = cls._random(config, spec, 0)
        outputs: list[int] = []
        for layer in policy.modules():
            if not list(layer.children()):
                layer.register_forward_hook(lambda layer, given, out: outputs.append(_numel(out)))
        seen = PolicyInput(
            torch.zeros((1, len(spec.views), spec.image_size, spec.image_size, 3), dtype=torch.uint8),
            torch.zeros((1, spec.proprio_dim)),
            torch.zeros(1, dtype=torch.long),
            torch.zeros(1),
        )
        with torch.no_grad():
            policy.features(seen)
        pixels = seen.images.numel()
        parameters, held = sum(p.numel() for p in policy.parameters()), sum(outputs) + pixels
        return PolicySizes(
            parameters=parameters,
            trained=sum(p.numel() for p in policy.trained_parameters().values()),
            train_each=2 * held * element_size,
            saved_each=held * element_size,
            infer_each=2 * max([pixels, *outputs]) * element_size,
            features=policy.action_head.in_features,
        )

    @classmethod
    def save_policy(cls, policy: GaussianPolicy, folder: str | Path, metadata: Mapping[str, Any]) -> None:
        files = {ABOUT: policy.config.about(cls.__qualname__, policy.spec), _METADATA: metadata}
        write_checkpoint(Path(folder), {WEIGHTS: Tensors(policy.state_dict())}, files)

    EXPORT_FORMATS: ClassVar[tuple[str, ...]] = ("native",)
    EXPORT_OPTIONS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def export_policy(cls, request: Export) -> None:
        assert isinstance(request.config, GaussianPolicyConfig)
        assert request.spec is not None
        config = request.config.model_copy(update={"checkpoint": str(request.checkpoint)})
        cls.save_policy(cls.build_policy(config, request.spec(), 0), request.output, request.origin)

    @classmethod
    def _random(cls, config: GaussianPolicyConfig, spec: EnvSpec, seed: int) -> Self:
        make: Any = cls
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy: Self = make(config, spec)
        return policy


def _logprobs(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """[N, K, A]: log N(action; mean, std^2)."""
    distance = (actions - mean) * (-log_std).exp()
    return -0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)


def _numel(output: Any) -> int:
    return output.numel() if isinstance(output, Tensor) else 0
