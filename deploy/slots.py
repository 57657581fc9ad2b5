"""Two slots for bundles, one of which answers: switching is one atomic write, and the last good bundle is always there.

    HOME/slot-a, slot-b      bundle folders, each with bytes of its own: damage to one file harms one of them
    HOME/slots.json          `State`: which slot answers, which one is good, what is on trial
    HOME/parts/<sha256>      what came over the wire for a bundle that is not staged yet

A new bundle is staged into the slot that does not answer, verified there, and switched to on trial. It becomes the good
one when it is confirmed; until then the other slot is left alone. Whatever is cut off whenever: `slots.json` is the old
one or the new one, and the slots that it names are whole, since a slot is written only while nothing names it.

Disks fail, too: a slot that is damaged gives way to the other one and is made whole from it (`Slots.mend`), and what is
damaged here is never taken for a bad release.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec
from msgspec import Struct

from fedge.bundle import MANIFEST, Bundle, Manifest, Part, decode, digest_in, holds, look, read
from fedge.errors import MALFORMED, StoreError, UpdateRejected
from fedge.files import (
    BlobFolder,
    InUseError,
    copy_durably,
    make_folder,
    reading,
    require_utf8,
    whole_folder,
    write_atomically,
)
from fedge.messages import Count, Digest

log = logging.getLogger("fedge.deploy")

MAX_STARTS: Final = 3
"""Processes that may run a bundle on trial; with the next one it has failed."""
MAX_REFUSED: Final = 100
"""Refused bundles that are remembered, the oldest forgotten first."""

Slot = Literal["a", "b"]


class Trial(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The running bundle has yet to prove itself. `starts`: processes that ran it, 0 until it answers."""

    rollout: str | None
    starts: Count = 0


