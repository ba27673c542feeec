"""The config group ``policy`` of OpenVLA-OFT."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.core.schema import INPUT_PATH, ConfigGroup, Positive, PositiveFloat
from vla_rl.policies.base.config import PolicyConfigBase
from vla_rl.policies.openvla_oft.architecture import VARIANT, DecodingName, HeadName, Resize, Rounding
from vla_rl.policies.openvla_oft.hf_folder import has_adapters, head_of

LORA_PARTS = {
    "vision": ("dino", "siglip"),
    "projector": ("projector", "proprio_projector"),
    "language_model": ("language_model",),
    "lm_head": ("lm_head",),
}  # by target


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
    merge_to_act: bool = Field(
        False,
        description="Inference servers add the adapters into a copy of the weights after every weight sync: an adapted "
        "layer then costs one matrix product instead of three, and main memory holds the original weights. In bf16, "
        "rounding makes the log-probabilities of sampling and learning differ a little (algo.proximal=recomputed "
        "corrects for it).",
    )


class OpenVLAOFTConfig(PolicyConfigBase):
    """OpenVLA and OpenVLA-OFT."""

    merged: ClassVar[dict[str, Any]] = {"lora": None}

    name: Literal["openvla_oft"] = "openvla_oft"
    checkpoint: str | None = Field(
        None,
        json_schema_extra=INPUT_PATH,
        description="Folder of a policy checkpoint to start from, in this project's format or as OpenVLA's are "
        "published, or OWNER/NAME of one on the model hub (docs/policies.md); null: random weights.",
    )
    unnorm_key: str | None = Field(
        None,
        description="Data set whose statistics scale the actions, of a checkpoint as published; null: that of the "
        "simulator's suite, or the only one.",
    )
    decoding: DecodingName | None = Field(
        None,
        description="How an action chunk is predicted: all numbers at once (parallel, OpenVLA-OFT), or one after the "
        "other (autoregressive, OpenVLA, RL4VLA); null: as the checkpoint says, and parallel for random weights.",
    )
    stop_token: bool | None = Field(
        None,
        description="Whether </s> follows the chunk's placeholders in parallel decoding; null: as the checkpoint says, "
        "else true (RLinf's need false).",
    )
    center_crop: bool | None = Field(
        None,
        description="Crop images to 90% of their area; null: as the checkpoint says, and true for one as published "
        "(RL4VLA's need false).",
    )
    jpeg: bool | None = Field(
        None,
        description="First compress images to JPEG and back, on the CPU, as OpenVLA's data were; null: as the "
        "checkpoint says, and true for one as published (RL4VLA's need false).",
    )
    resize: Resize | None = Field(
        None,
        description="Filter that resizes images; null: as the checkpoint says, and lanczos for one as published "
        "(RL4VLA's need bilinear).",
    )
    crop_rounding: Rounding | None = Field(
        None,
        description="How cropped images become integers: the nearest ones, or truncated as by TensorFlow; null: as the "
        "checkpoint says, and truncate for one as published.",
    )
    head: HeadName | None = Field(
        None,
        description="What predicts actions: bins of the vocabulary (tokens), or a regressed mean with Laplace noise "
        "(l1, OpenVLA-OFT's own fine-tunes); null: what the checkpoint's folder has, and tokens for random weights.",
    )
    noise_scale: PositiveFloat = Field(
        0.05,
        description="With head=l1: scale of the noise on actions of about -1 to 1, from which learning it starts.",
    )
    size: Literal["nano", "tiny", "7b"] = Field("tiny", description="Architecture of a policy with random weights.")
    lora: LoraConfig | None = Field(
        None,
        description="Train low-rank adapters (those of the checkpoint, if it is a folder of adapters) and freeze the "
        "other weights; null: train all weights.",
    )
    fp32_head: bool = Field(
        False,
        description="Compute the action logits, or means, in float32 if weights are bf16 (arXiv:2510.13786): sampler "
        "and learner then agree more closely.",
    )

    @model_validator(mode="after")
    def _head_fits_decoding(self) -> Self:
        if self.head == "l1" and self.decoding == "autoregressive":
            raise ValueError("head=l1 reads a whole chunk at once; set decoding=parallel")
        return self

    @property
    def variant(self) -> dict[str, Any]:
        """Values of the architecture that the run chooses instead of the checkpoint."""
        chosen = {name: getattr(self, name) for name in VARIANT}
        return {name: value for name, value in chosen.items() if value is not None}

    def spec(self, env: EnvSpec) -> PolicySpec:
        shape = self.chunk_size, env.action_dim
        record = {"tokens": ArrayLayout("|u1", shape)} if self.discrete else {"actions": ArrayLayout("<f4", shape)}
        return PolicySpec(*shape, record=record, draws={"uniforms": RandomNumbers(shape)})

    @property
    def head_in_use(self) -> HeadName:
        """``head``, or what the files of the checkpoint say. It decides what is recorded."""
        if self.head is not None or self.checkpoint is None:
            return self.head or "tokens"
        return head_of(self.checkpoint)

    @property
    def regresses(self) -> bool:
        return self.head_in_use == "l1"

    @property
    def discrete(self) -> bool:
        return self.head_in_use == "tokens"

    @property
    def size_name(self) -> str:
        return self.size

    @property
    def freezes_weights(self) -> bool:
        return self.lora is not None

    @property
    def memory_remedy(self) -> str:
        return "" if self.lora is not None else "train adapters with policy.lora"

    @property
    def own_weights_key(self) -> str | None:
        return "lora.merge_to_act" if self.lora is not None and self.lora.merge_to_act else None

    @property
    def holds_reference(self) -> bool:
        goes_on = self.checkpoint is not None and has_adapters(self.checkpoint)
        return self.freezes_weights and self.discrete and not goes_on  # a regression head is trained in full
