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
        None,
        description="Folder of a policy checkpoint to start from, in this project's format or as OpenVLA's are "
        "published, or OWNER/NAME of one on the model hub (docs/policies.md); null: random weights.",
    )
    unnorm_key: str | None = Field(
        None,
        description="Data set whose statistics scale the actions, of a checkpoint as published; null: that of the "
        "simulator's suite, or the only one.",
    )
    center_crop: bool | None = Field(
        None,
        description="Crop images to 90% of their area; null: as the checkpoint says, and true for one as published "
        "(RL4VLA's need false).",
    )
    size: Literal["nano", "tiny", "7b"] = Field("tiny", description="Architecture of a policy with random weights.")
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters and freeze the other weights; null: train all weights."
    )
    chunk_size: Positive = Field(8, description="Actions that one inference predicts, in control steps.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; log-probabilities use it, too.")
    temperature_end: PositiveFloat | None = Field(
        None, description="Temperature from iteration temperature_iterations on; null: the same as at the start."
    )
    temperature_iterations: Positive = Field(
        100, description="Iterations over which the temperature changes to temperature_end, linearly."
    )
    detach_value: bool = Field(
        True, description="Stop the value loss's gradients at the value head, so that they do not change the trunk."
    )
    value_time: bool = Field(
        True,
        description="The value head reads which share of the time limit has passed (arXiv:1712.00378); false: it does "
        "not.",
    )
    fp32_head: bool = Field(
        False,
        description="Compute the action logits in float32 if weights are bf16 (arXiv:2510.13786): sampler and learner "
        "then agree more closely.",
    )
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated extra time of one inference batch (a sleep).")

    def temperature_at(self, policy_version: int) -> float:
        """Temperature at which a version of the weights is sampled and trained."""
        end = self.temperature if self.temperature_end is None else self.temperature_end
        done = min(1.0, policy_version / self.temperature_iterations)
        return self.temperature + done * (end - self.temperature)
