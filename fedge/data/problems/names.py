"""Names of classes, labels and targets."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

PRINTABLE: Final = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""Pattern of text without control characters, which could be commands to a terminal."""

Word = Annotated[str, Meta(pattern=PRINTABLE, min_length=1, max_length=200)]

HOW_TO_ADD: Final = "`fedge campaign run --add-class NAME` at the coordinator lets a further class join"
"""What to do about samples of a class that the task does not have."""
