"""What a policy is made of: every size of the model is a value of ``Architecture``, so that one class serves all sizes.

The 7b preset has the dimensions of OpenVLA (arXiv:2406.09246) as fine-tuned by OpenVLA-OFT (arXiv:2502.19645) with
discrete actions. The tiny and nano presets are the same network with small numbers, sized for CPU cores.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vla_rl.core.schema import NonNegative, Positive, PositiveFloat

NUM_BINS = 256
REGRESSION_BLOCKS = 2  # of OpenVLA-OFT's head for L1 regression
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of DINOv2
IMAGENET_STD = (0.229, 0.224, 0.225)
_VOCAB_MULTIPLE = 64
# Fields that checkpoints with the same weights can differ in
VARIANT = ("decoding", "stop_token", "center_crop", "jpeg", "resize", "crop_rounding")
_STRICT = ConfigDict(extra="forbid", strict=True)
DecodingName = Literal["parallel", "autoregressive"]
HeadName = Literal["tokens", "l1"]
Resize = Literal["bilinear", "lanczos"]
Rounding = Literal["nearest", "truncate"]


@dataclass(frozen=True, slots=True, config=_STRICT)
class VisionTower:
    """A vision transformer. Its features are the output of the second-to-last block."""

    width: Positive
    layers: Positive  # as published; the last block is unused, so it is neither built nor computed
    heads: Positive
    intermediate: Positive

    def __post_init__(self) -> None:
        _check_divisible("width", self.width, "heads", self.heads)
        if self.layers < 2:
            raise ValueError(f"layers={self.layers}: features come from the second-to-last block, so at least 2")


@dataclass(frozen=True, slots=True, config=_STRICT)
class LanguageModel:
    """A Llama decoder."""

    width: Positive
    layers: Positive
    heads: Positive
    intermediate: Positive
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    initializer_range: PositiveFloat  # standard deviation of random weights

    def __post_init__(self) -> None:
        _check_divisible("width", self.width, "heads", self.heads)


@dataclass(frozen=True, slots=True, config=_STRICT)
class Architecture:
    """All values that determine the shapes of the weights and the meaning of inputs and outputs."""

    name: str
    image_size: Positive  # pixels the towers see; other sizes are resized to it
    patch_size: Positive
    center_crop: bool  # crop to 90% of the area and resize back, as official evaluation does
    views: Positive  # V, camera images per observation
    proprio_dim: NonNegative  # P; 0: no proprioception token
    chunk_size: Positive  # K
    action_dim: Positive  # A
    dino: VisionTower
    dino_registers: Positive
    siglip: VisionTower
    projector_hidden: Positive
    llm: LanguageModel
    value_hidden: tuple[Positive, Positive]
    vocab_size: Positive  # unpadded; the last 256 ids are the action bins
    bos_id: NonNegative
    eos_id: NonNegative
    final_id: NonNegative  # the token that ends every prompt and predicts the first action number
    dino_mean: tuple[float, float, float] = IMAGENET_MEAN  # of red, green and blue in 0..1, for DINOv2's input
    dino_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = IMAGENET_STD
    decoding: DecodingName = "parallel"
    stop_token: bool = True  # of parallel decoding: </s> follows the placeholders of the chunk
    jpeg: bool = False  # compress images to JPEG and back first
    resize: Resize = "bilinear"
    crop_rounding: Rounding = "nearest"
    head: HeadName = "tokens"  # bins of the vocabulary, or a regressed mean
    film: bool = False  # whether the prompt modulates the towers' blocks (OpenVLA-OFT)

    def __post_init__(self) -> None:
        _check_divisible("image_size", self.image_size, "patch_size", self.patch_size)
        _check_divisible("dino.intermediate", self.dino.intermediate, "dino.width", self.dino.width)
        if self.head != "tokens" and self.decoding != "parallel":
            raise ValueError(f"head={self.head!r} reads a whole chunk: decoding={self.decoding!r} is not possible")
        if self.film and self.decoding != "parallel":
            raise ValueError(f"film=true is OpenVLA-OFT's: decoding={self.decoding!r} is not possible")
        if self.vocab_size <= NUM_BINS:
            raise ValueError(f"vocab_size={self.vocab_size}: needs more than the {NUM_BINS} action ids")
        for name in ("bos_id", "eos_id", "final_id"):
            if getattr(self, name) >= self.text_vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} is an action id: text ends at {self.text_vocab_size}")

    @property
    def patches(self) -> int:
        """Vision tokens of one camera view."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def vision_tokens(self) -> int:
        """Tokens between <s> and the prompt: the patches of all views, then proprioception."""
        return self.views * self.patches + (1 if self.proprio_dim else 0)

    @property
    def action_tokens(self) -> int:
        return self.chunk_size * self.action_dim

    @property
    def tail_tokens(self) -> int:
        """Tokens behind the prompt in a forward pass that rates a whole chunk."""
        if self.decoding == "autoregressive":
            return self.action_tokens - 1  # nothing depends on the last one
        return self.action_tokens + self.stop_token

    @property
    def text_vocab_size(self) -> int:
        """Ids below this one are text."""
        return self.vocab_size - NUM_BINS

    @property
    def pad_id(self) -> int:
        return self.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary and <PAD>, rounded up to a multiple of 64."""
        return -(-(self.vocab_size + 1) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable mapping; ``from_dict`` restores it."""
        return dataclasses.asdict(self)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """A copy with other values. Raises as ``from_dict``."""
        return self.from_dict(self.to_dict() | dict(values))

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Raises ValueError, which names every missing, unknown or wrongly typed key, or the impossible value."""
        try:  # through JSON, whose strict mode takes mappings for records and lists for tuples
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except ValidationError as failure:
            raise ValueError("; ".join(map(_describe, failure.errors(include_url=False)))) from None


def _check_divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name}={value} is not a multiple of {divisor_name}={divisor}")


def _describe(error: Any) -> str:
    """One of pydantic's errors in words."""
    where, found = ".".join(("architecture", *map(str, error["loc"]))), error["input"]
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "unexpected_keyword_argument":
            return f"{where} is unknown"
        case "value_error":
            return f"{where}: {error['ctx']['error']}"
        case "dataclass_type":
            return f"{where}: expected a mapping, found {type(found).__name__}"
        case _:
            return f"{where}={found!r}: {error['msg'].replace('Input should', 'should')}"


