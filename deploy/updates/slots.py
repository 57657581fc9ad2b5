"""Two bundle slots, one in service: switching is one atomic write, and the last good bundle is always kept.

    HOME/slot-a, slot-b      bundle folders without shared bytes: damage to one file harms only one of them
    HOME/slots.json          `State`: which slot is in service, which is good, what is on trial
    HOME/parts/<sha256>      received files of a bundle that is not staged yet

A new bundle is staged into the idle slot, verified there, and put into service on trial. Once confirmed, it is the good
bundle; until then the other slot is left alone. After any interruption, `slots.json` is either the old or the new
version. The slots that it names are intact, since a slot is written only while `slots.json` does not name it.

If the disk damages a slot, the other slot takes over, and the damaged one is repaired from it (`Slots.repair`). Damage
on this disk is never mistaken for a bad release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fedge.bundle.manifest import (
    MANIFEST,
    Bundle,
    Manifest,
    Part,
    compute_bundle_digest,
    decode_manifest,
    matches_part,
    read_bundle,
    read_manifest,
)
from fedge.errors import MALFORMED, StoreError, UpdateRejected, raise_as
from fedge.system.files import (
    BlobFolder,
    InUseError,
    copy_durably,
    fill_folder,
    lock_exclusively,
    lock_for_reading,
    make_folder,
    read_lasting,
    remove_unfinished,
    require_utf8,
    write_atomically,
)
from fedge.wire.messages import Count, Digest

log = logging.getLogger("fedge.deploy")

MAX_STARTS: Final = 3
"""Processes that may run a bundle on trial; if another one is needed, the bundle has failed."""
MAX_REFUSED: Final = 100
"""Most refused bundles that are remembered; the oldest is forgotten first."""

Slot = Literal["a", "b"]


class Trial(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The trial of the running bundle; `starts` counts the processes that ran it, 0 before it is in service."""

    rollout: str | None
    starts: Count = 0


