"""Text of others, as a person's terminal may be shown it."""

from __future__ import annotations


def printable(line: str) -> str:
    """One line, with control characters escaped: it neither commands a terminal nor forges a second line."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