_llama = partial(LanguageModel, rms_norm_eps=1e-6, rope_theta=10_000.0, initializer_range=0.02)
_vla = partial(Architecture, views=1, proprio_dim=0, chunk_size=8, action_dim=7)  # presets take these as arguments

# A network for two CPU cores: 64 patches of 12 pixels at 96 pixels, about 2.4 million parameters.
_tower = VisionTower(width=96, layers=4, heads=3, intermediate=384)
tiny = partial(
    _vla,
    name="tiny",
    image_size=96,
    patch_size=12,
    center_crop=False,
    dino=_tower,
    dino_registers=1,
    siglip=_tower,
    projector_hidden=384,
    llm=_llama(width=160, layers=4, heads=5, intermediate=432),
    value_hidden=(128, 64),
    vocab_size=512,
    bos_id=1,
    eos_id=2,
    final_id=3,
)

# For the tabletop and for tests: 64 patches of 8 pixels at 64 pixels, about 0.6 million parameters.
_small_tower = VisionTower(width=48, layers=3, heads=2, intermediate=192)
nano = partial(
    tiny,
    name="nano",
    image_size=64,
    patch_size=8,
    chunk_size=4,
    dino=_small_tower,
    siglip=_small_tower,
    projector_hidden=128,
    llm=_llama(width=96, layers=3, heads=4, intermediate=256),
    value_hidden=(64, 32),
)

# OpenVLA-7B: DINOv2 ViT-L/14 with 4 registers, SigLIP SO400M/14 at 224 pixels, Llama 2 7B. ``rms_norm_eps`` is the
# library's default: the published config overrides only vocabulary size and padding.
openvla_7b = partial(
    _vla,
    name="7b",
    image_size=224,
    patch_size=14,
    center_crop=True,
    dino=VisionTower(width=1024, layers=24, heads=16, intermediate=4096),
    dino_registers=4,
    siglip=VisionTower(width=1152, layers=27, heads=16, intermediate=4304),
    projector_hidden=4 * (1024 + 1152),
    llm=_llama(width=4096, layers=32, heads=32, intermediate=11008),
    value_hidden=(512, 128),
    vocab_size=32_000,
    bos_id=1,
    eos_id=2,
    final_id=29_871,
)

PRESETS = {"nano": nano, "tiny": tiny, "7b": openvla_7b}
