"""Rules shared by both sides of a rollout, by which each device decides for itself whether it takes part in a stage."""

from __future__ import annotations

import hashlib
from typing import Final

from fedge.wire.messages import Rollout

MAX_METADATA_BYTES: Final = 1 << 20
"""Most bytes of a file of signed metadata; devices fetch no larger one."""


def compute_place(rollout_id: str, device_id: str) -> float:
    """Return a device's place in [0, 1) in a rollout's order, uniform and new for each rollout."""
    digest = hashlib.sha256(f"{rollout_id}/{device_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def compute_introduction_digest(introduction_id: str) -> str:
    """Return what a runtime reports as the digest of its bundle while the bundle of an introduction serves.

    Every device has another bundle, whose own digest never leaves.
    """
    return hashlib.sha256(f"introduction {introduction_id}".encode()).hexdigest()


def make_signed_bytes(federation: str, rollout: bytes) -> bytes:
    """Return the bytes to sign for an encoded `Rollout`, which name its federation and differ from TUF metadata."""
    return f"fedge rollout {federation}\n".encode() + rollout


def takes_part(rollout: Rollout, device_id: str) -> bool:
    """Return whether the device belongs to the rollout's present stage."""
    return device_id in rollout.canaries or compute_place(rollout.id, device_id) < rollout.share
