"""The config group ``policy``."""

from typing import Literal

from pydantic import Field

from vla_rl.core.schema import ConfigGroup, Positive, PositiveFloat


class LoraConfig(ConfigGroup):
    """Low-rank adapters (arXiv:2106.09685) on frozen weights; the value head is trained in full.

    The defaults are RL4VLA's (arXiv:2505.19789). OpenVLA-OFT (arXiv:2502.19645) leaves out lm_head.
    """

    rank: Positive = Field(32, description="Rank of each adapter.")
    alpha: Positive = Field(16, description="The output of an adapter is scaled by alpha / rank.")
    targets: tuple[Literal["vision", "projector", "language_model", "lm_head"], ...] = Field(
        ("vision", "projector", "language_model", "lm_head"),
        min_length=1,
        description="Parts of the policy in which every linear layer gets an adapter.",
    )


class PolicyConfig(ConfigGroup):
    """The vision-language-action model."""

    checkpoint: str | None = Field(
        None, description="Folder of a policy checkpoint to start from; null: random weights."
    )
    size: Literal["nano", "tiny", "7b"] = Field("tiny", description="Architecture of a policy with random weights.")
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters and freeze the other weights; null: train all weights."
    )
    chunk_size: Positive = Field(8, description="Actions that one inference predicts, in control steps.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; log-probabilities use it, too.")
    detach_value: bool = Field(
        True, description="Stop the value loss's gradients at the value head, so that they do not change the trunk."
    )
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated extra time of one inference batch (a sleep).")
