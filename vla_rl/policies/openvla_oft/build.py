"""Builds an OpenVLA-OFT from its config; see ``vla_rl.policies.build``. Importing this file does not load torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.export import Export
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.openvla_oft.architecture import PRESETS, Architecture
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.hf_architecture import describe_published
from vla_rl.policies.openvla_oft.hf_folder import is_published, open_published
from vla_rl.policies.openvla_oft.hf_lora import contradictions, divide, fill_adapters
from vla_rl.policies.openvla_oft.hf_statistics import choose_unnorm_key

MODULES = tuple(f"vla_rl.policies.openvla_oft.{name}" for name in ("checkpoint", "initialize", "regression"))

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.openvla_oft.trunk import OpenVLA


EXPORT_FORMATS = ("openvla-oft", "openvla", "lora", "native")
EXPORT_OPTIONS = ("source", "unnorm_key", "chunk_size", "decoding", "views")


_VIEWS_UNKNOWN = (
    "its files do not say how many images it sees; OpenVLA-OFT's own fine-tunes on LIBERO see two "
    "(set env.wrist_camera=true)"
)
logger = logging.getLogger(__name__)


class _OfTheRun(TypedDict):
    views: int
    chunk_size: int
    suite: str
    unnorm_key: str | None
    variant: Mapping[str, Any]


def check_policy(config: OpenVLAOFTConfig, spec: EnvSpec) -> None:
    """Raise UserError if the checkpoint is incomplete or was made for other observations. Does not load torch.

    Loading a checkpoint of this project's format checks the shapes of its tensors, too.
    """
    if config.checkpoint is None:
        return
    architecture = _read_architecture(config, spec)
    problems = _differences(architecture, config, spec)
    if not is_published(config.checkpoint):
        problems += _wrong_statistics(Path(config.checkpoint), architecture)
    elif (learned := _published_chunk(config, architecture) or config.chunk_size) < config.chunk_size:
        text = "policy.checkpoint=%s learned chunks of %d, and policy.chunk_size=%d"
        logger.warning(text, config.checkpoint, learned, config.chunk_size)
    if is_published(config.checkpoint) and config.lora is not None:
        problems += contradictions(open_published(config.checkpoint), architecture, config.lora)
    if is_published(config.checkpoint) and architecture.head == "l1" and architecture.views == 1:
        if not problems:
            logger.warning("policy.checkpoint=%s: %s", config.checkpoint, _VIEWS_UNKNOWN)
        problems += [_VIEWS_UNKNOWN] if problems else []
    if problems:
        raise UserError(f"policy.checkpoint={config.checkpoint} does not fit this run: " + "; ".join(problems))


def keys_of_checkpoint(config: OpenVLAOFTConfig, spec: EnvSpec) -> dict[str, Any]:
    """See ``vla_rl.policies.build.keys_of_checkpoint``.

    Published files say nothing of views; all L1 heads with proprioception that are published saw two. Few say how many
    actions were learned at once.
    """
    architecture = _read_architecture(config, spec)
    two_views, chunk_size = architecture.views > 1, architecture.chunk_size
    if is_published(config.checkpoint or ""):
        two_views = architecture.head == "l1" and architecture.proprio_dim > 0
        chunk_size = _published_chunk(config, architecture) or config.chunk_size
    proprio = architecture.proprio_dim > 0
    return {"env.wrist_camera": two_views, "env.proprio": proprio, "policy.chunk_size": chunk_size}


def alternatives(config: OpenVLAOFTConfig, spec: EnvSpec) -> list[dict[str, Any]]:
    """See ``vla_rl.policies.build.alternatives``: crop, ``</s>``, and the statistics of other data sets."""
    read, others = _read_architecture(config, spec), []
    if is_published(config.checkpoint or ""):
        statistics = open_published(config.checkpoint or "").statistics
        used = choose_unnorm_key(statistics, config.unnorm_key, spec.suite)
        others = [{"unnorm_key": name} for name in statistics if name != used]
    return [{"center_crop": not read.center_crop}, {"stop_token": not read.stop_token}, *others]


def _published_chunk(config: OpenVLAOFTConfig, architecture: Architecture) -> int | None:
    """How many actions a published policy learned to predict at once; None if its files do not say."""
    written = open_published(config.checkpoint or "").config.get("num_action_chunks")
    return written or (1 if architecture.decoding == "autoregressive" else None)


def build_policy(
    config: OpenVLAOFTConfig, spec: EnvSpec, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> OpenVLA:
    """Load the checkpoint's policy, or make one with random weights drawn by ``seed``. With lora, add adapters.

    New adapters do not change the outputs; those of the checkpoint's folder go on. For the arguments see
    ``vla_rl.policies.build``. Raises UserError.
    """
    make = _random_policy if config.checkpoint is None else _load
    policy = make(config, spec, seed, device, dtype)
    policy.value_time = config.value_time
    policy.compute_head_in_float32(config.fp32_head)
    if config.lora is not None:
        from vla_rl.policies.openvla_oft.lora import MergedAdapters, add_adapters

        add_adapters(policy, config.lora, seed)
        if config.checkpoint is not None and is_published(config.checkpoint):
            fill_adapters(policy, open_published(config.checkpoint))
        if config.lora.merge_to_act:
            policy.merge_to_act = MergedAdapters(policy.adapted)
    return policy


def policy_sizes(
    config: OpenVLAOFTConfig, spec: EnvSpec, element_size: int, activation_checkpointing: bool
) -> PolicySizes:
    """See ``vla_rl.policies.build.policy_sizes``."""
    from vla_rl.policies.openvla_oft.sizes import openvla_sizes

    architecture = make_architecture(config, spec)
    if config.checkpoint is not None:
        with contextlib.suppress(UserError):  # ``check_policy`` tells what is wrong
            architecture = _read_architecture(config, spec)
    return openvla_sizes(
        architecture, config.lora, element_size=element_size, activation_checkpointing=activation_checkpointing
    )


def save_policy(policy: OpenVLA, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """See ``vla_rl.policies.build.save_policy``."""
    from vla_rl.policies.openvla_oft import checkpoint

    checkpoint.save_policy(policy, folder, metadata)


def is_checkpoint(folder: Path) -> bool:
    """Whether the files are those of an OpenVLA, in this project's layout or as published."""
    if is_published(folder):
        return True
    try:
        about = json.loads((folder / "architecture.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and "format" not in about  # other policies name theirs


def export_policy(request: Export) -> None:
    """See ``vla_rl.policies.build.export_policy``."""
    from vla_rl.policies.openvla_oft import export

    export.export_policy(request)


def make_architecture(config: OpenVLAOFTConfig, spec: EnvSpec) -> Architecture:
    """The preset of ``policy.size``, with the views and dimensions of the simulator."""
    preset = PRESETS[config.size](
        views=len(spec.views), proprio_dim=spec.proprio_dim, chunk_size=config.chunk_size, action_dim=spec.action_dim
    )
    return dataclasses.replace(preset, head=config.head_in_use, **config.variant)


def _load(config: OpenVLAOFTConfig, spec: EnvSpec, seed: int, device: str, dtype: torch.dtype | None) -> OpenVLA:
    assert config.checkpoint is not None
    check_policy(config, spec)
    if is_published(config.checkpoint):
        from vla_rl.policies.openvla_oft.hf_reader import load_published

        host = "cpu" if device == "meta" else device  # weights that another's replace
        folder, run = open_published(config.checkpoint), _of_the_run(config, spec)
        if config.lora is not None:
            folder, _ = divide(folder, _read_architecture(config, spec))
        return load_published(folder, **run, noise_scale=config.noise_scale, seed=seed, device=host, dtype=dtype)
    from vla_rl.policies.openvla_oft.checkpoint import load_policy

    return load_policy(config.checkpoint, device, dtype, config.variant)


def _random_policy(
    config: OpenVLAOFTConfig, spec: EnvSpec, seed: int, device: str, dtype: torch.dtype | None
) -> OpenVLA:
    """Without data there are no statistics: ranges are those that the simulator declares."""
    import torch

    from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
    from vla_rl.policies.openvla_oft.initialize import make_policy
    from vla_rl.policies.openvla_oft.regression import OpenVLARegression

    policy = make_policy(
        make_architecture(config, spec),
        spec.instructions,
        ActionCodec.of_space(spec.actions),
        Bounds(*spec.proprio_limits, (True,) * spec.proprio_dim) if spec.proprio_dim else None,
        seed=seed,
        device=device,
        dtype=dtype or torch.float32,
    )
    if isinstance(policy, OpenVLARegression):
        policy.start_noise(config.noise_scale)
    return policy


def _of_the_run(config: OpenVLAOFTConfig, spec: EnvSpec) -> _OfTheRun:
    """What a published checkpoint leaves open."""
    return {
        "views": len(spec.views),
        "chunk_size": config.chunk_size,
        "suite": spec.suite,
        "unnorm_key": config.unnorm_key,
        "variant": config.variant,
    }


def _read_architecture(config: OpenVLAOFTConfig, spec: EnvSpec) -> Architecture:
    """Of the checkpoint. Raises UserError if it is incomplete."""
    assert config.checkpoint is not None
    if is_published(config.checkpoint):
        architecture, *_ = describe_published(open_published(config.checkpoint), **_of_the_run(config, spec))
        return architecture
    try:
        return _read_native(Path(config.checkpoint)).changed(config.variant)
    except ValueError as error:
        raise UserError(f"policy.checkpoint={config.checkpoint}: {error}") from error


def _wrong_statistics(folder: Path, architecture: Architecture) -> list[str]:
    """Whether statistics.json is missing, damaged or of another policy."""
    from vla_rl.policies.openvla_oft.action_codec import Bounds

    path = folder / "statistics.json"
    try:
        content = json.loads(path.read_text())
        found = {name: Bounds.from_dict(values).dim for name, values in dict(content).items()}
    except (ValueError, TypeError, OSError, RecursionError) as error:
        return [f"{path} cannot be read ({error}): copy the checkpoint again"]
    wanted = {"action": architecture.action_dim, "proprio": architecture.proprio_dim}
    return [
        f"{path} is of another policy: it has {found.get(name, 0)} dimensions of {name}, architecture.json {dim}"
        for name, dim in wanted.items()
        if found.get(name, 0) != dim
    ]


def _read_native(folder: Path) -> Architecture:
    path = folder / "architecture.json"
    try:
        architecture = Architecture.from_dict(json.loads(path.read_text())["architecture"])
    except FileNotFoundError:
        raise UserError(
            f"policy.checkpoint={folder}: {path.name} is missing there, and so is the config.json of an OpenVLA model; "
            "name the folder of a policy checkpoint (a run's is at checkpoints/NUMBER/policy), or "
            "policy.checkpoint=null for random weights"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"policy.checkpoint: {path} cannot be read: {error}; copy the checkpoint again") from error
    _check_weights_are_whole(path.with_name("model.safetensors"))
    return architecture


def _check_weights_are_whole(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):  # reads the header, which gives the file's length
            pass
    except FileNotFoundError:
        raise UserError(f"policy.checkpoint: {path} is missing; copy the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"policy.checkpoint: {path} is damaged ({error}); copy the checkpoint again") from error


def _differences(architecture: Architecture, config: OpenVLAOFTConfig, spec: EnvSpec) -> list[str]:
    theirs = architecture
    wanted = {
        "views": (theirs.views, len(spec.views), f"env.wrist_camera={_yaml(theirs.views > 1)}"),
        "proprio_dim": (theirs.proprio_dim, spec.proprio_dim, f"env.proprio={_yaml(theirs.proprio_dim > 0)}"),
        "action_dim": (theirs.action_dim, spec.action_dim, "env.name"),
        "head": (theirs.head, config.head_in_use, f"policy.head={theirs.head}"),
        "chunk_size": (theirs.chunk_size, config.chunk_size, f"policy.chunk_size={theirs.chunk_size}"),
    }
    return [
        f"it was made for {name}={value}, the run has {ours} (set {key})"
        for name, (value, ours, key) in wanted.items()
        if value != ours
    ]


def _yaml(value: bool) -> str:
    return str(value).lower()
