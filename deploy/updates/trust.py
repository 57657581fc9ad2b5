"""The client side of The Update Framework, with python-tuf, which turns untrusted bytes into a trusted manifest.

Importing this module loads python-tuf, 10 MB of memory.

The device holds HOME/root.json, the root of trust that was installed with it, and HOME/trust, the newest metadata that
it has verified. Everything from the wire is untrusted. The signed roles decide which manifest is genuine, current and
not older than earlier manifests; the manifest's digests decide about the files that it names.

It refuses unsigned or forged metadata and too few or revoked keys (forgery); older versions than those seen (rollback);
expired metadata (freeze); files of different releases together (mix and match); more bytes than announced (endless
data); a target of another digest or size (alteration).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import msgspec
from msgspec import Struct
from securesystemslib.signer import Signature
from tuf.api import exceptions
from tuf.api.metadata import Metadata, Root, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from fedge.errors import MALFORMED, ConfigError, StoreError, UpdateRejected, raise_as
from fedge.system.files import make_folder, sync, write_atomically
from fedge.wire.messages import Announcement, Rollout, decode_message
from fedge.wire.rollout import MAX_METADATA_BYTES, make_signed_bytes

CLOCK_SLACK_S: Final = 3600.0
"""Seconds by which the clock may be behind the last verification; a reset clock cannot tell what has expired."""

_METADATA: Final = "fedge:metadata/"
_TARGETS: Final = "fedge:targets/"


class _StoredAnnouncement(Struct, frozen=True):
    """The latest accepted announcement, and the keys that signed it."""

    keyids: list[str]
    version: int


class Trust:
    """The device's verified metadata of the signed repository, for one process at a time."""

    def __init__(self, home: Path) -> None:
        """Open the folder of a device that has its root of trust.

        Raises:
            ConfigError: HOME/root.json is missing.
        """
        self._root = home / "root.json"
        self._folder = home / "trust"
        if not self._root.is_file():
            raise ConfigError(f"no root of trust: copy the repository's 1.root.json to {self._root}")

    def verify_manifest(self, files: Mapping[str, bytes], target: str) -> bytes:
        """Verify the newest metadata, and with them one target.

        Args:
            files: the received files by name: the metadata ("2.root.json", "timestamp.json", "3.snapshot.json",
                "3.targets.json") and the target ("5/<sha256>.manifest.json").
            target: path of the target, such as "5/manifest.json".

        Returns:
            The target's bytes, verified.

        Raises:
            UpdateRejected: the metadata or the target are not trusted; the text gives the reason. Metadata verified
                before stay in force.
            StoreError: the disk is full or broken.
        """
        self._require_clock()
        with self._translate_errors(), tempfile.TemporaryDirectory(prefix="fedge-target-") as folder:
            updater = self._make_updater(files, folder)
            updater.refresh()
            found = updater.get_targetinfo(target)
            if found is None:
                raise UpdateRejected(f"unknown: {target} is not among the signed targets")
            if found.length > MAX_METADATA_BYTES:
                raise UpdateRejected(f"endless-data: {target} has {found.length} bytes")
            return Path(updater.download_target(found)).read_bytes()

    def verify_rollout(self, announcement: Announcement, federation: str) -> Rollout:
        """Verify that an announcement is signed by the newest root's role `timestamp` and later than all before.

        Raises:
            UpdateRejected: the announcement is not trusted; the text gives the reason.
            ProtocolError: the signed content is not a rollout.
            StoreError: the disk is full or broken.
        """
        with self._translate_errors():
            with contextlib.suppress(exceptions.DownloadError):  # the other roles are missing; only roots are needed
                self._make_updater(announcement.roots).refresh()
            root = Metadata[Root].from_file(str(self._folder / "root.json")).signed
            signatures = {keyid: Signature(keyid, text) for keyid, text in announcement.signatures.items()}
            root.verify_delegate(Timestamp.type, make_signed_bytes(federation, announcement.rollout), signatures)
            rollout = decode_message(announcement.rollout, Rollout)
            self._require_newest(rollout.version, sorted(root.roles[Timestamp.type].keyids))
            return rollout

    def _require_newest(self, version: int, keyids: list[str]) -> None:
        """Refuse an announcement older than the latest one by these keys; replacing a stolen key resets the count."""
        path = self._folder / "announced.json"
        before = 0
        with contextlib.suppress(FileNotFoundError, *MALFORMED):  # a power cut may have left anything
            known = msgspec.json.decode(path.read_bytes(), type=_StoredAnnouncement)
            before = known.version if known.keyids == keyids else 0
        if version < before:
            raise UpdateRejected(f"rollback: announcement {version} is older than {before}, which came before")
        if version > before:
            write_atomically(path, msgspec.json.encode(_StoredAnnouncement(keyids, version)))

    def _make_updater(self, files: Mapping[str, bytes], targets: str | None = None) -> Updater:
        """Make a python-tuf client that reads the received files."""
        return Updater(
            str(self._folder),
            _METADATA,
            target_dir=targets,
            target_base_url=_TARGETS,
            fetcher=_LocalFetcher(files),
            config=UpdaterConfig(
                max_root_rotations=64,
                root_max_length=MAX_METADATA_BYTES,
                timestamp_max_length=16 << 10,
                snapshot_max_length=MAX_METADATA_BYTES,
                targets_max_length=MAX_METADATA_BYTES,
            ),
            bootstrap=self._root.read_bytes(),
        )

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Make python-tuf's writes durable, and turn its refusals into `UpdateRejected`."""
        make_folder(self._folder)
        self._remove_torn()
        try:
            try:
                yield
            finally:
                self._sync_files()
        except exceptions.RepositoryError as error:
            raise UpdateRejected(f"{_classify_error(error)}: {error}") from error
        except exceptions.DownloadError as error:
            name = "endless-data" if "exceeding" in str(error) else "missing"
            raise UpdateRejected(f"{name}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise UpdateRejected(f"malformed: {error}") from error
        except OSError as error:
            raise StoreError(f"cannot write {self._folder}: {error}") from error

    def _require_clock(self) -> None:
        """Refuse a clock behind the last verification, which would make expired metadata look fresh."""
        verified = self._folder / "timestamp.json"
        try:
            last = verified.stat().st_mtime
        except FileNotFoundError:
            return
        if time.time() < last - CLOCK_SLACK_S:
            shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(last))
            raise UpdateRejected(
                f"clock: it shows a time before the last verification ({shown} UTC): set it; where it is right now and "
                f"was ahead then, touch {verified}"
            )

    def _remove_torn(self) -> None:
        """Remove files that a power cut left empty or incomplete; they are fetched again."""
        for path in (*self._folder.glob("*.json"), *self._folder.glob("root_history/*.json")):
            try:
                json.loads(path.read_bytes())
            except (ValueError, RecursionError, OSError):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("tmp*"):
            path.unlink(missing_ok=True)

    def _sync_files(self) -> None:
        """Flush python-tuf's files, which it renames into place without fsync."""
        history = self._folder / "root_history"
        for path in (*self._folder.glob("*.json"), *history.glob("*.json"), history, self._folder):
            if path.exists():
                sync(path)


