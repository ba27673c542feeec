"""Instructions that are longer than a policy reads."""

import logging
from collections.abc import Mapping, Sequence

from vla_rl.core.errors import UserError

logger = logging.getLogger(__name__)


def check_cut_prompts(prompts: Mapping[str, Sequence[int]], longest: int, checkpoint: str) -> None:
    """Warn of instructions whose tokens, what is left of them, are ``longest``: published code cuts off the rest.

    Raises UserError if two of them are the same then.
    """
    first: dict[tuple[int, ...], str] = {}
    for text, ids in prompts.items():
        other = first.setdefault(tuple(ids), text)
        if other != text and len(ids) >= longest:
            raise UserError(
                f"policy.checkpoint={checkpoint} reads {longest} tokens of an instruction, by which it cannot tell "
                f"{other!r} from {text!r}; shorten them, or leave one of the tasks out"
            )
    if full := [text for text, ids in prompts.items() if len(ids) >= longest]:
        text = "policy.checkpoint=%s reads %d tokens of an instruction, and not what follows in %s"
        logger.warning(text, checkpoint, longest, ", ".join(map(repr, full)))
