"""Loads a policy from a checkpoint in the published layout."""

import logging
import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vla_rl.policies.base.value_head import ValueHead
from vla_rl.policies.openvla_oft.action_codec import ActionCodec
from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.blank import blank_policy, move_buffers
from vla_rl.policies.openvla_oft.hf_architecture import describe_published
from vla_rl.policies.openvla_oft.hf_folder import TOKENIZER, PublishedFolder
from vla_rl.policies.openvla_oft.hf_names import LOG_NOISE, VALUE_HEAD
from vla_rl.policies.openvla_oft.hf_weights import WeightReader, to_ours
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer
from vla_rl.policies.openvla_oft.regression import NOISE_SCALE
from vla_rl.policies.openvla_oft.trunk import OpenVLA

logger = logging.getLogger(__name__)


def load_published(
    folder: PublishedFolder,
    *,
    views: int,
    chunk_size: int,
    suite: str = "",
    unnorm_key: str | None = None,
    variant: Mapping[str, Any] | None = None,
    noise_scale: float = NOISE_SCALE,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> OpenVLA:
    """Load a policy in ``dtype`` (None: that of its weights), with adapters merged into them before rounding.

    Args:
        views, chunk_size: of the run, because the weights are the same for any number.
        variant: values of ``architecture.VARIANT`` that the run chooses instead of the checkpoint.
        suite: of the simulator; ``unnorm_key``: the data set whose statistics to use. See ``choose_unnorm_key``.
        noise_scale: of a regression head, where the checkpoint has none.
        seed: of the value head, where the checkpoint has none.

    Call ``set_instructions`` before the first forward pass. Raises UserError, which names files and tensors that are
    missing, unknown or of another shape.
    """
    architecture, actions, proprio = describe_published(
        folder, views=views, chunk_size=chunk_size, suite=suite, unnorm_key=unnorm_key, variant=variant
    )
    text = (folder.path / TOKENIZER).read_text(encoding="utf-8")
    tokenizer = PromptTokenizer.from_json(text, architecture)
    policy = blank_policy(architecture, ActionCodec(actions), tokenizer, proprio)
    reader = WeightReader(folder, device, dtype)
    state = to_ours(architecture, reader.weight)
    dtype = dtype or reduce(torch.promote_types, {tensor.dtype for tensor in state.values()})
    state |= {f"proprio_projector.{name}": reader.read(stored) for name, stored in folder.proprio.items()}
    state |= _action_head(folder, architecture, reader, noise_scale)
    state |= _value_head(folder, architecture, reader, seed)
    policy.load_state_dict({name: tensor.to(device, dtype) for name, tensor in state.items()}, assign=True)
    move_buffers(policy, torch.device(device))
    return policy


def _action_head(
    folder: PublishedFolder, architecture: Architecture, reader: WeightReader, noise_scale: float
) -> dict[str, Tensor]:
    """The regression head, with the noise that it lacks as published; empty where actions are tokens."""
    if architecture.head == "tokens":
        return {}
    state = {LOG_NOISE: torch.full((architecture.action_dim,), math.log(noise_scale))}
    state |= {name: reader.read(stored) for name, stored in folder.action_head.items()}
    return {f"action_head.{name}": tensor for name, tensor in state.items()}


def _value_head(
    folder: PublishedFolder, architecture: Architecture, reader: WeightReader, seed: int
) -> dict[str, Tensor]:
    """The checkpoint's value head, or a new one. A new input, proprioception, starts with the weight 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = ValueHead(architecture.llm.width + architecture.proprio_dim, *architecture.value_hidden)
    state = {f"{VALUE_HEAD}{name}": tensor for name, tensor in new.state_dict().items()}
    found = {name: reader.read(stored) for name, stored in folder.value_head.items()}
    values = found.get(f"{VALUE_HEAD}4.weight")
    if values is not None and len(values) != 1:
        logger.warning("%s: its value head has %d outputs, not 1: a new one is used", folder.path, len(values))
        return state
    first = found.get(f"{VALUE_HEAD}0.weight")
    if first is not None and first.shape[1] == architecture.llm.width:
        missing = first.new_zeros(len(first), architecture.proprio_dim)
        found[f"{VALUE_HEAD}0.weight"] = torch.cat([first, missing], dim=1)
    return state | found
