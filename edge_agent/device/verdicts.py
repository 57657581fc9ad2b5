"""The coordinator's last verdicts on reports, in HOME/outbox/acked, which the agent writes and steps read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from fedge.errors import MALFORMED

ACKED: Final = Path("outbox", "acked")
"""Path of a file within a device's folder, with the last verdicts, oldest first. The file is replaced atomically."""


class Verdict(Struct, frozen=True):
    """The coordinator's verdict on an order's report. `reason`: why the report was not accepted."""

    order_id: str
    accepted: bool
    reason: str = ""


verdicts = msgspec.json.Decoder(list[Verdict])
"""Decoder of the file of verdicts."""


def was_accepted(home: Path, order_id: str) -> bool | None:
    """Return whether the coordinator accepted the report of an order; None if no verdict came, or it was forgotten."""
    try:
        found = verdicts.decode((home / ACKED).read_bytes())
    except (OSError, *MALFORMED):  # the agent, which owns the file, reports the error
        return None
    return next((verdict.accepted for verdict in reversed(found) if verdict.order_id == order_id), None)
