"""Instructions that lerobot's own processors cut off; does not load lerobot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vla_rl.policies.base.prompts import check_cut_prompts

STATE = "observation.state"
TOKENS, TOKENS_KEPT = "observation.language.tokens", "observation.language.attention_mask"


def check_prompts(before: Callable[[Any], Mapping[str, Any]], settings: Any, texts: Sequence[str], name: str) -> None:
    """See ``check_cut_prompts``. ``before``: lerobot's processor, which tokenizes; ``settings``: its policy's."""
    state = torch.zeros(len(texts), *settings.input_features[STATE].shape)
    seen = before({STATE: state, "task": list(texts)})
    rows = zip(texts, seen[TOKENS], seen[TOKENS_KEPT], strict=True)
    prompts = {text: ids[kept.bool()].tolist() for text, ids, kept in rows}
    check_cut_prompts(prompts, settings.tokenizer_max_length, name)
