"""How instructions and images become inputs of the model."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

BOS, END = 1, 3  # ids of a word vocabulary


@dataclass(frozen=True, slots=True)
class InputFormat:
    """The defaults are those of policies made here."""

    prompt: Literal["words", "line"] = "words"  # line: what the tokenizer itself makes of the text and a line break
    longest: int | None = None  # tokens of a prompt; the rest is cut off
    antialias: bool = True  # of images that are made smaller

    def prompt_ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Tokens of an instruction, first and last ones included."""
        if self.prompt == "line":
            ids: list[int] = tokenizer.encode(text if text.endswith("\n") else f"{text}\n").ids
        else:
            ids = [BOS, *tokenizer.encode(text, add_special_tokens=False).ids, END]
        return ids[: self.longest]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the constructor takes it."""
        return asdict(self)


OWN_FORMAT = InputFormat()
