"""Names and shapes of the tensors of an OpenVLA checkpoint as published, and where each of ours comes from.

    published                            here
    vision_backbone.featurizer.*         dino.*            a vision transformer of the library timm
    vision_backbone.fused_featurizer.*   siglip.*          another
    projector.*                          projector.*
    *.blocks.N.scale, *.blocks.N.shift   *.film            of OpenVLA-OFT with FiLM
    language_model.model.*               language_model.*  a Llama
    language_model.lm_head.weight        lm_head.weight
    value_head.*                         value_head.*      of RL4VLA and RLinf; others have none

Sources: openvla, prismatic/extern/hf/modeling_prismatic.py; timm, models/vision_transformer.py; for the value head
RL4VLA (arXiv:2505.19789) and RLinf. Importing this file does not load torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from vla_rl.policies.openvla_oft.architecture import REGRESSION_BLOCKS, Architecture

DINO, SIGLIP = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
LLAMA, LM_HEAD = "language_model.model.", "language_model.lm_head.weight"
PROJECTOR, VALUE_HEAD = "projector.", "value_head."
LOG_NOISE = "log_noise"  # of the regression head; only ours has it
EMBEDDING = f"{LLAMA}embed_tokens.weight"

FILM = {"gamma": "scale", "beta": "shift"}  # of a block that the prompt modulates
_NORMALIZED = ("weight", "bias")
_VALUE_LAYERS = {"head_l1": "0", "head_l2": "2", "head_l3": "4"}  # RL4VLA; RLinf numbers them as here
_NOT_LEARNED = re.compile(r"rotary_emb\.inv_freq$")  # older versions of transformers saved this buffer
Shape = tuple[int, ...]


class Pick(Enum):
    """Which part of a published tensor is ours."""

    ALL = "all"
    QUERY = 0  # the first third of the rows of a fused layer
    KEY = 1
    VALUE = 2
    POSITIONS = "without the leading dimension"
    POSITIONS_AFTER_CLASS = "behind a zero for the class token"  # timm's DINOv2 adds none to class token and registers


FUSED = (Pick.QUERY, Pick.KEY, Pick.VALUE)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one of our tensors comes from."""

    name: str
    pick: Pick = Pick.ALL


def canonical(name: str) -> str:
    """The name in openvla-7b of a tensor that another version of the libraries names differently."""
    name = re.sub(r"\.(ls[12])\.gamma$", r".\1.scale_factor", name)
    if name.startswith(VALUE_HEAD):
        layer, _, rest = name.removeprefix(VALUE_HEAD).removeprefix("mlp.").partition(".")
        return f"{VALUE_HEAD}{_VALUE_LAYERS.get(layer, layer)}" + (f".{rest}" if rest else "")
    return name


def is_ignored(name: str) -> bool:
    """Whether a file may hold this tensor although the model does not learn it."""
    return _NOT_LEARNED.search(name) is not None


def sources(arch: Architecture) -> dict[str, Source]:
    """For each weight of ours, its place among the published weights; other heads and proprioception are apart."""
    return {
        **_dino_sources(arch.dino.layers, arch.film),
        **_siglip_sources(arch.siglip.layers, arch.film),
        **{name: Source(name) for name in projector_shapes(arch)},
        **{
            f"language_model.{name.removeprefix(LLAMA)}": Source(name)
            for name in _llama_shapes(arch)
            if name.startswith(LLAMA)
        },
        **({"lm_head.weight": Source(LM_HEAD)} if arch.head == "tokens" else {}),
    }


