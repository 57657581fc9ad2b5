"""A device's runtime on the wire: it receives the fleet's rollout and reports the device's health.

    Rollout, retained  ──▶  `decide`: what to do next  ──▶  fetch the metadata, verify them (`deploy.updates.trust`)
    Health, retained   ◀──  `compute_phase`: where it stands      fetch what is missing, into the content store
                                                             stage, examine, switch, serve on trial, settle

Only signed metadata are accepted; the bundle in service is not touched before the new one has passed its examination.
After any interruption, the next process continues from the slots, since `decide` uses no other history. Bundles in the
inbox HOME/bundles go the same way, without signatures, because whoever can write there owns the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from deploy.updates.answering import ActiveBundle
from deploy.updates.decision import (
    INSTALLING,
    Decision,
    Judgement,
    Situation,
    compute_claim,
    compute_phase,
    compute_retry_s,
    decide,
    explain_too_large,
    find_manifest_digest,
)
from deploy.updates.drift import Alarm
from deploy.updates.examination import examine_bundle
from deploy.updates.introduction import Introduction
from deploy.updates.slots import Slots, find_inbox_bundle
from edge_agent.samples import SampleStore
from edge_agent.samples.answers import MAX_ANSWERS
from fedge.bundle.campaign import read_campaign
from fedge.bundle.manifest import MANIFEST, Manifest, decode_manifest, read_bundle
from fedge.data.classes import has_grown
from fedge.data.task import list_differences
from fedge.errors import ConfigError, FedgeError, ProtocolError, StoreError, TransportError, UpdateRejected, raise_as
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import Plain, Signed, make_speaker, open_unverified
from fedge.privacy.egress import INTRODUCED, REVEALED_FIELDS, Revealed, Rules, WithheldError, without_figures
from fedge.system.files import BlobFolder, compute_digest, get_versions, read_kept, write_atomically
from fedge.system.hardware import measure_temperature_c
from fedge.system.logs import Lines
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import (
    Announcement,
    AtWork,
    BlobRef,
    Health,
    Phase,
    Quality,
    Rollout,
    decode_message,
    encode_message,
)
from fedge.wire.rollout import MAX_METADATA_BYTES, takes_part
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transport import Transport

if TYPE_CHECKING:
    from deploy.updates.trust import Trust

log = logging.getLogger("fedge.deploy")

K = TypeVar("K", bound=Struct)

MAX_RELEASE_BYTES: Final = 4 << 30
"""Most bytes of parts that a device fetches for one release."""
SPARE_DISK_BYTES: Final = 64 << 20
"""Disk space that must remain free after a release is staged."""
FETCH_S: Final = 600.0
"""Time limit for one part; what has arrived by then is kept, and the rest is requested again later."""
METADATA_S: Final = 30.0
"""Time limit for one metadata file, and for the next bytes of any file. Metadata are small; their sender may be gone,
and the inbox must not wait."""
HEALTH_S: Final = 60.0
"""Pause between two health reports while nothing changes."""
GOODBYE_S: Final = 2.0
"""Time limit for the last health, that of a runtime which ends."""
LOOK_S: Final = 2.0
"""Pause between two looks at the inbox and at drift."""
MEND_S: Final = 24 * 3600.0
"""Pause between two checks of the slots, each of which reads all their bytes."""
TRIAL_S: Final = 1.0
"""Pause between two looks at a bundle on trial."""

RECENT: Final = 100
"""Number of latest labelled answers whose accuracy is reported."""
LEAST_RECENT: Final = 20
"""Fewest labelled answers whose accuracy is reported."""
NEWS: Final = 1 / 32
"""Step of the score at work that deserves a message of its own."""
DRIFT: Final = "drift.json"
"""Name of the file in HOME that keeps an alarm, since a process that starts again has forgotten the samples."""
REMEMBERED: Final = 8
"""Number of latest bundles from rollouts whose origin is remembered: those in the slots, and some refused ones."""


# ------------------------------------------------------------------------------------------------------------- core


class Outcome(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of HOME/outcome.json, the result of the last examination.

    `switched` is whether the bundle then went into service; `against` is the digest of the bundle in service at that
    time. `signed` holds the digests of the latest bundles from rollouts, newest first. All other bundles may have been
    made on this device from its sensitive samples, so their digests are not reported.
    """

    rollout: str | None = None
    digest: str = ""
    switched: bool = False
    against: str = ""
    before: Quality | None = None
    now: Quality | None = None
    signed: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------ shell


