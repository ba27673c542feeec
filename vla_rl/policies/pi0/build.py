"""Builds a π0 from its config; see ``vla_rl.policies.build``. Importing this file does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.export import Export
from vla_rl.policies.base.prompts import check_cut_prompts
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.pi0.architecture import model_settings
from vla_rl.policies.pi0.config import Pi0Config

MODULES = tuple(f"vla_rl.policies.pi0.{name}" for name in ("checkpoint", "initialize", "model"))

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.pi0.model import Pi0


EXPORT_FORMATS = ("native", "lerobot")
EXPORT_OPTIONS = ("source",)


def check_policy(config: Pi0Config, spec: EnvSpec) -> None:
    """See ``vla_rl.policies.build.check_policy``."""
    if config.checkpoint is None:
        return
    from tokenizers import Tokenizer

    from vla_rl.policies.pi0.checkpoint import TOKENIZER, checkpoint_file, read_settings

    found = read_settings(config.checkpoint)
    wanted = {
        "views": (len(spec.views), "env.wrist_camera"),
        "proprio_dim": (spec.proprio_dim, "env.proprio"),
        "horizon": (config.horizon_in_use, "policy.horizon"),
        "padded_dim": (config.padded_dim_in_use(spec), "policy.padded_dim"),
    }
    problems = [
        f"it was made for {name}={found[name]}, the run has {ours} (set {key})"
        for name, (ours, key) in wanted.items()
        if found[name] != ours
    ]
    if config.chunk_size > found["horizon"]:
        problems.append(f"it denoises {found['horizon']} actions at once (lower policy.chunk_size={config.chunk_size})")
    if problems:
        raise UserError(f"policy.checkpoint={config.checkpoint} does not fit this run: " + "; ".join(problems))
    inputs = found["inputs"]
    if inputs.longest is not None:
        tokenizer = Tokenizer.from_file(str(checkpoint_file(Path(config.checkpoint), TOKENIZER)))
        prompts = {text: inputs.prompt_ids(tokenizer, text) for text in spec.instructions}
        check_cut_prompts(prompts, inputs.longest, config.checkpoint)


def keys_of_checkpoint(config: Pi0Config, spec: EnvSpec) -> dict[str, Any]:
    """See ``vla_rl.policies.build.keys_of_checkpoint``."""
    from vla_rl.policies.pi0.checkpoint import read_settings

    assert config.checkpoint is not None
    found = read_settings(config.checkpoint)
    return {"env.wrist_camera": found["views"] > 1, "env.proprio": found["proprio_dim"] > 0}


def build_policy(
    config: Pi0Config, spec: EnvSpec, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> Pi0:
    """See ``vla_rl.policies.build.build_policy``. Without data, limits are those of the simulator."""
    if config.checkpoint is None:
        return _random_policy(config, spec, seed).to(device, dtype)
    from vla_rl.policies.pi0.checkpoint import load_policy

    check_policy(config, spec)
    return load_policy(config, seed, spec.actions).to(device, dtype)


def policy_sizes(config: Pi0Config, spec: EnvSpec, element_size: int, activation_checkpointing: bool) -> PolicySizes:
    """See ``vla_rl.policies.build.policy_sizes``."""
    from vla_rl.policies.pi0.sizes import pi0_sizes

    return pi0_sizes(config, _settings(config, spec), spec, element_size)


def save_policy(policy: Pi0, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """See ``vla_rl.policies.build.save_policy``."""
    from vla_rl.policies.pi0 import checkpoint

    checkpoint.save_policy(policy, folder, metadata)


def is_checkpoint(folder: Path) -> bool:
    """Whether the files are those of a π0."""
    from vla_rl.policies.pi0.checkpoint import is_pi0

    return is_pi0(folder)


def export_policy(request: Export) -> None:
    """See ``vla_rl.policies.build.export_policy``."""
    from vla_rl.policies.pi0.checkpoint import config_of, load_policy
    from vla_rl.policies.pi0.published import is_published, write_published

    space = None if request.spec is None else request.spec().actions
    policy = load_policy(config_of(request.checkpoint), space=space)
    if request.format == "native":
        save_policy(policy, request.output, request.origin)
        return
    begun = request.config.checkpoint if request.config is not None else None
    sources = [request.options.get("source"), request.checkpoint, begun]
    source = next((Path(folder) for folder in sources if folder is not None and is_published(folder)), None)
    if source is None:
        raise UserError(
            f"{request.checkpoint}: --format lerobot takes configuration and processors from the folder that training "
            "began with; name one that lerobot has saved: --source FOLDER"
        )
    write_published(policy, source, request.output, space)


def _random_policy(config: Pi0Config, spec: EnvSpec, seed: int) -> Pi0:
    import torch
    from transformers import PI0Config

    from vla_rl.policies.pi0.initialize import initialize
    from vla_rl.policies.pi0.model import Pi0, make_tokenizer
    from vla_rl.policies.pi0.statistics import Statistics

    actions = Statistics.between(spec.actions.low, spec.actions.high, spec.actions.scaled)
    proprio = Statistics.between(*spec.proprio_limits) if spec.proprio_dim else None
    model_config = PI0Config(**_settings(config, spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer(spec.instructions, model_config)
        policy = Pi0(config, model_config, tokenizer, actions, proprio, len(spec.views))
        initialize(policy)
    return policy


def _settings(config: Pi0Config, spec: EnvSpec) -> dict[str, Any]:
    if config.checkpoint is not None:
        from vla_rl.policies.pi0.checkpoint import model_settings_of

        return model_settings_of(config.checkpoint)
    return model_settings(
        config.size,
        horizon=config.horizon_in_use,
        action_dim=config.padded_dim_in_use(spec),
        state_dim=spec.proprio_dim,
        image_size=spec.image_size,
    )