def published_shapes(arch: Architecture) -> dict[str, Shape]:
    """Every tensor of a published checkpoint, also those that a forward pass never uses (see ``unused_names``)."""
    dino, siglip, patch = arch.dino, arch.siglip, (3, arch.patch_size, arch.patch_size)
    shapes: dict[str, Shape] = {
        f"{DINO}cls_token": (1, 1, dino.width),
        f"{DINO}reg_token": (1, arch.dino_registers, dino.width),
    }
    for prefix, tower in ((DINO, dino), (SIGLIP, siglip)):
        width, hidden = tower.width, tower.intermediate
        shapes[f"{prefix}pos_embed"] = (1, arch.patches, width)
        shapes |= _affine(f"{prefix}patch_embed.proj", (width, *patch))
        for number in range(tower.layers):
            block = f"{prefix}blocks.{number}."
            shapes |= _affine(f"{block}norm1", (width,)) | _affine(f"{block}attn.qkv", (3 * width, width))
            shapes |= _affine(f"{block}attn.proj", (width, width)) | _affine(f"{block}norm2", (width,))
            shapes |= _affine(f"{block}mlp.fc1", (hidden, width)) | _affine(f"{block}mlp.fc2", (width, hidden))
            if arch.film:
                for name in FILM.values():
                    shapes |= _affine(f"{block}{name}", (width, arch.llm.width))
            if prefix == DINO:
                shapes |= {f"{block}ls{i}.scale_factor": (width,) for i in (1, 2)}
        shapes |= _affine(f"{prefix}norm", (width,))
    return shapes | _pooling_shapes(siglip.width, siglip.intermediate) | projector_shapes(arch) | _llama_shapes(arch)


def unused_names(arch: Architecture) -> frozenset[str]:
    """Published tensors of which we have none: features are taken before the towers' last block and norm."""
    return frozenset(published_shapes(arch)) - {source.name for source in sources(arch).values()}


def projector_shapes(arch: Architecture) -> dict[str, Shape]:
    """fc1, fc2 and fc3 from the concatenated features of both towers to the width of the language model."""
    widths = (arch.dino.width + arch.siglip.width, arch.projector_hidden, arch.llm.width, arch.llm.width)
    shapes: dict[str, Shape] = {}
    for number in (1, 2, 3):
        shapes |= _affine(f"{PROJECTOR}fc{number}", (widths[number], widths[number - 1]))
    return shapes


def proprio_shapes(arch: Architecture) -> dict[str, Shape]:
    """OpenVLA-OFT's projector of proprioception; empty without one."""
    width = arch.llm.width
    return _affine("fc1", (width, arch.proprio_dim)) | _affine("fc2", (width, width)) if arch.proprio_dim else {}


def action_head_shapes(arch: Architecture) -> dict[str, Shape]:
    """OpenVLA-OFT's head for L1 regression, by our names; empty without one."""
    if arch.head != "l1":
        return {}
    width, states = arch.llm.width, arch.llm.width * arch.action_dim
    shapes = _affine("layer_norm1", (states,)) | _affine("fc1", (width, states))
    for number in range(REGRESSION_BLOCKS):
        block = f"mlp_resnet_blocks.{number}.ffn."
        shapes |= _affine(f"{block}0", (width,)) | _affine(f"{block}1", (width, width))
    return shapes | _affine("layer_norm2", (width,)) | _affine("fc2", (arch.action_dim, width))


def value_head_shapes(arch: Architecture, inputs: int) -> dict[str, Shape]:
    """By our names. Only ours has ``time``; other projects' heads may have several outputs."""
    first, second = arch.value_hidden
    return {
        **_affine(f"{VALUE_HEAD}0", (first, inputs)),
        **_affine(f"{VALUE_HEAD}2", (second, first)),
        f"{VALUE_HEAD}4.weight": (1, second),
        f"{VALUE_HEAD}time": (first,),
    }


