"""Sizes of π0, as keyword arguments of the library's ``PI0Config``; the largest is the published one."""

from typing import Any

_NANO_VOCABULARY = 512


def model_settings(size: str, *, horizon: int, action_dim: int, state_dim: int, image_size: int) -> dict[str, Any]:
    """Arguments of ``transformers.PI0Config``.

    Args:
        size: "nano" or "base".
        horizon: H, actions of a chunk in the model.
        action_dim, state_dim: numbers of an action and of proprioception in the model.
        image_size: pixels of the square images; "base" resizes to its own.
    """
    dims = {"chunk_size": horizon, "max_action_dim": action_dim, "max_state_dim": max(1, state_dim)}
    return dims if size == "base" else dims | _nano(image_size)


def _nano(image_size: int) -> dict[str, Any]:
    """For the tabletop and for tests: 64 patches, about 0.6 million parameters. Both experts have the same layers,
    heads and key-value heads, because the action expert reads the other one's keys and values.
    """
    shared = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": image_size // 8,
        "vision_use_head": False,
    }
    text = {
        "model_type": "gemma",
        "hidden_size": 96,
        "intermediate_size": 256,
        "vocab_size": _NANO_VOCABULARY,
        **shared,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "projection_dim": 96,
        "image_token_id": _NANO_VOCABULARY - 1,
    }
    expert = {"model_type": "gemma", "hidden_size": 64, "intermediate_size": 192, **shared}
    return {"vlm_config": vlm, "dit_config": expert}
