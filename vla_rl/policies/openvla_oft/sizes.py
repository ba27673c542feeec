"""How many numbers a policy holds, by its architecture alone: without torch, and without building it."""

from vla_rl.policies.openvla_oft.architecture import Architecture, LanguageModel, VisionTower
from vla_rl.policies.openvla_oft.config import LoraConfig

Linear = tuple[int, int]  # inputs, outputs


def num_weights(architecture: Architecture) -> int:
    """Weights of the whole policy, within a percent: norms and scales are left out."""
    a = architecture
    linear = sum(i * o + o for layers in _linear_layers(a).values() for i, o in layers)
    patches = (3 * a.patch_size**2 + a.patches) * (a.dino.width + a.siglip.width)
    return linear + patches + a.padded_vocab_size * a.llm.width + _num_value_weights(a)


def num_trained(architecture: Architecture, lora: LoraConfig | None) -> int:
    """Those that are trained and synced: all, or adapters and value head."""
    if lora is None:
        return num_weights(architecture)
    layers = _linear_layers(architecture)
    adapters = sum(lora.rank * (i + o) for target in lora.targets for i, o in layers[target])
    return adapters + _num_value_weights(architecture)


def _linear_layers(a: Architecture) -> dict[str, list[Linear]]:
    """By the names of ``LoraConfig.targets``."""
    width = a.llm.width
    projector = [(a.dino.width + a.siglip.width, a.projector_hidden), (a.projector_hidden, width), (width, width)]
    if a.proprio_dim:
        projector += [(a.proprio_dim, width), (width, width)]
    return {
        "vision": _blocks(a.dino, a.dino.layers - 1, 1) + _blocks(a.siglip, a.siglip.layers - 1, 1),
        "projector": projector,
        "language_model": _blocks(a.llm, a.llm.layers, 2),
        "lm_head": [(width, a.padded_vocab_size)],
    }


def _blocks(part: VisionTower | LanguageModel, layers: int, inputs: int) -> list[Linear]:
    """Attention and MLP of each block; ``inputs``: matrices with which the MLP begins, 2 where one is a gate."""
    width, hidden = part.width, part.intermediate
    return layers * [*4 * [(width, width)], *inputs * [(width, hidden)], (hidden, width)]


def _num_value_weights(a: Architecture) -> int:
    first, second = a.value_hidden
    return (a.llm.width + a.proprio_dim + 2) * first + (first + 1) * second + second
