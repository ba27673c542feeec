"""A policy of the package lerobot behind this project's contract: observations in, physical actions out.

lerobot's own processors, saved with the policy, tokenize and normalize. Policies that lerobot has trained see upright
images, and their actions are those of its data sets (``ActionSpace.from_data``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors import safe_open
from torch import Tensor

from vla_rl.core.actions import ActionSpace
from vla_rl.core.cameras import wrist_last
from vla_rl.core.errors import UserError
from vla_rl.policies.base.checkpoint_folder import WEIGHTS
from vla_rl.policies.base.evaluated_policy import EvaluatedPolicy
from vla_rl.policies.base.policy import Decisions, PolicyInput
from vla_rl.policies.lerobot.config import LeRobotConfig

_SEEDS = 1 << 24  # what a uniform float32 distinguishes


def open_checkpoint(config: LeRobotConfig, device: str) -> tuple[Any, Any, Any]:
    """lerobot's policy in ``config.checkpoint``, and its processors before and after it.

    Raises UserError if lerobot has not loaded the weights.
    """
    path = str(config.checkpoint)
    settings = PreTrainedConfig.from_pretrained(path)
    settings.device = device
    if config.train_expert_only is not None and config.trainable:
        settings.train_expert_only = config.train_expert_only
    model = get_policy_class(settings.type).from_pretrained(path, config=settings)
    _require_loaded(model, Path(path) / WEIGHTS)
    overrides = {"device_processor": {"device": device}}
    return model, *make_pre_post_processors(settings, path, preprocessor_overrides=overrides)


def _require_loaded(model: Any, file: Path) -> None:
    """Some of lerobot's loaders print a warning if they fail, and go on with random weights."""
    if not file.is_file():  # an id on the hub
        return
    ours = model.state_dict()
    alike = total = 0
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            weight = ours.get(name, ours.get(f"model.{name}"))  # lerobot reads both
            part = opened.get_slice(name)
            total += 1
            if weight is not None and part.get_shape() == list(weight.shape):
                row = part[:1] if weight.dim() else part[:]
                alike += torch.equal(row.to(weight.dtype), (weight[:1] if weight.dim() else weight).cpu())
    if 2 * alike < total:  # a few may be tied, or renamed
        raise UserError(
            f"{file}: lerobot has loaded {alike} of its {total} tensors (its warnings are above); config.json may be "
            "that of another policy, or the file of another version of lerobot"
        )


def load_policy(config: LeRobotConfig, space: ActionSpace, device: str) -> LeRobotPolicy:
    """The policy of ``config.checkpoint``, with its processors."""
    return LeRobotPolicy(config, space, *open_checkpoint(config, device))


def cameras_of(model: Any) -> list[str]:
    """Names of its cameras, in the order of our views."""
    return wrist_last(name for name in model.config.image_features if "empty_camera" not in name)


def as_batch(seen: PolicyInput, cameras: Sequence[str], instructions: Sequence[str]) -> dict[str, Any]:
    """Observations as lerobot's processors take them."""
    images = seen.images.permute(0, 1, 4, 2, 3).float() / 255.0
    batch: dict[str, Any] = {name: images[:, view] for view, name in enumerate(cameras)}
    batch["observation.state"] = seen.proprio
    batch["task"] = [instructions[int(task)] for task in seen.task]
    return batch


class LeRobotPolicy(EvaluatedPolicy):
    """See the module. It can act, and nothing else."""

    def __init__(self, config: LeRobotConfig, space: ActionSpace, model: Any, before: Any, after: Any) -> None:
        super().__init__()
        self._space = space
        self.model = model.eval().requires_grad_(False)
        self._before, self._after = before, after
        self._chunk_size = config.chunk_size
        self._cameras = cameras_of(model)
        self._takes_noise = "noise" in inspect.signature(model.predict_action_chunk).parameters

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """The first actions of the predicted chunk. Policies that denoise do so from noise that the row's draw settles,
        where lerobot lets the caller give it; greedy or not, and at any temperature."""
        batch = as_batch(seen, self._cameras, self.instructions)
        noise = {"noise": self._noise(draws["seed"])} if self._takes_noise else {}
        predicted = self.model.predict_action_chunk(self._before(batch), **noise)
        chosen = self._space.from_data(self._after(predicted[:, : self._chunk_size]).float().cpu().numpy())
        actions = torch.from_numpy(chosen)
        rows, device = len(seen.task), seen.images.device
        return Decisions({"actions": actions}, torch.zeros(actions.shape), torch.zeros(rows, device=device))

    def _noise(self, seeds: Tensor) -> Tensor:
        """Standard normal [N, H, D], each row by its own number, whatever the rest of the batch."""
        shape = self.model.config.chunk_size, self.model.config.max_action_dim
        rows = []
        for seed in seeds.tolist():
            generator = torch.Generator().manual_seed(int(seed * _SEEDS))
            rows.append(torch.randn(shape, generator=generator))
        return torch.stack(rows).to(seeds.device)
