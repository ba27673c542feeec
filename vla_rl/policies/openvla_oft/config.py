"""The config group ``policy`` of OpenVLA-OFT."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.core.schema import ConfigGroup, Positive
from vla_rl.policies.base.config import PolicyConfigBase


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


class OpenVLAOFTConfig(PolicyConfigBase):
    """OpenVLA-OFT with discrete actions and parallel decoding."""

    merged: ClassVar[dict[str, Any]] = {"lora": None}

    name: Literal["openvla_oft"] = "openvla_oft"
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
    fp32_head: bool = Field(
        False,
        description="Compute the action logits in float32 if weights are bf16 (arXiv:2510.13786): sampler and learner "
        "then agree more closely.",
    )

    def spec(self, env: EnvSpec) -> PolicySpec:
        shape = self.chunk_size, env.action_dim
        tokens, uniforms = ArrayLayout("|u1", shape), RandomNumbers(shape)
        return PolicySpec(*shape, record={"tokens": tokens}, draws={"uniforms": uniforms})

    @property
    def size_name(self) -> str:
        return self.size

    @property
    def freezes_weights(self) -> bool:
        return self.lora is not None
