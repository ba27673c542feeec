"""The one schema of a run: every key, its type, its default and its limits.

Values come from a YAML file and ``key=value`` overrides (see ``config_loading``); nothing changes them afterwards.
Each group of keys is one class below; an algorithm's keys stand in its own file (``algos``). Heavy libraries are not
imported here: reading a config is instant.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vla_rl.core.schema import Group, Positive, PositiveFloat

# --- policy ---------------------------------------------------------------------------------------------------------


class LoraConfig(Group):
    """Low-rank adapters (arXiv:2106.09685) on frozen weights; the value head trains as a whole.

    The defaults are RL4VLA's (arXiv:2505.19789). OpenVLA-OFT (arXiv:2502.19645) leaves out lm_head.
    """

    rank: Positive = 32
    alpha: Positive = Field(16, description="What adapters add is scaled by alpha / rank.")
    targets: tuple[Literal["vision", "projector", "language_model", "lm_head"], ...] = Field(
        ("vision", "projector", "language_model", "lm_head"),
        min_length=1,
        description="Parts of the policy in which every linear layer gets an adapter.",
    )


class PolicyConfig(Group):
    """The vision-language-action model."""

    checkpoint: str | None = Field(None, description="Folder of a checkpoint; null starts from random weights.")
    size: Literal["nano", "tiny", "7b"] = Field("tiny", description="Architecture where no checkpoint is given.")
    lora: LoraConfig | None = Field(None, description="Train adapters, freeze the checkpoint; null: train all weights.")
    chunk_size: Positive = Field(8, description="Actions per inference.")
    temperature: PositiveFloat = Field(1.0, description="Of sampling and of log-probabilities alike.")
    detach_value: bool = Field(True, description="The value head reads the trunk's features without shaping them.")
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated extra cost of one inference batch, slept.")
