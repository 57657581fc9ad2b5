"""Pure functions that decide what a device does next with a rollout, and which phase it reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

import msgspec
from msgspec import Struct

from fedge.wire.messages import BlobRef, Phase, Rollout, RolloutState
from fedge.wire.rollout import MAX_METADATA_BYTES

MAX_ALL_METADATA_BYTES: Final = 8 << 20
"""Most bytes of metadata in one announcement; if they are more, nothing of it is fetched."""
RETRY_S: Final = 5.0
"""Pause after the first failure; it doubles with each further one, up to `RETRY_CAP_S`."""
RETRY_CAP_S: Final = 600.0
INSTALLING: Final = (RolloutState.RUNNING, RolloutState.DONE)


class Decision(Enum):
    """The next thing that a device does."""

    NOTHING = auto()
    RECALL = auto()  # the introduction that put the bundle in service was aborted
    SETTLE = auto()  # check whether the bundle has proved itself, or is worse than the previous one
    GO_BACK = auto()  # the rollout was aborted, but its bundle is in service here
    INSTALL = auto()  # fetch the rollout's bundle and try it
    TAKE_IN = auto()  # try the bundle of the inbox


class Situation(Struct, frozen=True, kw_only=True):
    """The input of `decide` and `compute_phase`."""

    state: RolloutState | None = None  # state of the rollout; None without a rollout
    takes_part: bool = False  # whether the device belongs to the rollout's stage
    announced: str | None = None  # digest of the manifest that the rollout names
    running: str  # digest of the bundle in service
    on_trial: bool = False  # whether the bundle in service is on trial
    refused: str | None = None  # why this device refused the announced bundle
    switched: bool = False  # whether a rollout put the announced bundle into service here
    judged: str | None = None  # why the announcement is not trusted
    failed: str = ""  # why the announced bundle could not be fetched
    waiting: bool = False  # whether the device waits until the next attempt
    no_way_back: bool = False  # whether the rollout's bundle could not be reverted
    inbox: bool = False  # whether the inbox has a new bundle
    worse: bool = False  # whether labelled samples favour the previous bundle
    recalled: bool = False  # whether the introduction of the bundle in service was aborted
    stuck: str = ""  # why a bundle that was given up is still in service


def decide(now: Situation) -> Decision:
    """Decide what the device does next."""
    there = now.state is not None and now.announced == now.running
    if there and now.switched and now.state is RolloutState.ABORTED and not now.no_way_back:
        return Decision.GO_BACK
    if now.recalled:
        return Decision.RECALL
    if now.on_trial or now.worse:
        return Decision.SETTLE
    wanted = now.state in INSTALLING and now.takes_part and not there
    if wanted and now.refused is None and now.judged is None and not now.waiting:
        return Decision.INSTALL
    if now.inbox:
        return Decision.TAKE_IN
    return Decision.SETTLE if now.stuck else Decision.NOTHING


def compute_phase(now: Situation) -> tuple[Phase, str]:
    """Return the device's phase for the rollout's release, and the reason for it."""
    if now.stuck:
        return Phase.FAILED, now.stuck
    if now.state is not None and now.takes_part and now.announced != now.running:
        if now.refused is not None:
            return compute_verdict(now.refused, switched=now.switched), now.refused
        if now.judged is not None:
            return Phase.REFUSED, now.judged
        if now.failed:
            return Phase.FAILED, now.failed
    return (Phase.TRIAL if now.on_trial else Phase.SERVING), ""


def compute_verdict(refused: str, *, switched: bool) -> Phase:
    """Return the phase of a device that does not run a bundle; `refused` says why, `switched` whether it has run it."""
    if switched:
        return Phase.ROLLED_BACK
    return Phase.KEPT if refused.startswith(("accuracy:", "score:")) else Phase.REFUSED


def find_manifest_digest(rollout: Rollout) -> str | None:
    """Return the digest of the manifest that a rollout names, which metadata must still confirm, or None."""
    folder, _, name = rollout.target.rpartition("/")
    names = {f"{folder}/{ref.digest}.{name}": ref.digest for ref in rollout.metadata.values()}
    return next((names[file] for file in rollout.metadata if file in names), None)


def compute_claim(rollout: Rollout) -> str:
    """Return a hash that identifies a rollout's metadata and target."""
    return hashlib.sha256(msgspec.msgpack.encode((rollout.target, sorted(rollout.metadata.items())))).hexdigest()


def explain_too_large(metadata: Mapping[str, BlobRef]) -> str:
    """Return why these metadata are too large or too many to request at all, or ""."""
    largest = max((ref.size_bytes for ref in metadata.values()), default=0)
    total = sum(ref.size_bytes for ref in metadata.values())
    if largest > MAX_METADATA_BYTES:
        return f"endless-data: a metadata file has {largest} bytes; at most {MAX_METADATA_BYTES} allowed"
    if total > MAX_ALL_METADATA_BYTES:
        return f"endless-data: all metadata have {total} bytes; at most {MAX_ALL_METADATA_BYTES} allowed"
    return ""


def compute_retry_s(attempt: int, draw: float) -> float:
    """Return the pause in seconds after failure number `attempt`: 1/2 to 1 of a doubling pause, `draw` in [0, 1)."""
    return min(RETRY_CAP_S, RETRY_S * 2.0 ** min(attempt - 1, 20)) * (1 + draw) / 2


class Judgement(Struct, frozen=True, kw_only=True):
    """The reason why an announcement is not trusted, and the time by our clock at which that was found."""

    announcement: str
    reason: str
    at: float

    def holds_for(self, claim: str) -> bool:
        """Return whether this applies to a claim; after the clock was set back, expiry is checked again."""
        return self.announcement == claim and not (self.reason.startswith("expired") and time.time() < self.at)
