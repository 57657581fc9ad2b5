"""What both sides of a rollout agree on, above all which devices take part in a stage: each decides for itself."""

from __future__ import annotations

import hashlib
from typing import Final

from fedge.wire.messages import Rollout

MAX_METADATA_BYTES: Final = 1 << 20
"""Limit of one file of signed metadata; devices fetch no larger one."""


def place(rollout_id: str, device_id: str) -> float:
    """A device's place in the order of a rollout, in [0, 1): uniform over devices, different for each rollout."""
    digest = hashlib.sha256(f"{rollout_id}/{device_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def signed_bytes(federation: str, rollout: bytes) -> bytes:
    """The signed form of an encoded `Rollout`, specific to one federation and distinct from repository metadata."""
    return f"fedge rollout {federation}\n".encode() + rollout


def takes_part(rollout: Rollout, device_id: str) -> bool:
    """Whether the device belongs to the rollout's present stage."""
    return device_id in rollout.canaries or place(rollout.id, device_id) < rollout.share
