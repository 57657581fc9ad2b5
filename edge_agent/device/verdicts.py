"""The coordinator's last words on reports, in HOME/outbox/acked: the agent writes them, steps ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from fedge.errors import MALFORMED

ACKED: Final = Path("outbox", "acked")
"""The file within a device's folder: the last verdicts, oldest first. It is replaced atomically."""


class Verdict(Struct, frozen=True):
    """How an order ended; `reason`: why the report was not accepted."""

    order_id: str
    accepted: bool
    reason: str = ""


verdicts = msgspec.json.Decoder(list[Verdict])
"""Reads the file."""


def was_accepted(home: Path, order_id: str) -> bool | None:
    """Whether the coordinator accepted the report of an order; None: no word of it came, or it was forgotten."""
    try:
        found = verdicts.decode((home / ACKED).read_bytes())
    except (OSError, *MALFORMED):  # the agent, whose file it is, says what is wrong with it
        return None
    return next((verdict.accepted for verdict in reversed(found) if verdict.order_id == order_id), None)
