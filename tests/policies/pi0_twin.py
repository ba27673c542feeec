"""A small twin of a π0 that lerobot has saved: its names, shapes and files. Weights are drawn by name, and not kept.

``scripts/make_pi0_reference.py`` plays the twin with lerobot itself and writes ``FIXTURE``, which tests compare with.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parent / "pi0" / "published"
WIDTH, EXPERT, LAYERS, HEADS, HEAD_DIM, HIDDEN, EXPERT_HIDDEN = 32, 24, 2, 8, 8, 48, 40
VISION, VISION_LAYERS, VISION_HEADS, VISION_HIDDEN, PATCH, PIXELS = 32, 2, 16, 4304, 14, 56
WORDS, CHUNK, PADDED, STATE, ACTIONS, STEPS = 64, 5, 32, 8, 7, 4
ROWS, SEEN_PIXELS = 3, 64
INSTRUCTIONS = ("pick up the bowl", "open the drawer")
Shape = tuple[int, ...]


def shapes() -> dict[str, Shape]:
    """The tensors of ``model.safetensors``, the tied embedding once."""
    gemma, expert = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
    tower, language = f"{gemma}model.vision_tower.vision_model.", f"{gemma}model.language_model."
    found: dict[str, Shape] = {
        f"{gemma}lm_head.weight": (WORDS, WIDTH),
        f"{tower}embeddings.patch_embedding.weight": (VISION, 3, PATCH, PATCH),
        f"{tower}embeddings.patch_embedding.bias": (VISION,),
        f"{tower}embeddings.position_embedding.weight": ((PIXELS // PATCH) ** 2, VISION),
    }
    for number in range(VISION_LAYERS):
        layer = f"{tower}encoder.layers.{number}."
        for name in ("layer_norm1", "layer_norm2"):
            found |= {f"{layer}{name}.weight": (VISION,), f"{layer}{name}.bias": (VISION,)}
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _affine(f"{layer}self_attn.{name}", VISION, VISION)
        found |= _affine(f"{layer}mlp.fc1", VISION_HIDDEN, VISION) | _affine(f"{layer}mlp.fc2", VISION, VISION_HIDDEN)
    found |= {f"{tower}post_layernorm.weight": (VISION,), f"{tower}post_layernorm.bias": (VISION,)}
    found |= _affine(f"{gemma}model.multi_modal_projector.linear", WIDTH, VISION)
    found |= _layers(language, WIDTH, HIDDEN) | _layers(f"{expert}model.", EXPERT, EXPERT_HIDDEN)
    found[f"{expert}lm_head.weight"] = (WORDS, EXPERT)
    found |= _affine("action_in_proj", EXPERT, PADDED) | _affine("action_out_proj", PADDED, EXPERT)
    found |= _affine("state_proj", EXPERT, PADDED)
    found |= _affine("action_time_mlp_in", EXPERT, 2 * EXPERT) | _affine("action_time_mlp_out", EXPERT, EXPERT)
    return {f"model.{name}": shape for name, shape in found.items()}


def _affine(name: str, outputs: int, inputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _layers(prefix: str, width: int, hidden: int) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"{prefix}norm.weight": (width,)}
    for number in range(LAYERS):
        layer = f"{prefix}layers.{number}."
        rows = {"q": HEADS * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
        found |= {f"{layer}self_attn.{letter}_proj.weight": (n, width) for letter, n in rows.items()}
        found[f"{layer}self_attn.o_proj.weight"] = (width, HEADS * HEAD_DIM)
        found |= {f"{layer}mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = (width, hidden)
        found |= {f"{layer}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return found


def weights() -> dict[str, np.ndarray]:
    """float32, drawn by name: deviations by fan-in, so that every part matters to the result."""
    found = {}
    for name, shape in shapes().items():
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
        scale = float(np.prod(shape[1:])) ** -0.5 if len(shape) > 1 else 0.2
        gain = 1.0 if name.endswith(("layer_norm1.weight", "layer_norm2.weight", "post_layernorm.weight")) else 0.0
        found[name] = gain + np.float32(scale) * drawn
    return found


def inputs() -> dict[str, np.ndarray]:
    """Images of two cameras, uint8 [N, 2, H, W, 3]; state, float32 [N, 8]; noise; the number of each row's task."""
    rng = np.random.default_rng(5)
    return {
        "images": rng.integers(0, 256, (ROWS, 2, SEEN_PIXELS, SEEN_PIXELS, 3), dtype=np.uint8),
        "state": rng.normal(0.1, 0.5, (ROWS, STATE)).astype(np.float32),
        "noise": rng.standard_normal((ROWS, CHUNK, PADDED), dtype=np.float32),
        "task": np.arange(ROWS) % len(INSTRUCTIONS),
    }


def statistics() -> dict[str, dict[str, np.ndarray]]:
    """Mean and deviation of the data set."""
    rng = np.random.default_rng(6)
    return {
        name: {"mean": rng.normal(0, 0.3, dims).astype(np.float32), "std": rng.uniform(0.2, 0.9, dims).astype("f4")}
        for name, dims in (("observation.state", STATE), ("action", ACTIONS))
    }


def tokenizer() -> Any:
    """Words, and the line's end as a word of its own; <bos> has PaliGemma's number and is put in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({word for text in INSTRUCTIONS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "\n", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return made
