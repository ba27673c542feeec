"""Numbers of weights and bytes of activations of a policy, from its Architecture alone: nothing is built.

What is held between forward and backward pass follows from what autograd saves in each block. With activation
checkpointing a block saves only its input, and is computed a second time in the backward pass; one block at a time then
holds everything (arXiv:1604.06174). The names below: b bytes of an element of the weights' dtype, S tokens, d width,
f intermediate width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, REGRESSION_BLOCKS, Architecture, VisionTower
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.hf_names import action_head_shapes

# An assumption, where the instructions are not known: OpenVLA's prompt, with a sentence of 20 tokens
_PROMPT_TOKENS = 32
# Tensors of a block's intermediate width that exist at one time, counted by tests/policies/test_sizes.py
_WIDE_BACKWARD, _WIDE_FORWARD = 3, 6


def openvla_sizes(
    architecture: Architecture,
    lora: LoraConfig | None = None,
    *,
    element_size: int = 2,
    activation_checkpointing: bool = False,
    prompt_tokens: int = _PROMPT_TOKENS,
) -> PolicySizes:
    """``element_size``: bytes of one weight. ``prompt_tokens``: of the longest prompt, with ``<s>``."""
    base = sum(_weights(architecture))
    adapters = 0 if lora is None else sum(_adapters(architecture, lora))
    trained = base if lora is None else adapters + _value_head(architecture) + _regression_head(architecture)
    blocks = [*_blocks(architecture, lora, element_size, prompt_tokens)]
    head = _head(architecture, lora, element_size)
    saved = head + _projected(architecture, lora, element_size)
    saved += sum(block.count * (block.input if activation_checkpointing else block.saved) for block in blocks)
    recomputed = max(block.saved for block in blocks) if activation_checkpointing else 0
    wide = max(block.wide for block in blocks)
    train = saved + recomputed + _WIDE_BACKWARD * wide
    infer = max(head, _WIDE_FORWARD * wide) + _cache(architecture, element_size, prompt_tokens)
    features = architecture.llm.width + architecture.proprio_dim
    return PolicySizes(base + adapters, trained, train, saved, infer, features)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Equal blocks of a part; bytes of one observation in one block."""

    count: int
    input: int
    saved: int  # by autograd, the input included
    wide: int  # its widest tensor


def _blocks(arch: Architecture, lora: LoraConfig | None, b: int, prompt_tokens: int) -> Iterator[_Blocks]:
    full, parts = lora is None, _trained_parts(lora)
    rank = 0 if lora is None else lora.rank
    towers = ((arch.dino, arch.patches + 1 + arch.dino_registers, 2), (arch.siglip, arch.patches, 0))
    for tower, tokens, scales in towers:
        tokens *= arch.views
        d, f = tower.width, tower.intermediate
        norms = 4 * b * d + 16  # inputs and outputs of both, and their means and deviations
        attention = 4 * b * d + 4 * tower.heads  # q, k, v and the result, and the sums of its softmax
        adapters = 6 * b * rank * ("vision" in parts)
        modulated = b * d * arch.film
        saved = tokens * (norms + attention + modulated + 2 * b * f + full * scales * b * d + adapters)  # around GELU
        count = tower.layers - 1 if "vision" in parts else 0  # otherwise no gradient goes that far back
        yield _Blocks(count, tokens * b * d, saved, tokens * b * f)
    llm, tokens, read = arch.llm, _sequence(arch, prompt_tokens), arch.action_tokens
    distinct = tokens - (read - 1) * (arch.decoding == "parallel")  # in the first layer
    d, f = llm.width, llm.intermediate
    norm = 4 * d + b * d + 4 + full * b * d  # in float32 inside, and the result
    adapter = b * rank * ("language_model" in parts)
    keys, projected = 2 * b * d, norm + 2 * adapter  # and values
    computed = norm + 2 * b * d + 4 * llm.heads + b * tokens + 4 * b * f + 5 * adapter  # likewise, and the mask
    for count, rows in ((llm.layers > 1, distinct), (max(0, llm.layers - 2), tokens)):
        yield _Blocks(count, tokens * b * d, tokens * keys + rows * (projected + computed), rows * b * f)
    yield _Blocks(1, tokens * b * d, tokens * (keys + projected) + read * (computed + b * d), read * b * f)


def _projected(arch: Architecture, lora: LoraConfig | None, b: int) -> int:
    """Bytes of one observation that the projector saves, and the towers' convolutions if they are trained."""
    if not _trained_parts(lora) & {"vision", "projector"}:
        return 0
    features = arch.dino.width + arch.siglip.width
    pixels = 2 * 3 * arch.image_size**2 if lora is None else 0
    return arch.views * b * (pixels + arch.patches * (features + 2 * arch.projector_hidden + 2 * arch.llm.width))


