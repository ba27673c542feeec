"""What a policy is made of, as one frozen record: every size of the model is a value of ``Architecture``, not a class.

The 7-billion preset has the dimensions of OpenVLA (arXiv:2406.09246) as fine-tuned by OpenVLA-OFT (arXiv:2502.19645)
with discrete actions. The tiny and nano presets are the same network with small numbers, sized for CPU cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

NUM_BINS = 256
_VOCAB_MULTIPLE = 64

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A vision transformer. Its features are the output of the second-to-last block."""

    width: int
    layers: int  # as published; the last block is unused, so it is neither built nor computed
    heads: int
    intermediate: int

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divisible("width", self.width, "heads", self.heads)
        if self.layers < 2:
            raise ValueError(f"layers={self.layers}: features come from the second-to-last block, so at least 2")


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A Llama decoder, run with bidirectional attention."""

    width: int
    layers: int
    heads: int
    intermediate: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float  # standard deviation of random weights

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divisible("width", self.width, "heads", self.heads)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that settles the shapes of the weights and the meaning of the inputs and outputs."""

    name: str
    image_size: int  # pixels the towers see; other sizes are resized to it
    patch_size: int
    center_crop: bool  # crop to 90% of the area and resize back, as official evaluation does
    views: int  # V, camera images per observation
    proprio_dim: int  # P; 0: no proprioception token
    chunk_size: int  # K
    action_dim: int  # A
    dino: VisionTower
    dino_registers: int
    siglip: VisionTower
    projector_hidden: int
    llm: LanguageModel
    value_hidden: tuple[int, int]
    vocab_size: int  # unpadded; the last 256 ids are the action bins
    bos_id: int
    eos_id: int
    final_id: int  # the token that ends every prompt and predicts the first action number

    def __post_init__(self) -> None:
        _check_positive(self, allow_zero=("proprio_dim", "bos_id", "eos_id", "final_id"))
        _check_divisible("image_size", self.image_size, "patch_size", self.patch_size)
        _check_divisible("dino.intermediate", self.dino.intermediate, "dino.width", self.dino.width)
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
        """A JSON-able mapping; ``from_dict`` restores it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> Architecture:
        """Raises ValueError naming every missing, unknown or wrongly typed key, or the impossible value."""
        return _parse(cls, values, "architecture")


def nano(
    *, views: int = 1, proprio_dim: int = 0, chunk_size: int = 4, action_dim: int = 7, image_size: int = 64
) -> Architecture:
    """For the tabletop and for tests: 64 patches of 8 pixels at 64 pixels, about 0.6 million parameters."""
    tower = VisionTower(width=48, layers=3, heads=2, intermediate=192)
    return dataclasses.replace(
        tiny(views=views, proprio_dim=proprio_dim, chunk_size=chunk_size, action_dim=action_dim),
        name="nano",
        image_size=image_size,
        patch_size=8,
        dino=tower,
        siglip=tower,
        projector_hidden=128,
        llm=LanguageModel(
            width=96,
            layers=3,
            heads=4,
            intermediate=256,
            rms_norm_eps=1e-6,
            rope_theta=10_000.0,
            initializer_range=0.02,
        ),
        value_hidden=(64, 32),
    )


def tiny(
    *, views: int = 1, proprio_dim: int = 0, chunk_size: int = 8, action_dim: int = 7, image_size: int = 96
) -> Architecture:
    """A network for two CPU cores: 64 patches of 12 pixels at 96 pixels, about 2.4 million parameters."""
    return Architecture(
        name="tiny",
        image_size=image_size,
        patch_size=12,
        center_crop=False,
        views=views,
        proprio_dim=proprio_dim,
        chunk_size=chunk_size,
        action_dim=action_dim,
        dino=VisionTower(width=96, layers=4, heads=3, intermediate=384),
        dino_registers=1,
        siglip=VisionTower(width=96, layers=4, heads=3, intermediate=384),
        projector_hidden=384,
        llm=LanguageModel(
            width=160,
            layers=4,
            heads=5,
            intermediate=432,
            rms_norm_eps=1e-6,
            rope_theta=10_000.0,
            initializer_range=0.02,
        ),
        value_hidden=(128, 64),
        vocab_size=512,
        bos_id=1,
        eos_id=2,
        final_id=3,
    )


def openvla_7b(*, views: int = 1, proprio_dim: int = 0, chunk_size: int = 8, action_dim: int = 7) -> Architecture:
    """OpenVLA-7B: DINOv2 ViT-L/14 with 4 registers, SigLIP SO400M/14 at 224 pixels, Llama 2 7B.

    ``rms_norm_eps`` is the library's default: the published config overrides only vocabulary size and padding.
    """
    return Architecture(
        name="7b",
        image_size=224,
        patch_size=14,
        center_crop=True,
        views=views,
        proprio_dim=proprio_dim,
        chunk_size=chunk_size,
        action_dim=action_dim,
        dino=VisionTower(width=1024, layers=24, heads=16, intermediate=4096),
        dino_registers=4,
        siglip=VisionTower(width=1152, layers=27, heads=16, intermediate=4304),
        projector_hidden=4 * (1024 + 1152),
        llm=LanguageModel(
            width=4096,
            layers=32,
            heads=32,
            intermediate=11008,
            rms_norm_eps=1e-6,
            rope_theta=10_000.0,
            initializer_range=0.02,
        ),
        value_hidden=(512, 128),
        vocab_size=32_000,
        bos_id=1,
        eos_id=2,
        final_id=29_871,
    )


PRESETS = {"nano": nano, "tiny": tiny, "7b": openvla_7b}


def _check_positive(record: object, allow_zero: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if number < 0 or (number == 0 and field.name not in allow_zero):
                raise ValueError(f"{type(record).__name__}.{field.name}={value}: must be positive")


def _check_divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name}={value} is not a multiple of {divisor_name}={divisor}")


def _parse(cls: type[_Record], values: object, where: str) -> _Record:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a mapping, found {type(values).__name__}")
    hints = get_type_hints(cls)
    problems = [f"{where}.{key} is missing" for key in hints if key not in values]
    problems += [f"{where}.{key} is unknown" for key in values if key not in hints]
    parsed: dict[str, Any] = {}
    for key in hints.keys() & values.keys():
        try:
            parsed[key] = _parse_field(hints[key], values[key], f"{where}.{key}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(sorted(problems)))
    try:
        return cls(**parsed)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _parse_field(kind: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _parse(kind, value, where)  # type: ignore[arg-type]
    if kind == tuple[int, int]:
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int for n in value):
            raise ValueError(f"{where}={value!r}: expected two integers")
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}={value!r}: expected {kind.__name__}")
    return value
