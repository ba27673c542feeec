"""A checkpoint of π0 is a folder:

model.safetensors   weights, by the library's names, and the value head
architecture.json   format version, number of views, and the library's configuration
tokenizer.json      the tokenizer
statistics.json     mean and deviation of actions and proprioception
metadata.json       where the weights come from; free-form, for people and reports
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open

from vla_rl.policies.base.checkpoint_folder import (
    WEIGHTS,
    CheckpointError,
    Tensors,
    checkpoint_file,
    naming,
    read_json,
    read_weights,
    undamaged,
    write_checkpoint,
)
from vla_rl.policies.pi0.config import Pi0Config
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
    files: dict[str, Mapping | str] = {
        ARCHITECTURE: about | {"model": policy.model.config.to_diff_dict()},
        STATISTICS: statistics,
        TOKENIZER: policy.tokenizer.to_str(pretty=True),
        METADATA: metadata,
    }
    write_checkpoint(Path(folder), {WEIGHTS: Tensors(policy.state_dict())}, files)


def read_settings(folder: str | Path) -> dict[str, Any]:
    """views, proprio_dim, horizon and padded_dim of a checkpoint. Does not build the model. Raises CheckpointError."""
    content = _read_architecture(Path(folder))
    with naming(Path(folder) / ARCHITECTURE):
        model = content["model"]
        sizes = {"horizon": model["chunk_size"], "padded_dim": model["max_action_dim"], "views": content["views"]}
    _, proprio = _read_statistics(Path(folder))
    return sizes | {"proprio_dim": len(proprio.mean) if proprio else 0}


def is_pi0(folder: Path) -> bool:
    """Whether the folder's description is that of a π0, of any version."""
    try:
        return read_json(folder, ARCHITECTURE).get("format") == FORMAT
    except CheckpointError:
        return False


def config_of(folder: Path) -> Pi0Config:
    """Keys with which the checkpoint's weights can be loaded: it has the head of learned noise or not."""
    content, path = _read_architecture(folder), checkpoint_file(folder, WEIGHTS)
    with undamaged(path), safe_open(path, framework="pt") as file:
        learned = any(name.startswith(NOISE_HEAD) for name in file.keys())  # noqa: SIM118
    with naming(folder / ARCHITECTURE):
        horizon = content["model"]["chunk_size"]
    noise: Literal["learned", "sde"] = "learned" if learned else "sde"
    return Pi0Config(checkpoint=str(folder), chunk_size=horizon, noise=noise)


def load_policy(config: Pi0Config) -> "Pi0":
    """The policy in ``config.checkpoint``. Raises CheckpointError."""
    from tokenizers import Tokenizer
    from transformers import PI0Config

    from vla_rl.policies.pi0.model import Pi0

    assert config.checkpoint is not None
    folder = Path(config.checkpoint)
    content, (actions, proprio) = _read_architecture(folder), _read_statistics(folder)
    with naming(folder / ARCHITECTURE):
        model_config = PI0Config(**content["model"])
    tokenizer = Tokenizer.from_str(checkpoint_file(folder, TOKENIZER).read_text(encoding="utf-8"))
    policy = Pi0(config, model_config, tokenizer, actions, proprio, content["views"])
    expected = policy.state_dict()
    optional = [name for name in expected if name.startswith(NOISE_HEAD)]  # a run may add it
    policy.load_state_dict(expected | read_weights(folder, expected, optional=optional, fits=ARCHITECTURE), assign=True)
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