def _head(arch: Architecture, lora: LoraConfig | None, b: int) -> int:
    """Bytes of one observation that the last norm, the action head and a loss save."""
    d = arch.llm.width
    norm = arch.action_tokens * (4 + (lora is None) * b) * d
    if arch.head == "l1":
        hidden = (3 * b * REGRESSION_BLOCKS + 4 * b) * d  # of each action: norms, layers and what they are added to
        return norm + arch.action_tokens * 3 * b * d + arch.chunk_size * hidden
    return norm + arch.action_tokens * (b * d + 3 * 4 * NUM_BINS)  # logits, and distributions of the loss


def _cache(arch: Architecture, b: int, prompt_tokens: int) -> int:
    """Bytes of keys and values that one observation holds while its chunk is decoded one number after the other.

    Those of the last block come when its wide tensors are few.
    """
    if arch.decoding != "autoregressive":
        return 0
    return 2 * (arch.llm.layers - 1) * _sequence(arch, prompt_tokens) * b * arch.llm.width


def _trained_parts(lora: LoraConfig | None) -> set[str]:
    return {"vision", "projector", "language_model", "lm_head"} if lora is None else set(lora.targets)


def _sequence(arch: Architecture, prompt_tokens: int) -> int:
    """Tokens that the language model sees: images and proprioception, prompt, and the chunk."""
    return arch.vision_tokens + prompt_tokens + arch.tail_tokens


def _weights(arch: Architecture) -> Iterator[int]:
    """Numbers of weights, part by part, without adapters."""
    for _, inputs, outputs, bias, count in _linears(arch):
        yield (inputs * outputs + bias * outputs) * count
    pixels, d = 3 * arch.patch_size**2, arch.llm.width
    dino_tokens = arch.patches + 2 + arch.dino_registers  # the class token has a position, registers have none
    for tower, positions, scales in ((arch.dino, dino_tokens, 2), (arch.siglip, arch.patches, 0)):
        yield (pixels + 1 + positions) * tower.width  # the convolution, positions and the first tokens
        yield (tower.layers - 1) * (4 + scales) * tower.width  # norms and scales
    yield arch.padded_vocab_size * d  # embedding
    yield (2 * arch.llm.layers + 1) * d  # norms
    yield _value_head(arch) + _regression_head(arch)


def _value_head(arch: Architecture) -> int:
    inputs, (first, second) = arch.llm.width + arch.proprio_dim, arch.value_hidden
    return (inputs + 2) * first + (first + 2) * second  # time and biases included; the last layer has none


def _regression_head(arch: Architecture) -> int:
    """Trained in full, also beside adapters; 0 where actions are tokens."""
    shapes = action_head_shapes(arch)
    return sum(math.prod(shape) for shape in shapes.values()) + (arch.action_dim if shapes else 0)  # and the noise


def _adapters(arch: Architecture, lora: LoraConfig) -> Iterator[int]:
    for part, inputs, outputs, _, count in _linears(arch):
        if part in lora.targets:
            yield lora.rank * (inputs + outputs) * count


def _linears(arch: Architecture) -> Iterator[tuple[str, int, int, bool, int]]:
    """(target of ``policy.lora``, inputs, outputs, has a bias, how many) of all linear layers but the value head's."""
    for tower in (arch.dino, arch.siglip):
        yield from _tower_linears(tower, arch.llm.width if arch.film else 0)
    features, d, f = arch.dino.width + arch.siglip.width, arch.llm.width, arch.llm.intermediate
    for inputs, outputs in ((features, arch.projector_hidden), (arch.projector_hidden, d), (d, d)):
        yield "projector", inputs, outputs, True, 1
    if arch.proprio_dim:
        yield "projector", arch.proprio_dim, d, True, 1
        yield "projector", d, d, True, 1
    yield "language_model", d, d, False, 4 * arch.llm.layers
    yield "language_model", d, f, False, 2 * arch.llm.layers
    yield "language_model", f, d, False, arch.llm.layers
    if arch.head == "tokens":
        yield "lm_head", d, arch.padded_vocab_size, False, 1


def _tower_linears(tower: VisionTower, language: int) -> Iterator[tuple[str, int, int, bool, int]]:
    d, f, blocks = tower.width, tower.intermediate, tower.layers - 1
    yield "vision", d, d, True, 4 * blocks
    yield "vision", d, f, True, blocks
    yield "vision", f, d, True, blocks
    if language:
        yield "vision", language, d, True, 2 * blocks
