"""A campaign's bundle on its device: held back until its introduction comes, tried, and reported to the coordinator.

    Rollout, retained   ──▶  `Introduction.announced`: which campaign's bundles may be tried here
    Health, retained    ◀──  `Introduction.make_health`: what became of this device's

A device without a broker holds nothing back, and a device without a bundle takes its first one at once.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from deploy.updates.decision import INSTALLING, compute_verdict
from deploy.updates.examination import Examination
from fedge.bundle.campaign import read_campaign
from fedge.bundle.manifest import compute_bundle_digest
from fedge.errors import StoreError
from fedge.system.files import read_kept, write_atomically
from fedge.system.hardware import measure_temperature_c
from fedge.wire.messages import Count, Health, Phase, Quality, Rollout, RolloutState
from fedge.wire.rollout import compute_introduction_digest, takes_part

FILE: Final = "introduced.json"


SILENCE_S: Final = 1800.0
"""Time for which a bundle waits, and no introduction was ever announced, before somebody should look at the broker. The
last round of a campaign, before which none is announced, rarely takes longer."""
UNHEARD: Final = (
    "waits: this device has heard of no introduction: if the broker has an access list of an earlier version, it hides "
    "them; run `fedge provision broker` again where the broker is"
)


class Introduced(Struct, frozen=True, kw_only=True):
    """Content of HOME/introduced.json: the last bundle of a campaign that was examined here.

    `introduction` is the id of its Rollout, `digest` the bundle's own. `switched` is whether the bundle then went into
    service. The rest measures both bundles, on unmarked samples.
    """

    introduction: str = ""
    campaign: Count = 0
    digest: str = ""
    switched: bool = False
    before: Quality | None = None
    now: Quality | None = None


class Introduction:
    """The introduction of campaigns' bundles, as one device takes part in it.

    `announced`: the last announcement; None before the first.
    `waits`: whether bundles wait for it, because a broker announces introductions.
    `examining`: whether a bundle of it is being examined.
    `unheard`: what to do, if a bundle has waited long and no introduction was ever announced; else "". A broker whose
    rules hide the topic may grant the subscription all the same, as Mosquitto does.
    """

    def __init__(self, home: Path, device_id: str, *, waits: bool) -> None:
        self._home, self._device_id = home, device_id
        self.waits = waits
        self.announced: Rollout | None = None
        self.examining = False
        self.unheard = ""
        self._waiting_since: float | None = None
        self._introduced = _read_introduced(home)

    def list_held(self, above: int) -> set[Path]:
        """List the bundles in the inbox of a release above a number that are not to be tried yet."""
        folders = (self._home / "bundles").glob("[0-9]*") if self.waits else ()
        newer = (folder for folder in folders if folder.name.isdecimal() and int(folder.name) > above)
        return {folder for folder in newer if self.is_held(read_campaign(folder))}

    def watch_silence(self, *, holds: bool, now: float) -> bool:
        """Note whether a bundle waits for an announcement that never came; return whether `unheard` has changed.

        `now`: by the monotonic clock.
        """
        if not holds or self.announced is not None:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        silent = self._waiting_since is not None and now - self._waiting_since >= SILENCE_S
        before, self.unheard = self.unheard, UNHEARD if silent else ""
        return before != self.unheard

    def is_held(self, campaign: int) -> bool:
        """Return whether a bundle of this campaign, or 0 for one of no campaign, must wait."""
        at = self.announced
        return (
            self.waits
            and campaign > 0
            and not (
                at is not None and at.release == campaign and at.state in INSTALLING and takes_part(at, self._device_id)
            )
        )

    def is_recalled(self, running: str) -> bool:
        """Return whether the bundle in service came by the introduction that has been aborted."""
        at, introduced = self.announced, self._introduced
        aborted = at is not None and at.state is RolloutState.ABORTED and at.id == introduced.introduction
        return aborted and introduced.switched and introduced.digest == running

    def record_examination(self, campaign: int, digest: str, found: Examination) -> None:
        """Keep what became of a campaign's bundle, before it goes into service.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self.announced is None or self.announced.release != campaign:
            return
        self._write(
            Introduced(
                introduction=self.announced.id,
                campaign=campaign,
                digest=digest,
                switched=not found.reason,
                before=found.before,
                now=found.now,
            )
        )

    def adopt_running(self, release: int, running: str) -> None:
        """Count the bundle in service as introduced if it is of the announced campaign, as a device's first one is.

        Raises:
            StoreError: the disk is full or broken.
        """
        at = self.announced
        if at is None or at.id == self._introduced.introduction or at.state not in INSTALLING:
            return
        folder = self._home / "bundles" / str(release)
        with contextlib.suppress(OSError):
            if read_campaign(folder) == at.release and compute_bundle_digest(folder) == running:
                self._write(Introduced(introduction=at.id, campaign=at.release, digest=running))

    def _write(self, introduced: Introduced) -> None:
        write_atomically(self._home / FILE, msgspec.json.encode(introduced))
        self._introduced = introduced

    def make_health(self, release: int, running: str, refused: str | None, *, on_trial: bool, at: float) -> Health:
        """Make the report on the announced campaign's bundle.

        Args:
            release: release of the bundle in service.
            running: its digest.
            refused: why the bundle of `digest` was refused or given up, or None.
            on_trial: whether the bundle in service is on trial.
            at: seconds since the epoch.
        """
        introduced, announced = self._introduced, self.announced
        concerned = announced is not None and announced.id == introduced.introduction
        in_service = concerned and introduced.digest == running
        phase, reason = Phase.TRIAL if in_service and on_trial else Phase.SERVING, ""
        if concerned and not in_service and refused is not None:
            phase, reason = compute_verdict(refused, switched=introduced.switched), refused
        if self.examining and announced is not None:
            phase, reason, concerned, in_service = Phase.FETCHING, "", True, False
        reason = reason or self.unheard
        return Health(
            device_id=self._device_id,
            at=at,
            phase=phase,
            release=release,
            bundle_digest=compute_introduction_digest(introduced.introduction) if in_service else None,
            rollout=announced.id if concerned and announced is not None else None,
            reason=reason,
            before=introduced.before if concerned else None,
            now=introduced.now if concerned else None,
            temperature_c=measure_temperature_c(),
        )

    @property
    def digest(self) -> str:
        """The digest of the last bundle of a campaign that was examined here."""
        return self._introduced.digest

    @property
    def is_under_way(self) -> bool:
        """Whether the coordinator waits for news of the devices."""
        return self.announced is not None and self.announced.state in {RolloutState.RUNNING, RolloutState.PAUSED}


def _read_introduced(home: Path) -> Introduced:
    with contextlib.suppress(StoreError):  # the device answers even if its folder cannot be read or written
        return read_kept(home / FILE, msgspec.json.Decoder(Introduced).decode) or Introduced()
    return Introduced()
