"""Small word vocabularies, for policies with random weights."""

import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split

UNKNOWN = "<unk>"
_CONDITION_WORDS = ("advantage", ":", "positive", "negative")  # of ``algos.recap``; last, so that other ids stay
_WORD = r"[a-z0-9]+|[^a-z0-9\s]"


def build_word_tokenizer(
    texts: Iterable[str], capacity: int, *, special: Sequence[str], phrases: Sequence[str] = ()
) -> Tokenizer:
    """A word-level tokenizer of ``texts``. Words are sorted: ids depend on the set of words only.

    The words of conditions (``algos.recap``) are always known. Unknown words become ``<unk>``, which must be special.

    Args:
        texts: whose words to know.
        capacity: largest number of words.
        special: words with the first ids, which no text yields.
        phrases: lower-case texts of several words that are one token each; their ids follow.

    Raises ValueError for more words than ``capacity``.
    """
    words = sorted({word for text in texts for word in re.findall(_WORD, text.lower())})
    vocabulary = [*special, *phrases, *words, *(word for word in _CONDITION_WORDS if word not in words)]
    if len(vocabulary) > capacity:
        raise ValueError(f"{len(vocabulary)} words do not fit a text vocabulary of {capacity}: enlarge vocab_size")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.normalizer = Lowercase()
    pieces = "|".join([*map(re.escape, phrases), _WORD])
    tokenizer.pre_tokenizer = Split(Regex(pieces), behavior="removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    return tokenizer


def with_words_of(tokenizer: Tokenizer, texts: Iterable[str], capacity: int) -> Tokenizer:
    """A word-level tokenizer that also knows the words of ``texts`` and of conditions; any other one as it is.

    New words get the next free ids; the others keep theirs. Raises ValueError for more words than ``capacity``.
    """
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] != "WordLevel":
        return tokenizer
    known = content["model"]["vocab"]
    words = sorted({word for text in texts for word in re.findall(_WORD, text.lower())})
    new = [word for word in dict.fromkeys([*words, *_CONDITION_WORDS]) if word not in known]
    first = max(known.values()) + 1
    if first + len(new) > capacity:
        raise ValueError(f"{first + len(new)} words do not fit a text vocabulary of {capacity}: enlarge vocab_size")
    known |= {word: first + i for i, word in enumerate(new)}
    return Tokenizer.from_str(json.dumps(content))