def install_root(home: Path, root: bytes) -> None:
    """Install a device's root of trust, replacing an existing one and deleting the metadata verified under that.

    Raises:
        ConfigError: the bytes are not root metadata signed by its own keys.
        StoreError: the disk is full or broken.
    """
    with raise_as(ConfigError, "this is not a root of trust", on=(exceptions.RepositoryError, ValueError)):
        metadata = Metadata[Root].from_bytes(root)
        genuine = isinstance(metadata.signed, Root)
        if genuine:
            metadata.signed.verify_delegate(Root.type, metadata.signed_bytes, metadata.signatures)
    if not genuine:
        raise ConfigError("this is not a root of trust but other metadata: take 1.root.json")
    shutil.rmtree(home / "trust", ignore_errors=True)
    write_atomically(home / "root.json", root)


class _LocalFetcher(FetcherInterface):
    """A fetcher that serves only the received files."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = unquote(url.removeprefix(_METADATA).removeprefix(_TARGETS))
        if name not in self._files:
            raise exceptions.DownloadHTTPError(f"{name} was not sent", 404)
        return iter((self._files[name],))


def _classify_error(error: exceptions.RepositoryError) -> str:
    """Return one word that names an error in logs and reports."""
    match error:
        case exceptions.ExpiredMetadataError():
            return "expired"
        case exceptions.UnsignedMetadataError():
            return "forged"
        case exceptions.LengthOrHashMismatchError():
            return "altered"
        case exceptions.BadVersionNumberError():
            return "rollback"
        case _:
            return "malformed"
