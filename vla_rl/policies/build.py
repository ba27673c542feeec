"""Builds a run's policy from its config: the same one in every process. Importing this file does not load torch.

Each policy has a folder ``vla_rl/policies/NAME`` with ``config.py`` (its keys) and ``build.py``: ``check_policy``,
``build_policy``, ``policy_sizes`` and ``save_policy``, with the arguments used below; ``keys_of_checkpoint`` and
``alternatives``; for `vla-rl export` ``EXPORT_FORMATS``, ``EXPORT_OPTIONS`` and ``export_policy``, and
``is_checkpoint``, which recognizes a folder. A policy of another package is a class that has these names
(``vla_rl.policies.base.gaussian`` has them); it needs neither ``keys_of_checkpoint`` and ``alternatives`` nor those for
exporting, and ``is_checkpoint`` is not asked of it. ``MODULES`` names those that take long to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vla_rl.core.errors import UserError
from vla_rl.core.plugins import plugin_of
from vla_rl.core.records import EnvSpec
from vla_rl.policies import PolicyConfig
from vla_rl.policies.base.config import PolicyConfigBase
from vla_rl.policies.base.export import Export
from vla_rl.policies.base.sizes import PolicySizes

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.base.policy import Policy


def check_policy(config: PolicyConfig, spec: EnvSpec) -> None:
    """Raise UserError if the checkpoint is incomplete or was made for other observations. Does not load torch.

    Loading the checkpoint checks the shapes of its tensors, too.
    """
    _builder(config).check_policy(config, spec)


def keys_of_checkpoint(config: PolicyConfig, spec: EnvSpec) -> Mapping[str, Any]:
    """Values of configuration keys that follow from the checkpoint, as far as its files say, by dotted key:
    ``env.wrist_camera`` and ``env.proprio``, which it reads, and ``policy.chunk_size``.

    Raises UserError if it cannot be read.
    """
    builder = _builder(config)
    if (config.checkpoint is None and not config.elsewhere) or not hasattr(builder, "keys_of_checkpoint"):
        return {}
    keys: Mapping[str, Any] = builder.keys_of_checkpoint(config, spec)
    return keys


def alternatives(config: PolicyConfig, spec: EnvSpec) -> Sequence[Mapping[str, Any]]:
    """Other values of keys of ``policy`` for which the same checkpoint may be meant, one choice in each mapping."""
    builder = _builder(config)
    return builder.alternatives(config, spec) if config.checkpoint and hasattr(builder, "alternatives") else ()


def policy_modules(config: PolicyConfig) -> Sequence[str]:
    """Names of the modules that ``build_policy`` will import."""
    modules: Sequence[str] = getattr(_builder(config), "MODULES", ())
    return modules


def require_trainable(config: PolicyConfig) -> None:
    """Raise UserError for a policy that can be evaluated only."""
    if not config.trainable:
        raise UserError(
            f"policy.name={config.name}: {config.origin} is for evaluation: it has no "
            "log-probabilities to learn by; use `vla-rl eval`, or train another policy"
        )


def build_policy(
    config: PolicyConfig,
    spec: EnvSpec,
    seed: int,
    prompts: Sequence[str] | None = None,
    *,
    learn_words: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Policy:
    """The checkpoint's policy, or one with random weights drawn by ``seed``.

    Args:
        prompts: the policy's instructions, by task number; None: those of the simulator.
        learn_words: whether a small vocabulary grows by the prompts' words, to be trained on.
        device: where the weights come to be; "meta": nowhere, for a policy that will attach those of another.
        dtype: None for the checkpoint's own.

    Raises UserError.
    """
    policy: Policy = _builder(config).build_policy(config, spec, seed, device, dtype)
    prompts = prompts or spec.instructions
    if learn_words:
        policy.learn_words(prompts)
    of_one_task = prompts[:: len(spec.instructions)]
    if len(of_one_task) > 1 and not policy.tells_apart(of_one_task):
        raise UserError(
            f"policy.checkpoint={config.checkpoint}: its vocabulary lacks words of the algorithm's conditions: "
            f"{of_one_task} are all the same to it. Clone demonstrations with this algo first (vla-rl sft)"
        )
    policy.set_instructions(prompts)
    return policy


def policy_sizes(
    config: PolicyConfig, spec: EnvSpec, element_size: int, *, activation_checkpointing: bool = False
) -> PolicySizes:
    """What the run's policy takes, without building it. ``element_size``: bytes of one weight."""
    sizes: PolicySizes = _builder(config).policy_sizes(config, spec, element_size, activation_checkpointing)
    return sizes


def save_policy(config: PolicyConfig, policy: Policy, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint folder, adapters merged. A reader sees the previous folder or the complete new one.

    Raises UserError if ``metadata`` is not JSON-serializable, OSError if the disk fails.
    """
    _builder(config).save_policy(policy, folder, metadata)


def export_policy(request: Export) -> None:
    """Write a checkpoint to a new folder, in one of the layouts that its policy knows.

    Raises UserError if the policy does not know the layout or an option, or if the checkpoint cannot be read.
    """
    builder = _recognized(request.checkpoint) if request.config is None else _builder(request.config)
    name = "the policy" if request.config is None else f"policy.name={request.config.name}"
    formats = getattr(builder, "EXPORT_FORMATS", ())
    if not formats:
        raise UserError(f"{request.checkpoint}: {name} cannot be exported; use the folder as it is")
    if request.format not in formats:
        raise UserError(
            f"--format {request.format}: {request.checkpoint} can be written as {', '.join(formats)}; choose one"
        )
    if unused := [option for option in request.options if option not in builder.EXPORT_OPTIONS]:
        options = ", ".join(f"--{option.replace('_', '-')}" for option in unused)
        raise UserError(f"{options}: no use for it in exporting {request.checkpoint}; leave it out")
    builder.export_policy(request)


def torch_dtype(precision: str) -> torch.dtype:
    """The dtype of ``learner.precision``: "fp32" or "bf16"."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def _builder(config: PolicyConfigBase) -> Any:
    return plugin_of(config) or _built_in(config.name)


def _built_in(name: str) -> Any:
    return import_module(f"vla_rl.policies.{name}.build")


def _recognized(checkpoint: Path) -> Any:
    """The builder of the policy that a checkpoint is of. Raises UserError."""
    names = [config.model_fields["name"].default for config in get_args(get_args(PolicyConfig)[0])]
    for name in names:
        if _built_in(name).is_checkpoint(checkpoint):
            return _built_in(name)
    raise UserError(
        f"{checkpoint} is no checkpoint of {', '.join(names)}; check the path, and for another package's policy name "
        "the folder of its run"
    )
