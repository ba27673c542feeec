"""Numbers of weights and bytes of activations of π0, from its sizes alone: nothing is built."""

from collections.abc import Mapping
from typing import Any

from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.pi0.config import Pi0Config

# Of the published model, which the library has as defaults
_BASE_VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 224}
_BASE_VISION |= {"patch_size": 14}
_BASE_SHARED = {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
_BASE_TEXT = {"hidden_size": 2048, "intermediate_size": 16384, "vocab_size": 257_152} | _BASE_SHARED
_BASE_EXPERT = {"hidden_size": 1024, "intermediate_size": 4096} | _BASE_SHARED
_PROMPT_TOKENS = 24  # an assumption, where the instructions are not known
_VALUE_HIDDEN = 64, 32
_WIDE = 6  # tensors of a layer's intermediate width that exist at one time


def pi0_sizes(config: Pi0Config, settings: Mapping[str, Any], spec: EnvSpec, element_size: int) -> PolicySizes:
    """``settings``: from ``model_settings``; ``element_size``: bytes of one weight."""
    vlm = settings.get("vlm_config", {"vision_config": _BASE_VISION, "text_config": _BASE_TEXT})
    vision, text = vlm["vision_config"], vlm["text_config"]
    expert = settings.get("dit_config", _BASE_EXPERT)
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    horizon, action_dim, state_dim = (settings[name] for name in ("chunk_size", "max_action_dim", "max_state_dim"))
    learned = config.noise == "learned"
    e, d, w = expert["hidden_size"], text["hidden_size"], vision["hidden_size"]
    heads = (
        (action_dim + 1) * e
        + (state_dim + 1) * e
        + (2 * e + 1) * e
        + (e + 1) * e
        + (1 + learned) * (e + 1) * action_dim
    )
    vlm_weights = _vision_weights(vision, patches) + (w + 1) * d + text["vocab_size"] * d + _gemma_weights(text)
    features = d + spec.proprio_dim
    parameters = vlm_weights + _gemma_weights(expert) + heads + _value_head(features)
    prefix = len(spec.views) * patches + _PROMPT_TOKENS
    b, steps = element_size, config.recorded_steps
    steer, head = config.steer_in_use, _value_head(d + spec.proprio_dim)
    saved = steps * _gemma_saved(expert, horizon + 1, prefix + horizon + 1, b)
    wide = _WIDE * b * max(prefix * text["intermediate_size"], patches * vision["intermediate_size"])
    if steer is not None:  # all passes of the model are without gradients, and what is trained is small
        steering = _steering(d + spec.proprio_dim, steer.width, action_dim)
        return PolicySizes(parameters + steering, steering + head, wide, 0, wide)
    if config.expert_only:  # the vision-language model keeps nothing but keys and values, which are counted
        wide_expert = _WIDE * b * (horizon + 1) * expert["intermediate_size"]
        return PolicySizes(parameters, parameters - vlm_weights, max(wide, saved + wide_expert), saved, wide, features)
    saved += len(spec.views) * _vision_saved(vision, patches, b) + _gemma_saved(text, prefix, prefix, b)
    return PolicySizes(parameters, parameters - _frozen(text), saved + wide, saved, wide, features)


def _steering(inputs: int, width: int, numbers: int) -> int:
    """Two norms and two layers, and one norm before them; means and deviations."""
    return 2 * inputs + (inputs + 1) * width + (width + 1) * width + 4 * width + (width + 2) * numbers


def _vision_weights(vision: Mapping[str, Any], patches: int) -> int:
    w, f, layers = vision["hidden_size"], vision["intermediate_size"], vision["num_hidden_layers"]
    layer = 4 * (w + 1) * w + (w + 1) * f + (f + 1) * w + 4 * w
    return layers * layer + (3 * vision["patch_size"] ** 2 + 1) * w + patches * w + 2 * w


def _attention(gemma: Mapping[str, Any]) -> tuple[int, int]:
    """Widths of queries and of keys."""
    return gemma["num_attention_heads"] * gemma["head_dim"], gemma["num_key_value_heads"] * gemma["head_dim"]


def _gemma_weights(gemma: Mapping[str, Any]) -> int:
    """Without embeddings."""
    d, f = gemma["hidden_size"], gemma["intermediate_size"]
    q, kv = _attention(gemma)
    return gemma["num_hidden_layers"] * (2 * d * q + 2 * d * kv + 3 * d * f + 2 * d) + d


def _frozen(text: Mapping[str, Any]) -> int:
    """What no action depends on: of the last layer all but keys, values and their norm; and the last norm."""
    d, (q, _) = text["hidden_size"], _attention(text)
    return 2 * d * q + 3 * d * text["intermediate_size"] + 2 * d


def _value_head(inputs: int) -> int:
    first, second = _VALUE_HIDDEN
    return (inputs + 2) * first + (first + 2) * second


def _vision_saved(vision: Mapping[str, Any], tokens: int, b: int) -> int:
    w, f = vision["hidden_size"], vision["intermediate_size"]
    return vision["num_hidden_layers"] * tokens * b * (8 * w + 2 * f)


def _gemma_saved(gemma: Mapping[str, Any], tokens: int, seen: int, b: int) -> int:
    """Bytes that autograd saves: norms (float32 inside), queries, keys, values and result, gates; keys of ``seen``."""
    d, f = gemma["hidden_size"], gemma["intermediate_size"]
    q, kv = _attention(gemma)
    layer = tokens * (2 * (8 * d + 2 * b * d) + 4 * b * q + 4 * b * f) + seen * 4 * b * kv
    return int(gemma["num_hidden_layers"] * layer)