def _dino_sources(layers: int, film: bool) -> dict[str, Source]:
    ours = {
        "dino.embeddings.cls_token": Source(f"{DINO}cls_token"),
        "dino.embeddings.register_tokens": Source(f"{DINO}reg_token"),
        "dino.embeddings.position_embeddings": Source(f"{DINO}pos_embed", Pick.POSITIONS_AFTER_CLASS),
    }
    _copy(ours, "dino.embeddings.patch_embeddings.projection", f"{DINO}patch_embed.proj")
    names = {"norm1": "norm1", "norm2": "norm2", "attention.o_proj": "attn.proj", "mlp.fc1": "mlp.fc1"}
    for number in range(layers - 1):
        layer, block = f"dino.encoder.layer.{number}.", f"{DINO}blocks.{number}."
        for here, there in {**names, "mlp.fc2": "mlp.fc2"}.items():
            _copy(ours, layer + here, block + there)
        _split(ours, f"{layer}attention.", f"{block}attn.qkv")
        _modulate(ours, layer, block, film)
        for i in (1, 2):
            ours[f"{layer}layer_scale{i}.lambda1"] = Source(f"{block}ls{i}.scale_factor")
    return ours


def _siglip_sources(layers: int, film: bool) -> dict[str, Source]:
    ours = {"siglip.embeddings.position_embedding.weight": Source(f"{SIGLIP}pos_embed", Pick.POSITIONS)}
    _copy(ours, "siglip.embeddings.patch_embedding", f"{SIGLIP}patch_embed.proj")
    names = {"layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.out_proj": "attn.proj", "mlp.fc1": "mlp.fc1"}
    for number in range(layers - 1):
        layer, block = f"siglip.encoder.layers.{number}.", f"{SIGLIP}blocks.{number}."
        for here, there in {**names, "mlp.fc2": "mlp.fc2"}.items():
            _copy(ours, layer + here, block + there)
        _split(ours, f"{layer}self_attn.", f"{block}attn.qkv")
        _modulate(ours, layer, block, film)
    return ours


def _copy(ours: dict[str, Source], here: str, there: str) -> None:
    for kind in _NORMALIZED:
        ours[f"{here}.{kind}"] = Source(f"{there}.{kind}")


def _split(ours: dict[str, Source], here: str, there: str) -> None:
    for letter, pick in zip("qkv", FUSED, strict=True):
        for kind in _NORMALIZED:
            ours[f"{here}{letter}_proj.{kind}"] = Source(f"{there}.{kind}", pick)


def _modulate(ours: dict[str, Source], layer: str, block: str, film: bool) -> None:
    for here, there in FILM.items() if film else ():
        _copy(ours, f"{layer}film.{here}", f"{block}{there}")


def _affine(name: str, shape: Shape) -> dict[str, Shape]:
    """Weight and bias of a linear layer, a convolution or a norm."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _pooling_shapes(width: int, hidden: int) -> dict[str, Shape]:
    """SigLIP's attention pooling."""
    pool = f"{SIGLIP}attn_pool."
    return {
        f"{pool}latent": (1, 1, width),
        **_affine(f"{pool}q", (width, width)),
        **_affine(f"{pool}kv", (2 * width, width)),
        **_affine(f"{pool}proj", (width, width)),
        **_affine(f"{pool}norm", (width,)),
        **_affine(f"{pool}mlp.fc1", (hidden, width)),
        **_affine(f"{pool}mlp.fc2", (width, hidden)),
    }


def _llama_shapes(arch: Architecture) -> dict[str, Shape]:
    llm, rows = arch.llm, arch.padded_vocab_size
    shapes: dict[str, Shape] = {EMBEDDING: (rows, llm.width)}
    for number in range(llm.layers):
        layer = f"{LLAMA}layers.{number}."
        shapes |= {f"{layer}self_attn.{letter}_proj.weight": (llm.width, llm.width) for letter in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (llm.intermediate, llm.width) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (llm.width, llm.intermediate)
        shapes |= {f"{layer}{name}_layernorm.weight": (llm.width,) for name in ("input", "post_attention")}
    return shapes | {f"{LLAMA}norm.weight": (llm.width,), LM_HEAD: (rows, llm.width)}


def counted(names: list[str], limit: int = 5) -> Iterator[str]:
    """The first names, and how many more there are, for an error."""
    yield from names[:limit]
    if len(names) > limit:
        yield f"and {len(names) - limit} more"
