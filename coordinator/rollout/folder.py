"""REPO/rollout, and HOME/rollout of a coordinator: the supervisor's durable state, and requests to it.

state.json     `Record`: plan, progress and the devices' messages; written before any of it is published
request        one word: pause, resume or abort
request.taken  the one being carried out; another may arrive meanwhile
heard.json     the last number of each device's signed messages (`fedge.membership.signed_messages`)
lock           held by the supervisor
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from coordinator.rollout.decision import Plan, Progress
from fedge.system.files import InUseError, lock_folder, read_kept, read_lasting, write_atomically
from fedge.wire.messages import Count, Id, Outliers, Phase, Quality, RolloutState, Text

LOOKED_AT_S: Final = 1.0
"""Longest time for which a check for a supervisor may hold the lock."""


class Request(StrEnum):
    """A request to a running rollout."""

    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"


class DeviceLine(Struct, frozen=True, kw_only=True):
    """A device as shown to people: its last Health, and the time of its arrival by our clock."""

    phase: Phase
    release: Count
    reason: str = ""
    before: Quality | None = None
    now: Quality | None = None
    temperature_c: float | None = None
    n_predictions: Count = 0
    n_failed: Count = 0
    drift: bool = False
    outliers: Outliers | None = None
    takes_part: bool = False
    seen_at: float | None = None

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """The accuracy before and now; None if at least one is unknown."""
        was, now = (None if quality is None else quality.accuracy for quality in (self.before, self.now))
        return None if was is None or now is None else (was, now)


class RolloutEvent(Struct, frozen=True, kw_only=True):
    """An event of a rollout. device: the device's id, or empty."""

    at: float
    device: str = ""
    text: str


class EarlierRollout(Struct, frozen=True, kw_only=True):
    """The outcome of an earlier rollout."""

    id: Id
    target: Text
    state: RolloutState
    began: float  # its last stage, or its end
    reasons: tuple[str, ...] = ()


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of state.json.

    `version`: the version of the last announcement, of this or an earlier rollout. `members`: the devices that have a
    bundle to introduce; of a release all have.
    """

    plan: Plan
    progress: Progress
    version: Count = 0
    members: tuple[Id, ...] = ()
    devices: dict[Id, DeviceLine] = {}
    events: tuple[RolloutEvent, ...] = ()
    earlier: tuple[EarlierRollout, ...] = ()

    def list_aborted(self) -> list[str]:
        """List the targets whose last rollout was aborted, so that devices may refuse them."""
        last = {each.target: each.state for each in (*self.earlier, self.to_earlier())}
        return [target for target, state in last.items() if state is RolloutState.ABORTED]

    def to_earlier(self) -> EarlierRollout:
        """Return the part that is kept once another rollout begins."""
        plan, progress = self.plan, self.progress
        return EarlierRollout(
            id=plan.id, target=plan.target, state=progress.state, began=progress.began, reasons=progress.reasons
        )


class Folder:
    """The folder of a repository's rollouts, or of a coordinator's introductions.

    Any process may read it and leave a request; one process supervises.
    """

    def __init__(self, repo: Path) -> None:
        self.path = repo / "rollout"

    def read(self) -> Record | None:
        """Read the last rollout; None before the first.

        Raises:
            StoreError: it cannot be read.
        """
        return read_lasting(self.path / "state.json", msgspec.json.Decoder(Record).decode)

    def write(self, record: Record) -> None:
        """Replace the stored rollout.

        Raises:
            StoreError: the disk is full or broken.
        """
        write_atomically(self.path / "state.json", msgspec.json.format(msgspec.json.encode(record), indent=1))

    def read_heard(self) -> dict[str, int]:
        """Read the numbers last written by `write_heard`, by topic and key."""
        return read_kept(self.path / "heard.json", msgspec.json.Decoder(dict[str, int]).decode) or {}

    def write_heard(self, heard: dict[str, int]) -> None:
        """Write the last message numbers, so that the next supervisor refuses replays, too.

        Raises:
            StoreError: the disk is full or broken.
        """
        write_atomically(self.path / "heard.json", msgspec.json.encode(heard))

    def write_request(self, request: Request) -> None:
        """Leave a request, which replaces a request not yet read.

        Raises:
            StoreError: the disk is full or broken.
        """
        write_atomically(self.path / "request", request.encode())

    def take_request(self) -> Request | None:
        """Return the request to carry out; it stays the same until `finish_request`, even if another arrives."""
        taken = self.path / "request.taken"
        try:
            if not taken.exists():
                (self.path / "request").replace(taken)
            return Request(taken.read_text())
        except ValueError:  # not one of our words
            self.finish_request()
        except OSError:
            pass
        return None

    def finish_request(self) -> None:
        """Mark the request as carried out."""
        (self.path / "request.taken").unlink(missing_ok=True)

    @contextmanager
    def supervise(self) -> Iterator[None]:
        """Hold the lock of the one supervisor.

        Raises:
            ConfigError: another process supervises the rollout.
        """
        until = time.monotonic() + LOOKED_AT_S
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(self._lock())
                    break
                except InUseError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.01)
            yield

    def _lock(self) -> AbstractContextManager[None]:
        return lock_folder(self.path, f"another process supervises the rollout in {self.path}")

    def is_supervised(self) -> bool:
        """Return whether a process holds the lock."""
        try:
            with self._lock():
                return False
        except InUseError:
            return True
