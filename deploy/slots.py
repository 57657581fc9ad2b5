"""Two slots for bundles, one of which answers: switching is one atomic write, and the last good bundle is always there.

    HOME/parts/<sha256>      content store; every file of a bundle lies here once
    HOME/slots/a, b          bundle folders, hard links into the store
    HOME/slots.json          `State`: which slot answers, which one is good, what is on trial

A new bundle is staged into the slot that does not answer, verified there, and switched to on trial. It becomes the good
one when it is confirmed; until then the other slot is left alone. Whatever is cut off whenever: `slots.json` is the old
one or the new one, and the slots that it names are whole, since a slot is written only while nothing names it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from fedge.bundle import MANIFEST, Bundle, Manifest, decode, digest_in, look, read
from fedge.errors import StoreError, UpdateRejected
from fedge.files import BlobFolder, locked, make_folder, require_utf8, sync_folder, whole_folder, write_atomically
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


@contextmanager
def owned(home: Path) -> Iterator[Slots]:
    """The bundles of a device for this process alone; the kernel gives them back when it ends, however it ends.

    Raises:
        InUseError: another process owns them.
        ConfigError: the folder's name is no UTF-8.
        StoreError: the folder cannot be read or written.
    """
    require_utf8(home)
    with locked(home / "slots", f"another process uses {home}: stop `fedge serve` or `fedge install` there first"):
        yield Slots(home)


def state_of(home: Path) -> State:
    """The state as the process that owns the bundles has last written it.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return msgspec.json.decode((home / "slots.json").read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {home / 'slots.json'}: {error}") from error


def newest_in_inbox(home: Path, above: int, known: Container[str]) -> Path | None:
    """The folder in HOME/bundles with the highest number above this one whose bundle's digest is not known."""
    bundles = home / "bundles"
    numbers = {int(path.name) for path in bundles.glob("[0-9]*") if path.name.isdecimal()}
    for number in sorted(numbers, reverse=True):
        if number <= above:
            return None
        try:
            digest = digest_in(bundles / str(number))
        except OSError:
            continue
        if digest not in known:
            return bundles / str(number)
    return None


class Slots:
    """The bundles of one device. One process at a time changes them: it has them from `owned`."""

    def __init__(self, home: Path) -> None:
        """Open the folder, or make it; what a crash left half done is removed.

        Raises:
            StoreError: it cannot be read or written.
        """
        self._file = home / "slots.json"
        self._folder = home / "slots"
        make_folder(self._folder)
        self.parts = BlobFolder(home / "parts")
        for left in (*self._folder.glob(".unfinished-*"), *self._folder.glob(".replaced-*")):
            shutil.rmtree(left, ignore_errors=True)
        mine = [path for name in ("slots", "outcome", "root") for path in home.glob(f".tmp-{name}.json-*")]
        for left in (*mine, *(home / "parts").glob(".tmp-*")):
            left.unlink(missing_ok=True)
        self.state = self._load()

    # ------------------------------------------------------------------------------------------------- reading

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
        return self._folder / self._idle

    def lacks(self, manifest: Manifest) -> list[tuple[str, int]]:
        """Digest and size of the graphs and the parts that are not in the store, each once, in their order."""
        files = dict.fromkeys((part.digest, part.size_bytes) for part in manifest.files.values())
        return [(digest, size) for digest, size in files if digest not in self.parts]

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
        """A process begins: the folder that it should load. A trial at which too many processes died is given up."""
        trial = self.state.trial
        if trial is not None:
            if trial.starts >= MAX_STARTS:
                self.roll_back(f"{trial.starts} processes that ran it died")
            else:
                self.started()
        return self.running

    def started(self) -> None:
        """This process runs the bundle on trial."""
        trial = self.state.trial
        assert trial is not None
        self._save(msgspec.structs.replace(self.state, trial=msgspec.structs.replace(trial, starts=trial.starts + 1)))

    def stage(self, manifest: bytes) -> Bundle:
        """Build the idle slot from a manifest and the store, and verify it. Nothing that answers is touched.

        Raises:
            UpdateRejected: a part is missing or is not what the manifest says.
            StoreError: a bundle is on trial, or the disk is full or broken.
        """
        if self.state.trial is not None:
            raise StoreError("a bundle is on trial: confirm it or roll it back first")
        parsed = decode(manifest)
        try:
            with whole_folder(self.staged) as unfinished:
                write_atomically(unfinished / MANIFEST, manifest)
                for name, part in parsed.files.items():
                    self._link(part.digest, unfinished / name)
                bundle = read(unfinished)
        except OSError as error:
            raise StoreError(f"cannot write {self.staged}: {error}") from error
        return replace(bundle, folder=self.staged)

    def take_in(self, bundle: Bundle) -> bytes:
        """Copy the files of a verified bundle into the store (links where possible); its manifest, for `stage`.

        Raises:
            StoreError: the disk is full or broken.
        """
        for name, part in bundle.manifest.files.items():
            if part.digest not in self.parts:
                self._keep(bundle.folder / name, part.digest)
        return (bundle.folder / MANIFEST).read_bytes()

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

    def roll_back(self, reason: str) -> None:
        """Give the bundle on trial up for the last good one, and remember it as refused."""
        if self.state.trial is None:
            return
        failed = self.running
        assert failed is not None
        refused: Mapping[str, str] = self.state.refused
        try:
            digest = digest_in(failed)
        except OSError as error:  # it has lost its name, and with it what could be remembered
            log.warning("event=rolled_back slot=%s reason=%r error=%r", failed, reason, str(error))
        else:
            log.warning("event=rolled_back bundle=%s reason=%r", digest, reason)
            refused = _remembered(refused, digest, reason)
        self._save(msgspec.structs.replace(self.state, running=self.state.good, trial=None, refused=dict(refused)))

    def go_back(self, reason: str) -> Path:
        """Let the bundle before the running one answer, also after the running one was confirmed; its folder.

        Raises:
            StoreError: there is no other bundle, or it is not whole.
        """
        if self.state.trial is not None and self.state.good is None:
            raise StoreError("there is no bundle to go back to")
        try:
            other = read(self.staged)
        except (UpdateRejected, OSError) as error:
            raise StoreError(f"there is no bundle to go back to: {error}") from error
        if self.state.trial is None:
            if other.digest in self.state.refused:
                raise StoreError(f"the only bundle to go back to was refused: {self.state.refused[other.digest]}")
            self._save(msgspec.structs.replace(self.state, good=self._idle, trial=Trial(rollout=None)))
        self.roll_back(reason)
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
        return None if slot is None else self._folder / slot

    def _load(self) -> State:
        """The state on the disk; should it be unreadable, one that runs the newest bundle that is whole."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise StoreError(f"cannot read {self._file}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("event=state_lost file=%s reason=%r", self._file, str(error))  # noqa: TRY400 - the text is all
        whole: dict[int, Slot] = {}
        for slot in ("a", "b"):
            try:
                whole[read(self._folder / slot).manifest.release] = slot
            except UpdateRejected:
                continue
        if not whole:
            return State()
        newest = max(whole)
        state = State(running=whole[newest], good=whole[newest], highest_release=newest)
        self._save(state)
        return state

    def _save(self, state: State) -> None:
        write_atomically(self._file, msgspec.json.format(msgspec.json.encode(state), indent=2))
        self.state = state

    def _link(self, digest: str, target: Path) -> None:
        if digest not in self.parts:
            raise UpdateRejected(f"part {digest} is missing")
        _link_or_copy(self.parts.path(digest), target)

    def _keep(self, source: Path, digest: str) -> None:
        target = self.parts.path(digest)
        temporary = target.with_name(f".tmp-{digest}")
        try:
            _link_or_copy(source, temporary)
            temporary.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"cannot write {target}: {error}") from error

    def _sweep(self) -> None:
        """Remove from the store what neither slot names."""
        named: set[str] = set()
        for slot in ("a", "b"):
            try:
                manifest, _ = look(self._folder / slot)
            except (OSError, UpdateRejected):
                continue
            named |= {part.digest for part in manifest.files.values()}
        for digest in set(self.parts) - named:
            self.parts.remove(digest)
        for kind in ("part", "ranges"):  # of transfers that were given up
            for left in self.parts.path("").glob(f"*.{kind}"):
                left.unlink(missing_ok=True)


def _remembered(refused: Mapping[str, str], digest: str, reason: str) -> dict[str, str]:
    others = {known: why for known, why in refused.items() if known != digest}
    return dict(list({**others, digest: reason[:200]}.items())[-MAX_REFUSED:])


def _link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a durable copy on file systems that have none."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP}:
            raise
        write_atomically(target, source.read_bytes())