@dataclass(eq=False)
class Link:
    """The connection of one device's runtime to one federation.

        link = Link("cam1", "shop", home, slots, answering)
        await link.attach(transport)
        async with transport:
            await asyncio.gather(link.follow(), link.report())  # until cancelled

    No peer can end it; what fails now is tried again later, while the device stays in service. Without a broker,
    `follow()` alone handles the inbox. The link may be attached to another transport later. `rules` are the owner's
    rules on what may leave the device. `waits`: whether bundles of a campaign wait for its introduction, since a broker
    announces it.
    """

    device_id: str
    federation: str
    home: Path
    slots: Slots
    answering: ActiveBundle
    rules: Rules = Rules()
    waits: bool = False
    store: SampleStore | None = None

    def __post_init__(self) -> None:
        self._topics = Topics(self.federation)
        self._rollout: Rollout | None = None
        self._distrusted = ""  # why the last announcement is ignored
        self._outcome = _read_json(self.home / "outcome.json", Outcome) or Outcome()
        self._introduction = Introduction(self.home, self.device_id, waits=self.waits)
        self._introduced: Health | None = None  # as last published
        if self.slots.state.trial is not None and self._outcome.digest == self.answering.runtime.digest:
            self.answering.set_latency_limit(self._outcome.before)  # the process that began the trial has ended
        self._at_work: AtWork | None = None
        self._counted: tuple[int, int, int] | None = None  # release and labels by which score at work was counted
        self._alarm = _read_json(self.home / DRIFT, Alarm)
        self.answering.raise_alarm(self._alarm)
        self._damaged: dict[Path, object] = {}  # unreadable bundles in the inbox, by the version of their files
        self._judged: Judgement | None = None
        self._failed: tuple[str, str] | None = None  # an announcement's claim, and why it failed
        self._n_failures = 0  # consecutive failures of that announcement
        self._retry_at = 0.0
        self._no_way_back: str | None = None  # id of the aborted rollout or introduction that could not be reverted
        self._fetching = False
        self._lines = Lines()
        self._news = asyncio.Event()
        self._health: Health | None = None
        self._unsaid = asyncio.Event()
        self._trusting = threading.Lock()

    async def attach(self, transport: Transport) -> None:
        """Subscribe to the rollout. Call this before entering the transport.

        Raises:
            ConfigError: the certificate is not this device's.
            StoreError: the folders for fetched files cannot be written.
        """
        self._transport = transport
        self._signed = self._make_speaker(transport.settings)
        seal = self._signed.seal
        with raise_as(StoreError, f"cannot write {self.home}"):
            self._received = BlobFolder(self.home / "received")  # metadata, until they are verified
            self._metadata = Receiver(transport, self._received, durable=False, max_bytes=MAX_METADATA_BYTES, seal=seal)
            self._parts = Receiver(transport, self.slots.parts, max_bytes=MAX_RELEASE_BYTES, seal=seal)
        await transport.subscribe(self._topics.rollout, self._on_rollout)
        await transport.subscribe(self._health_topic, self._on_own_health, refused=self._on_health_refused)
        topic = self._topics.introduction
        await transport.subscribe(topic, self._on_introduction, refused=self._on_introduction_refused)
        transport.on_connect(self._on_connect)

    def make_last_will(self, broker: BrokerSettings) -> Will | None:
        """Make the last will, by which the broker tells that this runtime has gone; None if the owner forbids it.

        Raises:
            ConfigError: the certificate is not this device's.
        """
        try:
            gone = self._make_goodbye()
        except WithheldError:
            return None
        return Will(self._health_topic, self._make_speaker(broker).seal(self._health_topic, gone, will=True), delay_s=0)

    def _make_speaker(self, broker: BrokerSettings) -> Plain | Signed:
        return make_speaker(broker, Subject(self.federation, Role.DEVICE, self.device_id), self.home)

    @property
    def _health_topic(self) -> str:
        return self._topics.make_agent_topic(self.device_id, "health")

    # ------------------------------------------------------------------------------------------------- inwards

    async def _on_rollout(self, inbound: Inbound) -> None:
        try:
            self._rollout = (
                await asyncio.to_thread(self._verify_announcement, inbound.payload) if inbound.payload else None
            )
        except (UpdateRejected, StoreError) as error:  # the previous announcement stays in force
            self._lines.warning(log, "event=announcement_refused reason=%r", str(error))
            self._distrusted = f"announcement refused: {error}"
            self._news.set()
            return
        self._distrusted = ""
        if not inbound.retained:  # its sender is connected and may serve the files
            self._retry_at = 0.0
        self._news.set()

    async def _on_introduction(self, inbound: Inbound) -> None:
        """Hear how far a campaign's bundles may go, from the coordinator that had them made."""
        if not inbound.payload:
            self._introduction.announced = None
        else:
            payload = self._signed.open(inbound.topic, inbound.payload, Role.COORDINATOR)
            self._introduction.announced = decode_message(payload, Rollout)
        self._unsaid.set()
        self._news.set()

    def _on_introduction_refused(self, reason: str) -> None:
        """Wait for nothing where the broker does not let us hear of introductions."""
        log.warning("event=no_introduction reason=%r", reason)
        self._introduction.waits = False
        self._news.set()

    def _verify_announcement(self, payload: bytes) -> Rollout | None:
        """Verify an announcement and return its rollout.

        Without a root of trust, return the unverified rollout if it is running or done, else None.
        """
        announcement = decode_message(payload, Announcement)
        try:
            with self._trust() as trust:
                return trust.verify_rollout(announcement, self.federation)
        except ConfigError:  # without a root of trust nothing can be installed or reverted here; health reports that
            rollout = decode_message(announcement.rollout, Rollout)
            return rollout if rollout.state in INSTALLING else None

    @contextlib.contextmanager
    def _trust(self) -> Iterator[Trust]:
        """Open the device's trust for one thread at a time, since a cancelled thread may still be running."""
        from deploy.updates.trust import Trust

        with self._trusting:
            yield Trust(self.home)

    async def _on_own_health(self, inbound: Inbound) -> None:
        """Speak up if the broker tells that we have gone: it means an earlier process, or a connection that we lost."""
        with contextlib.suppress(ProtocolError):
            if inbound.payload and not decode_message(open_unverified(inbound.payload), Health).serving:
                self._unsaid.set()

    def _on_health_refused(self, reason: str) -> None:
        log.debug("event=cannot_overhear detail=%r", reason)

    async def _on_connect(self) -> None:
        self._introduced = None
        self._unsaid.set()  # the broker may have lost the retained messages

    # ------------------------------------------------------------------------------------------------- deciding

    async def follow(self) -> None:
        """Handle the slots, the bundle on trial, the inbox and the rollout, until cancelled.

        This runs with or without a broker. The slots are repaired first, while the bundle in memory stays in service.
        """
        mended_at = -MEND_S
        while True:
            self._news.clear()
            try:
                if time.monotonic() - mended_at >= MEND_S:
                    mended_at = time.monotonic()
                    await asyncio.to_thread(self.slots.repair)
                pause_s = await self._run_step()
                await asyncio.to_thread(self._watch_drift)
            except (FedgeError, OSError) as error:  # may be repaired later; the bundle in memory stays in service
                log.error("event=step_failed reason=%r", str(error))  # noqa: TRY400 - the text is all
                pause_s = LOOK_S
            if pause_s > 0 and not self._news.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._news.wait()

    async def _run_step(self) -> float:
        """Take the next step; return the seconds to wait until the following one, unless a rollout arrives earlier."""
        running = self.answering.runtime
        self._introduction.adopt_running(running.manifest.release, running.digest)
        rollout, inbox = self._rollout, self._find_inbox_bundle()
        situation = self._make_situation(rollout, inbox)
        match decide(situation):
            case Decision.GO_BACK:
                assert rollout is not None
                await self._revert(rollout.id, f"aborted: rollout {rollout.id}")
            case Decision.RECALL:
                assert self._introduction.announced is not None
                recalled = self._introduction.announced.id
                await self._revert(recalled, f"aborted: introduction {recalled}")
            case Decision.SETTLE:
                await asyncio.to_thread(self.answering.settle)
                self._update_health()
                if self.answering.no_way_back:
                    return LOOK_S
                return TRIAL_S if self.slots.state.trial is not None else 0.0
            case Decision.INSTALL:
                assert rollout is not None
                await self._install(rollout)
            case Decision.TAKE_IN:
                assert inbox is not None
                await self._install_inbox(inbox)
            case Decision.NOTHING:
                self._update_health()
                left = self._retry_at - time.monotonic()
                return min(max(left, 0.01), LOOK_S) if situation.waiting else LOOK_S
        return 0.0

    def _watch_drift(self) -> None:
        """Learn what is usual for the bundle in service, and keep the alarm for the next process."""
        self.answering.learn_home(self.home)
        self._count_answers()
        alarm = self.answering.alarm
        if alarm == self._alarm:
            return
        log.warning("event=drift kind=%s", "none" if alarm is None else alarm.kind)
        if alarm is None:
            (self.home / DRIFT).unlink(missing_ok=True)
        else:
            write_atomically(self.home / DRIFT, msgspec.json.encode(alarm))
        self._alarm = alarm

    def _count_answers(self) -> None:
        """Count right and wrong answers of the bundle in service, if labels have come since."""
        level = self.answering.coverage_level
        state = self.answering.runtime.manifest.release, self.answering.n_labelled, 0 if level is None else level.n
        if self.store is None or state == self._counted:
            return
        right, wrong = self.store.count_recent_answers(MAX_ANSWERS, release=state[0])
        latest = self.store.count_recent_answers(RECENT, release=state[0])
        recent = latest[0] / sum(latest) if sum(latest) >= LEAST_RECENT else None
        covered, coverage = (level.covered / level.n, level.wanted) if level and level.n else (None, None)
        work = AtWork(right=right, wrong=wrong, recent=recent, covered=covered, coverage=coverage)
        self._at_work = work if right + wrong or covered is not None else None
        self._counted = state

    def _make_situation(self, rollout: Rollout | None, inbox: Path | None) -> Situation:
        state = self.slots.state
        always = Situation(
            running=self.answering.runtime.digest,
            on_trial=state.trial is not None,
            inbox=inbox is not None,
            worse=self.answering.worse_reason != "",
            recalled=self._is_recalled(),
            stuck=self.answering.no_way_back,
        )
        if rollout is None:
            return always
        digest, claim = find_manifest_digest(rollout), compute_claim(rollout)
        judged = (
            "missing: the rollout does not name its manifest" if digest is None else explain_too_large(rollout.metadata)
        )
        if not judged and rollout.release < state.highest_release:
            judged = f"rollback: release {rollout.release} is older than {state.highest_release}, which ran here"
        if not judged and self._judged is not None and self._judged.holds_for(claim):
            judged = self._judged.reason
        failed = self._failed[1] if self._failed is not None and self._failed[0] == claim else ""
        return msgspec.structs.replace(
            always,
            state=rollout.state,
            takes_part=takes_part(rollout, self.device_id),
            announced=digest,
            refused=None if digest is None else state.refused.get(digest),
            switched=self._outcome.rollout is not None and self._outcome.switched and self._outcome.digest == digest,
            judged=judged or None,
            failed=failed,
            waiting=failed != "" and time.monotonic() < self._retry_at,
            no_way_back=self._no_way_back == rollout.id,
        )

    def _find_inbox_bundle(self) -> Path | None:
        """Return the newest inbox bundle above the one in service that was not refused, or None."""
        runtime = self.answering.runtime
        known = {*self.slots.state.refused, runtime.digest}
        left = {folder for folder, seen in self._damaged.items() if get_versions(folder) == seen}
        held = self._introduction.list_held(runtime.manifest.release)
        if self._introduction.watch_silence(holds=bool(held - left), now=time.monotonic()):
            if self._introduction.unheard:
                log.error("event=no_introduction reason=%r", self._introduction.unheard)
            self._unsaid.set()
        left |= held
        return find_inbox_bundle(self.home, runtime.manifest.release, known, left)

    def _is_recalled(self) -> bool:
        introduction = self._introduction
        known = introduction.announced is not None and introduction.announced.id == self._no_way_back
        return not known and introduction.is_recalled(self.answering.runtime.digest)

    def _is_wanted(self, rollout: Rollout) -> bool:
        """Return whether the work begun for this rollout is still wanted."""
        now = self._rollout
        return (
            now is not None
            and now.id == rollout.id
            and now.state in INSTALLING
            and takes_part(now, self.device_id)
            and compute_claim(now) == compute_claim(rollout)
        )

    # ------------------------------------------------------------------------------------------------- doing

    async def _revert(self, aborted: str, reason: str) -> None:
        """Return to the previous bundle, because the rollout or introduction with the id `aborted` was aborted."""
        before = self.answering.runtime.digest
        await asyncio.to_thread(self.answering.revert, reason)
        if self.answering.runtime.digest == before:
            self._no_way_back = aborted
        self._update_health()

    async def _install(self, rollout: Rollout) -> None:
        """Take an announced release to its trial, or record why it was refused or failed."""
        self._fetching = True
        self._update_health()
        try:
            manifest = await self._run_while_wanted(rollout, self._fetch_release(rollout))
            if manifest is not None:
                self._fetching = False
                await self._examine_and_switch(manifest, rollout)
        except UpdateRejected as error:
            if str(error).startswith("clock"):  # try again later, since the clock can be set
                self._record_failure(rollout, error)
            else:
                self._judged = Judgement(announcement=compute_claim(rollout), reason=str(error), at=time.time())
                log.warning(
                    "event=release_refused rollout=%s target=%s reason=%r", rollout.id, rollout.target, str(error)
                )
        except (ProtocolError, StoreError, TransportError, ConfigError, OSError) as error:
            self._record_failure(rollout, error)
        else:
            self._failed, self._n_failures, self._retry_at = None, 0, 0.0
        finally:
            self._fetching = False
            self._update_health()

    def _record_failure(self, rollout: Rollout, error: Exception) -> None:
        claim = compute_claim(rollout)
        again = self._failed is not None and self._failed[0] == claim
        self._n_failures = self._n_failures + 1 if again else 1
        pause = compute_retry_s(self._n_failures, random.SystemRandom().random())
        self._retry_at = time.monotonic() + pause
        reason = str(error) or "time-out: no peer sends the rest of a file"
        self._failed = (claim, reason)
        log.warning("event=release_failed rollout=%s again_in_s=%.0f reason=%r", rollout.id, pause, reason)

    async def _run_while_wanted(self, rollout: Rollout, work: Coroutine[Any, Any, bytes | None]) -> bytes | None:
        """Return the work's result, or None as soon as the rollout is replaced, paused or ended.

        Also return None if labelled samples turn against the bundle in service; that is handled first, then the work
        is repeated.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and self._is_wanted(rollout) and not self.answering.worse_reason:
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({task, news}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _fetch_release(self, rollout: Rollout) -> bytes | None:
        """Verify metadata, fetch missing parts, and return the manifest, or None if it is refused."""
        self._forget_others(rollout)
        files: dict[str, bytes] = {}
        try:
            for name, ref in rollout.metadata.items():
                files[name] = (await self._fetch(self._metadata, ref, METADATA_S)).read_bytes()
        finally:
            for ref in rollout.metadata.values():
                self._received.remove(ref.digest)
        data = await asyncio.to_thread(self._verify_manifest, files, rollout.target)
        digest = compute_digest(data)
        if digest != find_manifest_digest(rollout):
            raise UpdateRejected(f"mix-and-match: the metadata sign the manifest {digest}; the rollout names another")
        manifest = self._parse_manifest(data, digest)
        if manifest is None:
            return None
        missing = await asyncio.to_thread(self.slots.list_missing, manifest)
        self._require_room(sum(size for _, size in missing), sum(part.size_bytes for part in manifest.files.values()))
        for missed, size in missing:
            await self._fetch(self._parts, BlobRef(digest=missed, size_bytes=size), FETCH_S)
        return data

    def _forget_others(self, rollout: Rollout) -> None:
        """Remove partly received metadata of other announcements, which may be frequent."""
        named = {ref.digest for ref in rollout.metadata.values()}
        for path in self._received.get_path("").iterdir():
            if path.name.partition(".")[0] not in named:
                path.unlink(missing_ok=True)

    def _verify_manifest(self, files: dict[str, bytes], target: str) -> bytes:
        with self._trust() as trust:
            return trust.verify_manifest(files, target)

    async def _fetch(self, receiver: Receiver, ref: BlobRef, within_s: float) -> Path:
        async with asyncio.timeout(within_s):
            chunks, wants = (
                self._topics.make_model_topic(ref.digest),
                self._topics.make_agent_topic(self.device_id, "release-wants"),
            )
            return await receiver.fetch(
                ref, chunks=chunks, wants=wants, device_id=self.device_id, patience_s=METADATA_S
            )

    def _parse_manifest(self, data: bytes, digest: str) -> Manifest | None:
        """Parse a genuine manifest; if this device cannot run it, refuse it for good and return None."""
        try:
            manifest = decode_manifest(data)
        except UpdateRejected as error:
            self._record_refusal(digest, f"schema: {error}")
            return None
        mine = self.answering.runtime.task
        if not has_grown(mine, manifest.task):
            differences = "; ".join(list_differences(mine, manifest.task))
            self._record_refusal(digest, f"task: the release is for another task than this device's: {differences}")
            return None
        with raise_as(UpdateRejected, "rollback", on=UpdateRejected):
            self.slots.require_acceptable(manifest, digest)
        return manifest

    def _require_room(self, fetched_bytes: int, staged_bytes: int) -> None:
        """Check that the disk has room for the download and for a new slot beside the one that it replaces."""
        if fetched_bytes > MAX_RELEASE_BYTES:
            raise UpdateRejected(f"oversized: parts have {fetched_bytes} bytes; at most {MAX_RELEASE_BYTES} allowed")
        free = shutil.disk_usage(self.home).free
        if fetched_bytes + staged_bytes + SPARE_DISK_BYTES > free:
            raise StoreError(
                f"disk: {fetched_bytes} bytes must be fetched and {staged_bytes} copied, but only {free} are free"
            )

    async def _install_inbox(self, folder: Path) -> None:
        """Try a bundle from the inbox. A damaged one is ignored until it changes."""
        seen = get_versions(folder)
        try:
            bundle = await asyncio.to_thread(read_bundle, folder)
        except (UpdateRejected, OSError) as error:
            log.warning("event=inbox_damaged folder=%s reason=%r", folder, str(error))
            self._damaged[folder] = seen
            return
        data = (folder / MANIFEST).read_bytes()
        try:
            if self._parse_manifest(data, bundle.digest) is not None:
                self._introduction.examining = read_campaign(folder) > 0
                self._update_health()
                await self._examine_and_switch(data, None, folder)
        except UpdateRejected as error:
            self._record_refusal(bundle.digest, str(error))
        finally:
            self._introduction.examining = False
        self._update_health()

    async def _examine_and_switch(self, data: bytes, rollout: Rollout | None, folder: Path | None = None) -> None:
        """Stage a bundle, examine it and switch to it; all its parts are in the store or in `folder`."""
        digest = compute_digest(data)
        try:
            await asyncio.to_thread(self.slots.stage, data, folder)
        except UpdateRejected as error:
            self._record_refusal(digest, f"malformed: {error}")
            return
        found = await asyncio.to_thread(
            examine_bundle, self.slots.running, self.slots.staged, self.home, self.answering.limits, self.answering.how
        )
        fit = not found.reason
        signed = self._outcome.signed
        if rollout is not None:
            signed = (digest, *(known for known in signed if known != digest))[:REMEMBERED]
        campaign = 0 if folder is None else read_campaign(folder)
        if fit and (self._introduction.is_held(campaign) or (rollout is not None and not self._is_wanted(rollout))):
            return
        if campaign:
            self._introduction.record_examination(campaign, digest, found)
        self._save_outcome(
            Outcome(
                rollout=None if rollout is None else rollout.id,
                digest=digest,
                switched=fit,
                against=self.answering.runtime.digest,
                before=found.before,
                now=found.now,
                signed=signed,
            )
        )
        if not fit:
            self._record_refusal(digest, found.reason)
            return
        await asyncio.to_thread(self.slots.switch, None if rollout is None else rollout.id)
        try:
            await asyncio.to_thread(self.answering.swap, found.before)
        except FedgeError as error:  # the previous bundle stays in service
            log.warning("event=switch_failed bundle=%s reason=%r", digest, str(error))
        self._update_health()

    def _record_refusal(self, digest: str, reason: str) -> None:
        log.warning("event=bundle_refused bundle=%s reason=%r", digest, reason)
        self.slots.record_refusal(digest, reason)

    def _save_outcome(self, outcome: Outcome) -> None:
        write_atomically(self.home / "outcome.json", msgspec.json.encode(outcome))
        self._outcome = outcome

    # ------------------------------------------------------------------------------------------------- outwards

    def _update_health(self) -> None:
        health = self._make_health()
        said = self._health
        self._health = health
        if self._introduced is not None and _without_volatile(self._introduced) != _without_volatile(
            self._make_introduced()
        ):
            self._unsaid.set()
        if said is None or _without_volatile(said) != _without_volatile(health):
            log.info("event=health phase=%s release=%d reason=%r", health.phase, health.release, health.reason)
            self._unsaid.set()

    def _make_health(self) -> Health:
        rollout, runtime = self._rollout, self.answering.runtime
        situation = self._make_situation(rollout, None)
        phase, reason = compute_phase(situation)
        if self._fetching:
            phase, reason = Phase.FETCHING, ""
        concerned = rollout is not None and (situation.takes_part or situation.announced == situation.running)
        outcome = self._outcome
        signed = {*outcome.signed, situation.announced}
        by_rollout = runtime.digest in signed
        measured = outcome.digest == (situation.announced if concerned else situation.running)
        return Health(
            device_id=self.device_id,
            at=time.time(),
            phase=phase,
            release=runtime.manifest.release,
            bundle_digest=runtime.digest if by_rollout else None,
            rollout=rollout.id if concerned and rollout is not None else outcome.rollout,
            reason=(reason or self._distrusted)[:1000],
            before=outcome.before if measured and outcome.against in signed else None,
            now=outcome.now if measured and outcome.digest in signed else None,
            temperature_c=measure_temperature_c(),
            n_predictions=self.answering.n_predictions,
            n_failed=self.answering.n_failed,
            drift=(alarm := self.answering.alarm) is not None,
            drift_kind=None if alarm is None else alarm.kind,
            drift_release=0 if alarm is None else alarm.release,
            outliers=self.answering.outliers if by_rollout else None,
            at_work=self._at_work,
        )

    async def publish_health(self) -> None:
        """Publish the device's health when it changes and at least every `HEALTH_S` seconds, until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(HEALTH_S):
                        await self._unsaid.wait()
                except TimeoutError:
                    self._health = self._make_health()
                self._unsaid.clear()
                if self._health is not None:
                    await self._publish(self._health_topic, self._health, REVEALED_FIELDS[Health])
                await self._publish_introduced()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    gone = msgspec.structs.replace(self._make_health(), serving=False)
                    await self._publish(self._health_topic, gone, REVEALED_FIELDS[Health])

    async def _publish_introduced(self) -> None:
        """Say what became of the campaign's bundle if that is new, or if the coordinator waits for news."""
        introduced, said = self._make_introduced(), self._introduced
        news = said is None or _without_volatile(said) != _without_volatile(introduced)
        if self._introduction.waits and (news or self._introduction.is_under_way):
            self._introduced = introduced
            await self._publish(self._topics.make_agent_topic(self.device_id, "introduced"), introduced, INTRODUCED)

    def _make_introduced(self) -> Health:
        runtime, state = self.answering.runtime, self.slots.state
        return self._introduction.make_health(
            runtime.manifest.release,
            runtime.digest,
            state.refused.get(self._introduction.digest),
            on_trial=state.trial is not None,
            at=time.time(),
        )

    async def _publish(self, topic: str, health: Health, revealed: Revealed) -> None:
        try:
            told = without_figures(self.rules, self.home).strip(health, revealed)
            await self._transport.publish(topic, self._signed.seal(topic, encode_message(told)), retain=True)
        except WithheldError:
            log.info("event=withheld topic=%s", topic)
        except (TransportError, StoreError) as error:
            log.error("event=publish_refused topic=%s reason=%r", topic, str(error))  # noqa: TRY400

    def _make_goodbye(self) -> bytes:
        """Make the message of the last will, with what cannot have changed when the broker publishes it."""
        told = self._make_health()
        gone = Health(device_id=self.device_id, at=told.at, phase=told.phase, release=told.release, serving=False)
        return encode_message(without_figures(self.rules, self.home).strip(gone))


def _without_volatile(health: Health) -> Health:
    """Return a copy without the fields whose change alone deserves no message."""
    at_work = None if health.at_work is None or health.at_work.recent is None else health.at_work.recent
    told = None if at_work is None else AtWork(right=0, wrong=0, recent=NEWS * round(at_work / NEWS))
    return msgspec.structs.replace(
        health, at=0.0, temperature_c=None, n_predictions=0, n_failed=0, outliers=None, at_work=told
    )


def _read_json(path: Path, kind: type[K]) -> K | None:
    """Read a file of the home; the device answers even if its folder cannot be read or written."""
    with contextlib.suppress(StoreError):
        return read_kept(path, msgspec.json.Decoder(kind).decode)
    return None