class State(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of slots.json. `good` differs from `running` exactly while something is on trial."""

    running: Slot | None = None
    good: Slot | None = None
    trial: Trial | None = None
    highest_release: Count = 0
    refused: dict[Digest, str] = {}


def find_slot(home: Path, slot: Slot) -> Path:
    """Return a slot's folder, or where fedge 0.1 kept the slot if that folder could not be moved yet."""
    folder, before = home / f"slot-{slot}", home / "slots" / slot
    return before if before.is_dir() and not folder.exists() else folder


@contextmanager
def lock_slots(home: Path) -> Iterator[Slots]:
    """Lock a device's bundles for this process; the kernel releases the lock however the process ends.

    Raises:
        InUseError: another process has locked them.
        ConfigError: the folder's name is not UTF-8.
        StoreError: the folder cannot be read or written.
    """
    require_utf8(home)
    make_folder(home)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock_exclusively(home))  # the folder itself: a lock file might be lost or read-only
        except BlockingIOError:
            raise InUseError(
                f"another process uses {home}: stop `fedge serve` or `fedge install` there first"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot open {home}: {error}") from error
        yield Slots(home)


def read_state(home: Path) -> State:
    """Read the state last written by the process that owns the bundles.

    Raises:
        DamagedError: the file cannot be read.
    """
    return read_lasting(home / "slots.json", msgspec.json.Decoder(State).decode) or State()


def find_inbox_bundle(home: Path, above: int, known: Container[str], damaged: Container[Path] = ()) -> Path | None:
    """Return the highest-numbered folder HOME/bundles/N with N above a number, neither known nor damaged, or None."""
    bundles = home / "bundles"
    numbers = {int(path.name) for path in bundles.glob("[0-9]*") if path.name.isdecimal()}
    for number in sorted(numbers, reverse=True):
        folder = bundles / str(number)
        if number <= above:
            return None
        if folder in damaged:
            continue
        try:
            digest = compute_bundle_digest(folder)
        except OSError:
            continue
        if digest not in known:
            return folder
    return None


class Slots:
    """The bundles of one device. Only the process that holds them by `lock_slots` may change them."""

    def __init__(self, home: Path) -> None:
        """Open or create the folder; remove leftovers of a crash if the disk is writable."""
        self._home = home
        self._file = home / "slots.json"
        with contextlib.suppress(OSError):  # later writes report the error
            home.mkdir(parents=True, exist_ok=True)
            self._clean_up()
        self.state = self._load()

    def _clean_up(self) -> None:
        remove_unfinished(self._home)
        mine = [
            path for name in ("slots", "outcome", "root", "coverage") for path in self._home.glob(f".tmp-{name}.json-*")
        ]
        for left in (*mine, *(self._home / "parts").glob(".tmp-*"), *self._home.glob("slot-?/.tmp-*")):
            left.unlink(missing_ok=True)
        for slot in get_args(Slot):
            folder = self._home / f"slot-{slot}"
            if (before := self._get_folder(slot)) != folder:
                before.rename(folder)
        shutil.rmtree(self._home / "slots", ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def home(self) -> Path:
        """The device's folder."""
        return self._home

    @property
    def parts(self) -> BlobFolder:
        """The folder for a bundle's fetched files until it is confirmed.

        Raises:
            OSError: the folder cannot be made.
        """
        return BlobFolder(self._home / "parts")

    @property
    def running(self) -> Path | None:
        """Folder of the bundle in service; None before the first bundle."""
        return None if self.state.running is None else self._get_folder(self.state.running)

    @property
    def good(self) -> Path | None:
        """Folder of the last confirmed bundle; None before the first one."""
        return None if self.state.good is None else self._get_folder(self.state.good)

    @property
    def staged(self) -> Path:
        """Folder of the idle slot, which holds the staged bundle, the previous one, or nothing."""
        return self._get_folder(self._idle)

    def list_missing(self, manifest: Manifest) -> list[tuple[str, int]]:
        """Return digest and size of each file of a bundle that has no intact copy on this device, in order, each once.

        All copies are hashed; a damaged file in the store is removed, so that it can be fetched again.
        """
        missing: dict[str, int] = {}
        for name, part in manifest.files.items():
            if not any(matches_part(path, part) for path in self._iterate_sources(name, part)):
                with contextlib.suppress(OSError):
                    self.parts.remove(part.digest)
                missing[part.digest] = part.size_bytes
        return list(missing.items())

    def require_acceptable(self, manifest: Manifest, digest: str) -> None:
        """Refuse a bundle that was refused before or is older than one that ran.

        Raises:
            UpdateRejected: the bundle is refused; the text says why.
        """
        if digest in self.state.refused:
            raise UpdateRejected(f"release {manifest.release} was refused before: {self.state.refused[digest]}")
        if manifest.release < self.state.highest_release:
            raise UpdateRejected(
                f"release {manifest.release} is older than {self.state.highest_release}, which was installed before"
            )

    # ------------------------------------------------------------------------------------------------- changing

    def boot(self) -> Path | None:
        """Begin a process: return the bundle folder that it should load, or None before the first bundle.

        A trial during which too many processes died is given up. If the start cannot be recorded, the good bundle
        serves.
        """
        trial = self.state.trial
        if trial is not None:
            try:
                if trial.starts >= MAX_STARTS:
                    self.roll_back(f"{trial.starts} processes that ran it died")
                else:
                    self.record_start()
            except StoreError as error:
                log.error("event=trial_suspended reason=%r", str(error))  # noqa: TRY400 - the text is all
                good = self.state.good or self.state.running
                self.state = replace(self.state, running=good, good=good, trial=None)
        return self.running

    def record_start(self) -> None:
        """Record that this process runs the bundle on trial."""
        trial = self.state.trial
        assert trial is not None
        self._save(replace(self.state, trial=replace(trial, starts=trial.starts + 1)))

    def stage(self, manifest: bytes, folder: Path | None = None) -> Bundle:
        """Build the idle slot from copies of files on the device, and verify it. The bundle in service is not touched.

        `folder` is a further place to look for the files, besides the store and the slots.

        Raises:
            UpdateRejected: the manifest is malformed, or a file that matches the manifest is.
            StoreError: a file is missing or damaged, a bundle is on trial, or the disk is full or broken.
        """
        if self.state.trial is not None:
            raise StoreError("a bundle is on trial: confirm it or roll it back first")
        return self._write_slot(self._idle, manifest, folder)

    def switch(self, rollout: str | None = None) -> None:
        """Put the staged bundle into service, on trial.

        Raises:
            UpdateRejected: the idle slot holds no bundle.
            StoreError: slots.json cannot be written.
        """
        manifest, _ = read_manifest(self.staged)
        highest = max(manifest.release, self.state.highest_release)
        self._save(replace(self.state, running=self._idle, trial=Trial(rollout=rollout), highest_release=highest))

    def confirm(self) -> None:
        """Make the bundle on trial the good one."""
        if self.state.trial is not None:
            self._save(replace(self.state, good=self.state.running, trial=None))
            for left in (self._home / "parts").glob("*"):  # the slots have their own files
                with contextlib.suppress(OSError):
                    left.unlink()

    def repair(self) -> None:
        """Check that both slots are intact and share no bytes, and rebuild a slot that is not. Skipped during a trial.

        Intact files come from anywhere on the device. If no intact copy of a file exists, the slot becomes a copy of
        the other slot.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self.state.trial is not None or self.running is None:
            return
        for slot in (self.state.running, self._idle):
            assert slot is not None
            if not _is_whole(self._get_folder(slot)) or _has_hard_links(self._get_folder(slot)):
                self._repair_slot(slot)

    def roll_back(self, reason: str, *, lasting: bool = True) -> None:
        """Return from the bundle on trial to the last good one, and remember the former as refused.

        A damaged bundle is not remembered as refused: the damage is this disk's fault, and the bundle may be fetched
        again. `lasting` is as for `revert`.
        """
        if self.state.trial is None:
            return
        failed = self.running
        assert failed is not None
        refused = self.state.refused
        if _is_whole(failed):
            digest = compute_bundle_digest(failed)
            log.warning("event=rolled_back bundle=%s reason=%r", digest, reason)
            refused = _add_refusal(refused, digest, reason)
        else:
            log.warning("event=damaged slot=%s reason=%r", failed, reason)
        self._save(replace(self.state, running=self.state.good, trial=None, refused=refused), lasting=lasting)

    def revert(self, reason: str, *, lasting: bool = True) -> Path:
        """Put the previous bundle into service, even if the running one is confirmed; return the previous one's folder.

        Args:
            reason: why the running bundle is given up; logged, and reported if the bundle is to be installed again.
            lasting: whether to raise if the change cannot be written; if not, it holds at least for this process.

        Raises:
            StoreError: there is no intact previous bundle, it was refused, it equals the running one, or the change
                cannot be written.
        """
        if self.running is None or (self.state.trial is not None and self.state.good is None):
            raise StoreError("there is no bundle to go back to")
        with raise_as(StoreError, "there is no bundle to go back to", on=(UpdateRejected, OSError)):
            other = read_bundle(self.staged)
        if self.state.trial is None:
            if _is_whole(self.running) and compute_bundle_digest(self.running) == other.digest:
                raise StoreError("there is no bundle to go back to: both slots hold the same")
            if other.digest in self.state.refused:
                raise StoreError(f"the only bundle to go back to was refused: {self.state.refused[other.digest]}")
            self._save(replace(self.state, good=self._idle, trial=Trial(rollout=None)), lasting=lasting)
        self.roll_back(reason, lasting=lasting)
        folder = self.running
        assert folder is not None
        return folder

    def record_refusal(self, digest: str, reason: str) -> None:
        """Remember a bundle that must not be tried again."""
        self._save(replace(self.state, refused=_add_refusal(self.state.refused, digest, reason)))

    # ------------------------------------------------------------------------------------------------- within

    @property
    def _idle(self) -> Slot:
        return "b" if self.state.running == "a" else "a"

    def _get_folder(self, slot: Slot) -> Path:
        return find_slot(self._home, slot)

    def _iterate_sources(self, name: str, part: Part, folder: Path | None = None) -> Iterator[Path]:
        """Yield the paths on this device at which a bundle's file may lie."""
        if folder is not None:
            yield folder / name
        yield self._home / "parts" / part.digest
        for slot in get_args(Slot):
            yield self._get_folder(slot) / name

    def _write_slot(self, slot: Slot, manifest: bytes, folder: Path | None = None) -> Bundle:
        """Replace a slot with a bundle; all bytes are copied."""
        target = self._get_folder(slot)
        parsed = decode_manifest(manifest)
        try:
            with nullcontext() if folder is None else lock_for_reading(folder), fill_folder(target) as unfinished:
                write_atomically(unfinished / MANIFEST, manifest)
                for name, part in parsed.files.items():
                    _copy_part(self._iterate_sources(name, part, folder), part, unfinished / name)
                bundle = read_bundle(unfinished, again=True)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error}") from error
        return dataclasses.replace(bundle, folder=target)

    def _repair_slot(self, slot: Slot) -> None:
        """Rebuild a slot with its own bundle or, failing that, with the other slot's bundle."""
        folder = self._get_folder(slot)
        existed = folder.exists()
        other = self.running if slot == self._idle else self.staged
        assert other is not None
        try:
            self._write_slot(slot, (folder / MANIFEST).read_bytes())
        except (UpdateRejected, StoreError, OSError) as error:
            try:
                self._write_slot(slot, (other / MANIFEST).read_bytes())
            except (UpdateRejected, OSError) as lost:
                raise StoreError(f"{folder} cannot be repaired: {error}") from lost
        if existed:
            log.warning("event=slot_mended slot=%s", folder)
        else:
            log.info("event=slot_filled slot=%s", folder)

    def _load(self) -> State:
        """Load the state or, if it is lost or unreadable, make one that runs the newest intact bundle."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=State)
        except (OSError, *MALFORMED) as error:
            reason = str(error)
        whole: dict[int, Slot] = {}
        for slot in get_args(Slot):
            with contextlib.suppress(UpdateRejected, OSError):
                whole.setdefault(read_bundle(self._get_folder(slot)).manifest.release, slot)
        if not whole:
            return State()
        log.error("event=state_lost file=%s reason=%r", self._file, reason)
        newest = max(whole)
        self.state = State()
        self._save(State(running=whole[newest], good=whole[newest], highest_release=newest), lasting=False)
        return self.state

    def _save(self, state: State, *, lasting: bool = True) -> None:
        """Write the state. If writing fails, raise if `lasting`; otherwise the state holds for this process only."""
        try:
            if self._file.is_dir():  # left by a damaged disk
                shutil.rmtree(self._file, ignore_errors=True)
            write_atomically(self._file, msgspec.json.format(msgspec.json.encode(state), indent=2))
        except StoreError as error:
            if lasting:
                raise
            log.error("event=state_not_kept reason=%r", str(error))  # noqa: TRY400 - the text is all
        self.state = state


def _add_refusal(refused: dict[str, str], digest: str, reason: str) -> dict[str, str]:
    others = {known: why for known, why in refused.items() if known != digest}
    return dict([*others.items(), (digest, reason[:200])][-MAX_REFUSED:])


def _copy_part(sources: Iterable[Path], part: Part, target: Path) -> None:
    """Copy a file from the first intact source."""
    for source in sources:
        try:
            if source.lstat().st_size == part.size_bytes and copy_durably(source, target) == part.digest:
                return
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
                raise
            log.warning("event=not_copied file=%s reason=%r", source, str(error))
    raise StoreError(f"part {part.digest} is missing or damaged")


def _is_whole(folder: Path) -> bool:
    try:
        read_bundle(folder)
    except (UpdateRejected, OSError):
        return False
    return True


def _has_hard_links(folder: Path) -> bool:
    """Return whether a file of the slot has hard links, as in fedge 0.1; a change elsewhere would change it."""
    return any(path.lstat().st_nlink > 1 for path in folder.iterdir())
