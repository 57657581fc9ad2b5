"""Text of others, as a person's terminal may be shown it, and what they may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def printable(line: str) -> str:
    """One line, with control characters escaped: it neither commands a terminal nor forges a second line."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def nearest(word: str, right: Iterable[str]) -> str:
    """Hint at the word of `right` that is most like `word`: " (did you mean X?)", or nothing."""
    close = difflib.get_close_matches(word, list(right), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
