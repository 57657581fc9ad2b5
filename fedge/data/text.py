"""Text as whole numbers: hashed n-grams of words and of characters, the same in training and in inference.

A token is 1 + hash mod (buckets - 1), with the CRC-32 of the n-gram in UTF-8; 0 is padding. Nothing is learned from
texts, so no vocabulary says what a device's texts are. Source: Weinberger et al., "Feature Hashing for Large Scale
Multitask Learning", ICML 2009; n-grams as in Joulin et al., "Bag of Tricks for Efficient Text Classification", 2017.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

_WORD: Final = re.compile(r"\w+")


class Text(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a text becomes tokens: at most `length` of them, each below `buckets`.

    Its n-grams are those of 1 to `words` words, and of `characters` characters within a word, without those if 0. What
    is beyond `length` is left out.
    """

    length: Annotated[int, Meta(ge=1, le=2**16)] = 256
    buckets: Annotated[int, Meta(ge=2, le=2**24)] = 4096
    words: Annotated[int, Meta(ge=1, le=5)] = 2
    characters: Annotated[int, Meta(ge=0, le=8)] = 0


def is_text(x: NDArray[Any]) -> bool:
    """Return whether samples are texts, (n,)."""
    return x.ndim == 1 and (x.dtype.kind == "U" or (x.dtype.kind == "O" and all(isinstance(text, str) for text in x)))


def make_tokens(how: Text, texts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the tokens of texts, (n, length), 0 after the last one."""
    found = np.zeros((len(texts), how.length), np.int64)
    for row, text in zip(found, texts, strict=True):
        tokens = [1 + zlib.crc32(gram.encode()) % (how.buckets - 1) for gram in _list_grams(how, str(text))]
        row[: len(tokens)] = tokens[: how.length]
    return found


def _list_grams(how: Text, text: str) -> Iterator[str]:
    """Yield the n-grams of a text in lower case: of words, the shorter first, then of characters."""
    words = _WORD.findall(text.lower())
    for n in range(1, how.words + 1):
        yield from (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    if how.characters:
        for word in (f"<{word}>" for word in words):
            yield from (f"#{word[i : i + how.characters]}" for i in range(max(len(word) - how.characters, 0) + 1))
