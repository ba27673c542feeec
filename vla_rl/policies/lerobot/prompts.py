"""Instructions that lerobot's own processors cut off; does not load lerobot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vla_rl.policies.base.prompts import check_cut_prompts

STATE = "observation.state"
TOKENS, TOKENS_KEPT = "observation.language.tokens", "observation.language.attention_mask"


def check_prompts(
    before: Callable[[dict[str, Any]], Mapping[str, Any]], state_dim: int, texts: Sequence[str], checkpoint: str
) -> None:
    """See ``check_cut_prompts``. ``before``: the processor, which tokenizes."""
    seen = before({STATE: torch.zeros(len(texts), state_dim), "task": list(texts)})
    rows = zip(texts, seen[TOKENS], seen[TOKENS_KEPT], strict=True)
    prompts = {text: ids[kept.bool()].tolist() for text, ids, kept in rows}
    check_cut_prompts(prompts, seen[TOKENS].shape[1], checkpoint)
