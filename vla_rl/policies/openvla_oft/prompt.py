"""Converts instructions to token ids: OpenVLA's prompt, any ``tokenizer.json``, and small word vocabularies."""

import json
import logging
from collections.abc import Iterable
from typing import Self

from tokenizers import Tokenizer

from vla_rl.policies.base.words import build_word_tokenizer, with_words_of
from vla_rl.policies.openvla_oft.architecture import Architecture

_PROMPT = "In: What action should the robot take to {}?\nOut:"
_SPECIAL_WORDS = ("<unk>", "<s>", "</s>", "<final>")  # ids 0..3 of a word vocabulary

logger = logging.getLogger(__name__)


def format_prompt(instruction: str) -> str:
    """The prompt that OpenVLA was trained with; the instruction is lower-cased."""
    return _PROMPT.format(instruction.lower().strip())


def build_tiny_tokenizer(texts: Iterable[str], capacity: int) -> Tokenizer:
    """A word-level tokenizer of the prompt, whose fixed parts are one token each, and of ``texts``.

    Raises ValueError for more words than ``capacity``, the number of text ids of the architecture.
    """
    template = [part.strip().lower() for part in _PROMPT.split("{}")]
    return build_word_tokenizer(texts, capacity, special=_SPECIAL_WORDS, phrases=template)


class PromptTokenizer:
    """Encodes prompts for one architecture: ``<s>``, the text, and the token that ends every prompt."""

    def __init__(self, tokenizer: Tokenizer, architecture: Architecture) -> None:
        self._tokenizer = tokenizer
        self._architecture = architecture

    @classmethod
    def from_json(cls, text: str, architecture: Architecture) -> Self:
        """From the text of a ``tokenizer.json``. Raises ValueError if it is not one."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError("not a tokenizer: it has no 'model'")
        return cls(Tokenizer.from_str(text), architecture)

    def to_json(self) -> str:
        return self._tokenizer.to_str(pretty=True)

    def with_words_of(self, texts: Iterable[str]) -> Self:
        """See ``vla_rl.policies.base.words.with_words_of``."""
        return type(self)(with_words_of(self._tokenizer, texts, self._architecture.text_vocab_size), self._architecture)

    def encode(self, instruction: str) -> list[int]:
        """Ids of the whole prompt. Words outside the vocabulary become ``<unk>``, with a warning.

        Raises ValueError if an id is not one of the architecture's text ids.
        """
        ids = self._tokenizer.encode(format_prompt(instruction)).ids
        unknown = self._tokenizer.token_to_id("<unk>")
        if unknown in ids:
            logger.warning("instruction %r has words that this policy's vocabulary lacks", instruction)
        if ids[:1] != [self._architecture.bos_id]:
            ids = [self._architecture.bos_id, *ids]
        if ids[-1] != self._architecture.final_id:
            ids = [*ids, self._architecture.final_id]
        if max(ids) >= self._architecture.text_vocab_size:
            raise ValueError(
                f"token id {max(ids)} of {instruction!r} is not a text id: those end at "
                f"{self._architecture.text_vocab_size}; the tokenizer belongs to another architecture"
            )
        return ids
