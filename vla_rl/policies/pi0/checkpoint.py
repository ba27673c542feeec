"""A checkpoint of π0 is a folder:

model.safetensors   weights, by the library's names, and the value head
architecture.json   format version, number of views, how inputs are made, and the library's configuration
tokenizer.json      the tokenizer
statistics.json     mean and deviation of actions and proprioception
metadata.json       where the weights come from; free-form, for people and reports
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open

from vla_rl.core.actions import ActionSpace
from vla_rl.policies.base.checkpoint_folder import (
    WEIGHTS,
    CheckpointError,
    checkpoint_file,
    naming,
    read_json,
    read_weights,
    undamaged,
    write_checkpoint,
)
from vla_rl.policies.base.steering import read_steering, steered_files, without_steering
from vla_rl.policies.pi0.config import LENGTHS, Pi0Config
from vla_rl.policies.pi0.input_format import InputFormat
from vla_rl.policies.pi0.published import is_published, open_published
from vla_rl.policies.pi0.published import read_statistics as published_statistics
from vla_rl.policies.pi0.published import read_weights as published_weights
from vla_rl.policies.pi0.statistics import Statistics

if TYPE_CHECKING:
    from vla_rl.policies.pi0.model import Pi0

FORMAT, FORMAT_VERSION = "vla_rl pi0", 1
NOISE_HEAD = "noise_head."  # prefix of its weights
ARCHITECTURE, STATISTICS, TOKENIZER, METADATA = (
    "architecture.json",
    "statistics.json",
    "tokenizer.json",
    "metadata.json",
)


def save_policy(policy: "Pi0", folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint; see ``write_checkpoint``."""
    statistics = {"action": policy.action_statistics.to_dict()}
    if policy.proprio_statistics is not None:
        statistics["proprio"] = policy.proprio_statistics.to_dict()
    about = {"format": FORMAT, "format_version": FORMAT_VERSION, "views": policy.views}
    about |= {"inputs": policy.input_format.to_dict(), "denoise_steps": policy.steps}
    files: dict[str, Mapping | str] = {
        ARCHITECTURE: about | {"model": policy.model.config.to_diff_dict()},
        STATISTICS: statistics,
        TOKENIZER: policy.tokenizer.to_str(pretty=True),
        METADATA: metadata,
    }
    write_checkpoint(Path(folder), steered_files(WEIGHTS, policy.state_dict()), files)


def read_settings(folder: str | Path) -> dict[str, Any]:
    """views, proprio_dim, horizon, padded_dim and inputs of a checkpoint; builds no model. Raises CheckpointError."""
    if is_published(folder):
        found = open_published(Path(folder))
        model, views, proprio_dim, inputs = found.settings, found.views, found.state_dim, found.input_format
    else:
        content = _read_architecture(Path(folder))
        _, proprio = _read_statistics(Path(folder))
        model, views, proprio_dim = model_settings_of(folder), content["views"], len(proprio.mean) if proprio else 0
        with naming(Path(folder) / ARCHITECTURE):
            inputs = InputFormat(**content.get("inputs", {}))
    sizes = {"horizon": model["chunk_size"], "padded_dim": model["max_action_dim"]}
    return sizes | {"views": views, "proprio_dim": proprio_dim, "inputs": inputs}


def model_settings_of(folder: str | Path) -> dict[str, Any]:
    """Arguments of the library's ``PI0Config`` for a checkpoint in either layout. Raises CheckpointError."""
    if is_published(folder):
        return open_published(Path(folder)).settings
    with naming(Path(folder) / ARCHITECTURE):
        return LENGTHS | _read_architecture(Path(folder))["model"]


def is_pi0(folder: Path) -> bool:
    """Whether the folder's description is that of a π0, of any version, in either layout."""
    if is_published(folder):
        return True
    try:
        return read_json(folder, ARCHITECTURE).get("format") == FORMAT
    except CheckpointError:
        return False


def config_of(folder: Path) -> Pi0Config:
    """Keys with which the checkpoint's weights can be loaded: it has the head of learned noise or not."""
    path = checkpoint_file(folder, WEIGHTS)
    with undamaged(path), safe_open(path, framework="pt") as file:
        learned = any(name.startswith(NOISE_HEAD) for name in file.keys())  # noqa: SIM118
    horizon = model_settings_of(folder)["chunk_size"]
    noise: Literal["learned", "sde"] = "learned" if learned else "sde"
    return Pi0Config(checkpoint=str(folder), chunk_size=horizon, noise=noise)


def load_policy(config: Pi0Config, seed: int = 0, space: ActionSpace | None = None) -> "Pi0":
    """The policy in ``config.checkpoint``. ``seed`` draws heads that it lacks; ``space``: see ``published_statistics``.

    Raises CheckpointError.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import PI0Config

    from vla_rl.policies.pi0.model import Pi0

    assert config.checkpoint is not None
    folder, published = Path(config.checkpoint), is_published(config.checkpoint)
    actions, proprio = published_statistics(folder, space) if published else _read_statistics(folder)
    settings = read_settings(folder)
    with naming(folder):
        model_config = PI0Config(**model_settings_of(folder))
    tokenizer = Tokenizer.from_str(checkpoint_file(folder, TOKENIZER).read_text(encoding="utf-8"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Pi0(config, model_config, tokenizer, actions, proprio, settings["views"], settings["inputs"])
    expected = without_steering(policy.state_dict())
    if published:
        weights = published_weights(folder, expected)
    else:
        optional = [name for name in expected if name.startswith(NOISE_HEAD)]  # a run may add it
        weights = read_weights(folder, expected, optional=optional, fits=ARCHITECTURE)
    weights = policy.state_dict() | weights | read_steering(folder, policy.steering)
    policy.load_state_dict(weights, assign=True)
    return policy


def _read_architecture(folder: Path) -> dict[str, Any]:
    content = read_json(folder, ARCHITECTURE)
    if (content.get("format"), content.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{folder / ARCHITECTURE}: format {content.get('format')!r}, version {content.get('format_version')!r}; "
            f"policy.name=pi0 reads {FORMAT!r}, version {FORMAT_VERSION}: name a checkpoint of this policy"
        )
    return content


def _read_statistics(folder: Path) -> tuple[Statistics, Statistics | None]:
    content = read_json(folder, STATISTICS)
    with naming(folder / STATISTICS):
        proprio = Statistics.from_dict(content["proprio"]) if "proprio" in content else None
        return Statistics.from_dict(content["action"]), proprio
