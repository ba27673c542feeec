"""Small networks of π0 and π0.5 by lerobot's own classes, whose sizes are constants of lerobot's code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.policies import pi0_twin as twin


def modeling(kind: str) -> Any:
    """lerobot's module of ``pi0`` or ``pi05``."""
    return import_module(f"lerobot.policies.{kind}.modeling_{kind}")


def make_small(kind: str, words: int) -> Any:
    """Let lerobot's module build small models, with so many tokens, in this process; returns the module."""
    module = modeling(kind)
    shrink(module, words)
    return module


def shrink(module: Any, words: int) -> None:
    """Let this module of lerobot build small models."""
    for name, part in small_parts(module, words).items():
        setattr(module, name, part)


def small_parts(module: Any, words: int) -> dict[str, Any]:
    """What takes the place of names in the module."""
    library = module.CONFIG_MAPPING

    def sizes(variant: str) -> Any:
        is_large = variant == "gemma_2b"
        return module.GemmaConfig(
            width=twin.WIDTH if is_large else twin.EXPERT,
            depth=twin.LAYERS,
            mlp_dim=twin.HIDDEN if is_large else twin.EXPERT_HIDDEN,
            num_heads=twin.HEADS,
            num_kv_heads=1,
            head_dim=twin.HEAD_DIM,
        )

    def paligemma() -> Any:
        config = library["paligemma"]()
        vision = config.vision_config
        vision.hidden_size, vision.num_hidden_layers = twin.VISION, twin.VISION_LAYERS
        vision.num_attention_heads, vision.patch_size = twin.VISION_HEADS, twin.PATCH
        _hold(vision, "projection_dim", twin.WIDTH)
        _hold(config.text_config, "vocab_size", words)
        return config

    def gemma(**settings: Any) -> Any:
        return library["gemma"](**settings | {"vocab_size": words})

    return {"get_gemma_config": sizes, "CONFIG_MAPPING": {"paligemma": paligemma, "gemma": gemma}}


def _hold(config: Any, name: str, value: int) -> None:
    """Whatever lerobot sets, ``config`` says ``value``."""
    kind = type(config)
    held = property(lambda self: value, lambda self, new: None)
    config.__class__ = type(kind.__name__, (kind,), {name: held})
