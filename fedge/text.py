"""Untrusted text made safe for a terminal, and suggestions for mistyped words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def printable(line: str) -> str:
    """One line with control characters escaped: it can neither control a terminal nor forge a second line."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def nearest(word: str, right: Iterable[str]) -> str:
    """A hint at the most similar word in `right`: " (did you mean X?)", or ""."""
    close = difflib.get_close_matches(word, list(right), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