class State(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of slots.json. `good` is not `running` exactly while something is on trial."""

    running: Slot | None = None
    good: Slot | None = None
    trial: Trial | None = None
    highest_release: Count = 0
    refused: dict[Digest, str] = {}


def slot_in(home: Path, slot: Slot) -> Path:
    """Folder of a slot; where fedge 0.1 had it as long as it could not be moved."""
    folder, before = home / f"slot-{slot}", home / "slots" / slot
    return before if before.is_dir() and not folder.exists() else folder


@contextmanager
def owned(home: Path) -> Iterator[Slots]:
    """The bundles of a device for this process alone; the kernel gives them back when it ends, however it ends.

    Raises:
        InUseError: another process owns them.
        ConfigError: the folder's name is no UTF-8.
        StoreError: the folder cannot be read or written.
    """
    require_utf8(home)
    make_folder(home)
    try:
        handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # a file for it might be lost, or read-only
    except OSError as error:
        raise StoreError(f"cannot open {home}: {error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(
                f"another process uses {home}: stop `fedge serve` or `fedge install` there first"
            ) from None
        yield Slots(home)
    finally:
        os.close(handle)


def state_of(home: Path) -> State:
    """The state as the process that owns the bundles has last written it.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return msgspec.json.decode((home / "slots.json").read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    except (OSError, *MALFORMED) as error:
        raise StoreError(f"cannot read {home / 'slots.json'}: {error}") from error


def newest_in_inbox(home: Path, above: int, known: Container[str], damaged: Container[Path] = ()) -> Path | None:
    """The folder in HOME/bundles with the highest number above this one whose bundle is neither known nor damaged."""
    bundles = home / "bundles"
    numbers = {int(path.name) for path in bundles.glob("[0-9]*") if path.name.isdecimal()}
    for number in sorted(numbers, reverse=True):
        folder = bundles / str(number)
        if number <= above:
            return None
        if folder in damaged:
            continue
        try:
            digest = digest_in(folder)
        except OSError:
            continue
        if digest not in known:
            return folder
    return None


class Slots:
    """The bundles of one device. One process at a time changes them: it has them from `owned`."""

    def __init__(self, home: Path) -> None:
        """Open the folder, or make it; what a crash left half done is removed where the disk may be written."""
        self._home = home
        self._file = home / "slots.json"
        with contextlib.suppress(OSError):  # who has to write there will say so
            home.mkdir(parents=True, exist_ok=True)
            self._tidy_up()
        self.state = self._load()

    def _tidy_up(self) -> None:
        for left in (*self._home.glob(".unfinished-*"), *self._home.glob(".replaced-*")):
            shutil.rmtree(left, ignore_errors=True)
        mine = [path for name in ("slots", "outcome", "root") for path in self._home.glob(f".tmp-{name}.json-*")]
        for left in (*mine, *(self._home / "parts").glob(".tmp-*"), *self._home.glob("slot-?/.tmp-*")):
            left.unlink(missing_ok=True)
        for slot in get_args(Slot):
            folder = self._home / f"slot-{slot}"
            if (before := self._folder(slot)) != folder:
                before.rename(folder)
        shutil.rmtree(self._home / "slots", ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def parts(self) -> BlobFolder:
        """Where what is fetched for a bundle lies until it is confirmed.

        Raises:
            OSError: the folder cannot be made.
        """
        return BlobFolder(self._home / "parts")

    @property
    def running(self) -> Path | None:
        """Folder of the bundle that answers; None before the first."""
        return self._path(self.state.running)

    @property
    def good(self) -> Path | None:
        """Folder of the last bundle that has proved itself; None before the first."""
        return self._path(self.state.good)

    @property
    def staged(self) -> Path:
        """Folder of the slot that does not answer; it holds the staged bundle, the last one, or nothing."""
        return self._folder(self._idle)

    def lacks(self, manifest: Manifest) -> list[tuple[str, int]]:
        """Digest and size of the graphs and the parts that are on the device nowhere whole, each once, in their order.

        All that is there is hashed; a damaged file in the store is removed, so that it can be fetched again.
        """
        missing: dict[str, int] = {}
        for name, part in manifest.files.items():
            if not any(holds(path, part) for path in self._sources(name, part)):
                with contextlib.suppress(OSError):
                    self.parts.remove(part.digest)
                missing[part.digest] = part.size_bytes
        return list(missing.items())

    def may_take(self, manifest: Manifest, digest: str) -> None:
        """See that a bundle is not one that was refused, nor older than what was run before.

        Raises:
            UpdateRejected: it is; the text says why.
        """
        if digest in self.state.refused:
            raise UpdateRejected(f"release {manifest.release} was refused before: {self.state.refused[digest]}")
        if manifest.release < self.state.highest_release:
            raise UpdateRejected(
                f"release {manifest.release} is older than {self.state.highest_release}, which was installed before"
            )

    # ------------------------------------------------------------------------------------------------- changing

    def boot(self) -> Path | None:
        """A process begins: the folder that it should load.

        A trial at which too many processes died is given up. Where that cannot be counted, the good bundle answers.
        """
        trial = self.state.trial
        if trial is not None:
            try:
                if trial.starts >= MAX_STARTS:
                    self.roll_back(f"{trial.starts} processes that ran it died")
                else:
                    self.started()
            except StoreError as error:
                log.error("event=trial_suspended reason=%r", str(error))  # noqa: TRY400 - the text is all
                good = self.state.good or self.state.running
                self.state = msgspec.structs.replace(self.state, running=good, good=good, trial=None)
        return self.running

    def started(self) -> None:
        """This process runs the bundle on trial."""
        trial = self.state.trial
        assert trial is not None
        self._save(msgspec.structs.replace(self.state, trial=msgspec.structs.replace(trial, starts=trial.starts + 1)))

    def stage(self, manifest: bytes, folder: Path | None = None) -> Bundle:
        """Build the idle slot from copies of what is on the device, and verify it. Nothing that answers is touched.

        Args:
            manifest: of the bundle.
            folder: where else its files may lie, beside the store and the slots.

        Raises:
            UpdateRejected: the manifest or a file that is as the manifest says is malformed.
            StoreError: a file is missing or damaged, a bundle is on trial, or the disk is full or broken.
        """
        if self.state.trial is not None:
            raise StoreError("a bundle is on trial: confirm it or roll it back first")
        return self._build(self._idle, manifest, folder)

    def switch(self, rollout: str | None = None) -> None:
        """Let the staged bundle answer, on trial.

        Raises:
            UpdateRejected: what lies in the slot is no bundle.
            StoreError: it cannot be written.
        """
        manifest, _ = look(self.staged)
        self._save(
            msgspec.structs.replace(
                self.state,
                running=self._idle,
                trial=Trial(rollout=rollout),
                highest_release=max(manifest.release, self.state.highest_release),
            )
        )

    def confirm(self) -> None:
        """The bundle on trial has proved itself; it is the good one from now on."""
        if self.state.trial is not None:
            self._save(msgspec.structs.replace(self.state, good=self.state.running, trial=None))
            self._sweep()

    def mend(self) -> None:
        """See that both slots are whole and share no bytes, unless one is on trial: what is damaged is copied anew.

        A file is taken from wherever it is whole; a slot that lacks one for good becomes a copy of the other.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self.state.trial is not None or self.running is None:
            return
        for slot in (self.state.running, self._idle):
            assert slot is not None
            if not _is_whole(self._folder(slot)) or _shares(self._folder(slot)):
                self._mend(slot)

    def roll_back(self, reason: str) -> None:
        """Give the bundle on trial up for the last good one, and remember it as refused.

        It is not refused where it is damaged: that is this disk's fault, and it may be fetched once more.
        """
        self._roll_back(reason, lasting=True)

    def _roll_back(self, reason: str, *, lasting: bool) -> None:
        if self.state.trial is None:
            return
        failed = self.running
        assert failed is not None
        refused: Mapping[str, str] = self.state.refused
        if _is_whole(failed):
            digest = digest_in(failed)
            log.warning("event=rolled_back bundle=%s reason=%r", digest, reason)
            refused = _remembered(refused, digest, reason)
        else:
            log.warning("event=damaged slot=%s reason=%r", failed, reason)
        self._save(
            msgspec.structs.replace(self.state, running=self.state.good, trial=None, refused=dict(refused)),
            lasting=lasting,
        )

    def go_back(self, reason: str, *, lasting: bool = True) -> Path:
        """Let the bundle before the running one answer, also after the running one was confirmed; its folder.

        Args:
            reason: why, for the log and for those who bring the bundle again.
            lasting: whether that must be written down; where it need not, it holds for this process at least.

        Raises:
            StoreError: there is no other bundle, or it is not whole, or it cannot be written down.
        """
        if self.running is None or (self.state.trial is not None and self.state.good is None):
            raise StoreError("there is no bundle to go back to")
        try:
            other = read(self.staged)
        except (UpdateRejected, OSError) as error:
            raise StoreError(f"there is no bundle to go back to: {error}") from error
        if self.state.trial is None:
            if _is_whole(self.running) and digest_in(self.running) == other.digest:
                raise StoreError("there is no bundle to go back to: both slots hold the same")
            if other.digest in self.state.refused:
                raise StoreError(f"the only bundle to go back to was refused: {self.state.refused[other.digest]}")
            self._save(msgspec.structs.replace(self.state, good=self._idle, trial=Trial(rollout=None)), lasting=lasting)
        self._roll_back(reason, lasting=lasting)
        folder = self.running
        assert folder is not None
        return folder

    def refuse(self, digest: str, reason: str) -> None:
        """Remember a bundle that is not to be tried again."""
        self._save(msgspec.structs.replace(self.state, refused=_remembered(self.state.refused, digest, reason)))

    # ------------------------------------------------------------------------------------------------- within

    @property
    def _idle(self) -> Slot:
        return "b" if self.state.running == "a" else "a"

    def _path(self, slot: Slot | None) -> Path | None:
        return None if slot is None else self._folder(slot)

    def _folder(self, slot: Slot) -> Path:
        return slot_in(self._home, slot)

    def _sources(self, name: str, part: Part, folder: Path | None = None) -> Iterator[Path]:
        """Where a file of a bundle may lie on this device."""
        if folder is not None:
            yield folder / name
        yield self._home / "parts" / part.digest
        for slot in get_args(Slot):
            yield self._folder(slot) / name

    def _build(self, slot: Slot, manifest: bytes, folder: Path | None = None) -> Bundle:
        """Replace a slot by a bundle, all of whose bytes are copied."""
        target = self._folder(slot)
        parsed = decode(manifest)
        try:
            with nullcontext() if folder is None else reading(folder), whole_folder(target) as unfinished:
                write_atomically(unfinished / MANIFEST, manifest)
                for name, part in parsed.files.items():
                    _copy(self._sources(name, part, folder), part, unfinished / name)
                bundle = read(unfinished, again=True)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error}") from error
        return replace(bundle, folder=target)

    def _mend(self, slot: Slot) -> None:
        """Build a slot anew, as what it was or else as the other one."""
        folder = self._folder(slot)
        other = self.running if slot == self._idle else self.staged
        assert other is not None
        try:
            self._build(slot, (folder / MANIFEST).read_bytes())
        except (UpdateRejected, StoreError, OSError) as error:
            try:
                self._build(slot, (other / MANIFEST).read_bytes())
            except (UpdateRejected, OSError) as lost:
                raise StoreError(f"{folder} cannot be mended: {error}") from lost
        log.warning("event=slot_mended slot=%s", folder)

    def _load(self) -> State:
        """The state on the disk; should it be lost or unreadable, one that runs the newest bundle that is whole."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=State)
        except (OSError, *MALFORMED) as error:
            reason = str(error)
        whole: dict[int, Slot] = {}
        for slot in get_args(Slot):
            with contextlib.suppress(UpdateRejected, OSError):
                whole.setdefault(read(self._folder(slot)).manifest.release, slot)
        if not whole:
            return State()
        log.error("event=state_lost file=%s reason=%r", self._file, reason)
        newest = max(whole)
        self.state = State()
        self._save(State(running=whole[newest], good=whole[newest], highest_release=newest), lasting=False)
        return self.state

    def _save(self, state: State, *, lasting: bool = True) -> None:
        """Write the state down; not `lasting`: where that fails, it is the state of this process all the same."""
        try:
            if self._file.is_dir():  # a damaged disk's; nobody else puts a folder there
                shutil.rmtree(self._file, ignore_errors=True)
            write_atomically(self._file, msgspec.json.format(msgspec.json.encode(state), indent=2))
        except StoreError as error:
            if lasting:
                raise
            log.error("event=state_not_kept reason=%r", str(error))  # noqa: TRY400 - the text is all
        self.state = state

    def _sweep(self) -> None:
        """Empty the store: what a slot needs lies in the slot, and the rest is of transfers that were given up."""
        for left in (self._home / "parts").glob("*"):
            with contextlib.suppress(OSError):
                left.unlink()


def _remembered(refused: Mapping[str, str], digest: str, reason: str) -> dict[str, str]:
    others = {known: why for known, why in refused.items() if known != digest}
    return dict(list({**others, digest: reason[:200]}.items())[-MAX_REFUSED:])


def _copy(sources: Iterable[Path], part: Part, target: Path) -> None:
    """Copy a file from the first place where it is whole.

    Raises:
        StoreError: there is none.
    """
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
        read(folder)
    except (UpdateRejected, OSError):
        return False
    return True


def _shares(folder: Path) -> bool:
    """Whether a file of a slot has a second name, as those of fedge 0.1 have: what is done to that is done to this."""
    return any(path.lstat().st_nlink > 1 for path in folder.iterdir())
