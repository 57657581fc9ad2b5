"""Files that survive a power cut, and the content-addressed folder of tensors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from fedge.errors import MALFORMED, ConfigError, DamagedError, ProtocolError, StoreError, raise_as
from fedge.system.text import suggest_nearest

log = logging.getLogger("fedge")

COPY_BYTES: Final = 1 << 20
"""Bytes that are read and written at a time."""
LEFT_S: Final = 24 * 3600.0
"""Age at which an unfinished folder counts as abandoned."""

DAMAGED: Final = (IsADirectoryError, NotADirectoryError, ValueError, *MALFORMED)
"""Errors raised by reading a damaged file, besides `errno.EIO`: its bytes are wrong, or the path is no plain file."""

T = TypeVar("T")
_durable = ContextVar("durable", default=True)


def give_to_owner(made: int | Path, folder: Path) -> None:
    """If we are root, give a new file or path to the owner of its folder, such as a service's user."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(made, owner.st_uid, owner.st_gid)


@contextmanager
def skip_fsync() -> Iterator[None]:
    """Leave out fsync inside the `with` block, for simulations, which start again after a power cut."""
    before = _durable.set(False)
    try:
        yield
    finally:
        _durable.reset(before)


def write_atomically(path: Path, *data: bytes | memoryview, public: bool = False) -> None:
    """Replace `path` by the pieces in `data`; after a crash it holds either the old or the new bytes, never a mixture.

    The file belongs to us or, if we are root, to the folder's owner, such as a service's user. A symbolic link at
    `path` is replaced, not followed.

    If `public`, everybody can read the file; otherwise only its owner can.

    Raises:
        StoreError: the disk is full or the folder cannot be written.
    """
    with _replace_file(path, public=public) as file:
        file.writelines(data)


@contextmanager
def _replace_file(path: Path, *, public: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends well, for `write_atomically`."""
    with raise_as(StoreError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".tmp-{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                give_to_owner(handle, path.parent)
                if public:
                    os.fchmod(handle, 0o644)
                yield file
                file.flush()
                if _durable.get():
                    os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync(path.parent)


def copy_durably(source: Path, target: Path) -> str:
    """Copy a plain file durably; returns the SHA-256 of the bytes written.

    Raises:
        OSError: the file cannot be read, or the copy cannot be written.
    """
    import hashlib

    if not stat.S_ISREG(source.lstat().st_mode):
        raise OSError(errno.EINVAL, "no plain file", str(source))
    hasher = hashlib.sha256()
    with source.open("rb") as old, target.open("wb") as new:
        while data := old.read(COPY_BYTES):
            hasher.update(data)
            new.write(data)
        new.flush()
        if _durable.get():
            os.fsync(new.fileno())
    return hasher.hexdigest()


def read_kept(path: Path, decode: Callable[[bytes], T]) -> T | None:
    """Read a file that can be made anew; return None if it is missing or was damaged and is now put aside.

    Raises:
        StoreError: the file cannot be read, or a damaged file cannot be moved.
    """
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGED) as error:
        if not isinstance(error, DAMAGED) and error.errno != errno.EIO:
            raise StoreError(f"cannot read {path}: {error}") from error
        put_aside(path, error)
        return None


def read_lasting(path: Path, decode: Callable[[bytes], T]) -> T | None:
    """Read a file that cannot be made anew; return None if it is missing.

    Raises:
        DamagedError: the file cannot be read or decoded.
    """
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def get_cache_folder(name: str) -> Path:
    """Return the user's cache folder $XDG_CACHE_HOME/fedge/NAME, or ~/.cache/fedge/NAME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedge" / name


def put_aside(path: Path, error: Exception) -> None:
    """Rename a damaged file or folder to NAME.damaged, replacing any earlier NAME.damaged.

    Raises:
        StoreError: the damaged file or folder cannot be moved.
    """
    aside = path.with_name(f"{path.name}.damaged")
    log.error("event=damaged file=%s kept=%s reason=%r", path, aside.name, str(error))
    try:
        if aside.is_dir():
            shutil.rmtree(aside)
        elif path.is_dir():
            aside.unlink(missing_ok=True)
        path.replace(aside)
    except OSError as failure:
        raise StoreError(f"{path} is damaged and cannot be moved: {failure}") from error


def get_version(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file is replaced, or None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def get_versions(source: Path) -> frozenset[tuple[Path, tuple[int, int, int] | None]]:
    """Return each file below a folder, or the file itself, with its `get_version`."""
    files = source.rglob("*") if source.is_dir() else [source]
    return frozenset((file, get_version(file)) for file in files)


def require_writable(path: Path) -> None:
    """Check that a result file can be written before the work begins.

    Raises:
        StoreError: the file's folder cannot be made or written, or `path` is a folder.
    """
    make_folder(path.parent)
    with raise_as(StoreError, f"cannot write {path}"):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        tempfile.TemporaryFile(dir=path.parent).close()


def require_there(path: Path, what: str) -> None:
    """Refuse a path at which nothing exists; `what` describes what was expected there.

    Raises:
        ConfigError: nothing exists at the path; the text gives the absolute path and the most similar name beside it.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        at = path.absolute()
        if not at.parent.is_dir():
            raise ConfigError(f"there is no {what} at {at}: not even the folder {at.parent} exists") from error
        hint = suggest_nearest(at.name, [each.name for each in at.parent.iterdir()])
        raise ConfigError(f"there is no {what} at {at}{hint}") from error
    except OSError:
        return  # reading it will say more


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, if missing. New folders get the same owner as files of `write_atomically`.

    Raises:
        StoreError: the folder cannot be made, or a file is in its place.
    """
    with raise_as(StoreError, f"cannot make folder {folder}"):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for made in reversed(missing):
            give_to_owner(made, made.parent)


class InUseError(ConfigError):
    """Another process uses the folder."""


@contextmanager
def lock_folder(folder: Path, taken: str | None) -> Iterator[None]:
    """Lock FOLDER/lock for this process; the kernel releases it however the process ends.

    The file gets the same owner as files of `write_atomically`. The folder is created if missing. `taken` is the error
    text if another process holds the lock; if None, wait until it is free.

    Raises:
        InUseError: another process holds the lock.
        StoreError: the folder cannot be made or written.
    """
    make_folder(folder)
    with raise_as(StoreError, f"cannot open {folder}"):
        # no other user may open it, since even a read-only handle can hold a lock
        file = os.fdopen(os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600), "w")
        give_to_owner(file.fileno(), folder)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if taken is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(taken) from None
        yield


def require_utf8(folder: Path) -> None:
    """Check that a folder's name is UTF-8, since ONNX Runtime can read no files in others.

    Raises:
        ConfigError: the name is not UTF-8.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{str(folder)!r} is not UTF-8, and ONNX Runtime reads nothing there: rename it") from error


def sync(path: Path) -> None:
    """Make a file's content durable or, for a folder, the renames and new files in it."""
    if not _durable.get():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def fill_folder(folder: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary folder to fill; it takes the place of `folder` durably when the `with` block ends well.

    Until then it is locked by `lock_for_reading`, so that `remove_unfinished` does not take it for a leftover.
    Leftovers of killed processes are removed after a day.

    If `replace`, whatever is at `folder` by then is replaced; otherwise only an empty folder is.

    Raises:
        FileExistsError: something at `folder` must not be replaced.
        OSError: the disk is full or broken.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in (*folder.parent.glob(".unfinished-*"), *folder.parent.glob(".replaced-*")):
        with contextlib.suppress(FileNotFoundError):  # another process is finishing it
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    try:
        with lock_for_reading(unfinished):
            yield unfinished
            sync(unfinished)
            old = _move_aside(folder) if replace and folder.exists() else None
            try:
                unfinished.rename(folder)
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder)) from error
                raise
            sync(folder.parent)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove leftovers of `fill_folder` by killed processes in a folder, but nothing that a process still fills."""
    for left in (*folder.glob(".unfinished-*"), *folder.glob(".replaced-*")):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), lock_exclusively(left):
            shutil.rmtree(left, ignore_errors=True)


def _move_aside(folder: Path) -> Path:
    """Move a folder that is to be removed, and return its new place."""
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".replaced-"))
    with lock_for_reading(old):
        folder.rename(old / "bundle")
    return old


@contextmanager
def _flock(folder: Path, how: int) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def lock_for_reading(folder: Path) -> AbstractContextManager[None]:
    """Protect a folder from `remove_unread` inside the `with` block; entering raises OSError if it does not exist."""
    return _flock(folder, fcntl.LOCK_SH)


def lock_exclusively(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder for one process inside the `with` block; entering raises BlockingIOError if it is in use.

    The lock writes nothing, and the kernel releases it however the process ends.
    """
    return _flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_unread(folder: Path) -> None:
    """Remove a folder; for readers it vanishes at once, even if we are killed meanwhile.

    Raises:
        OSError: somebody holds the folder by `lock_for_reading` (BlockingIOError), or the disk is broken.
    """
    with lock_exclusively(folder):
        old = _move_aside(folder)
    shutil.rmtree(old, ignore_errors=True)


class _Slots(msgspec.Struct, frozen=True):
    """The part of slots.json that `find_highest_release` reads."""

    highest_release: int = 0


def find_highest_release(home: Path) -> int:
    """Return the highest release that a device has had from any source, or 0 if it had none.

    HOME/bundles/N come from its agent; HOME/slots.json has the highest release ever in service
    (`deploy.updates.slots`).
    """
    numbers = [int(path.name) for path in (home / "bundles").glob("[0-9]*") if path.name.isdecimal()]
    with contextlib.suppress(OSError, *MALFORMED):  # the file's own reader reports what is wrong
        numbers.append(msgspec.json.decode((home / "slots.json").read_bytes(), type=_Slots).highest_release)
    return max(numbers, default=0)


class BlobFolder:
    """Blobs on disk, each named by its SHA-256. Safe to share between processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            if folder.is_symlink():  # the link's disk may be mounted later
                raise StoreError(f"{folder} points to {folder.readlink()}, and no folder is there") from error
            put_aside(folder, error)
            folder.mkdir()

    def get_path(self, digest: str) -> Path:
        """Return the blob's path, whether or not the blob exists."""
        return self._folder / digest

    def __contains__(self, digest: str) -> bool:
        return self.get_path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        return (p.name for p in self._folder.iterdir() if len(p.name) == 64)

    def put(self, *data: bytes | memoryview) -> str:
        """Store the pieces of a blob durably and return the blob's digest; storing a blob again has no effect.

        Raises:
            StoreError: the disk is full or the folder cannot be written.
        """
        digest = compute_digest(*data)
        self.put_as(digest, *data)
        return digest

    def put_as(self, digest: str, *data: bytes | memoryview) -> None:
        """Store bytes whose digest the caller has just computed.

        Raises:
            StoreError: the disk is full or the folder cannot be written.
        """
        if digest not in self:
            write_atomically(self.get_path(digest), *data)

    def put_as_made(self, digest: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Store a blob from an iterator of pieces; each piece is written before the next one is requested.

        Raises:
            ProtocolError: `digest` if the pieces are another blob; also whatever the iterator raises.
            StoreError: the disk is full or the folder cannot be written.
        """
        import hashlib

        hasher = hashlib.sha256()
        with _replace_file(self.get_path(digest)) as file:
            for piece in pieces:
                hasher.update(piece)
                file.write(piece)
            if hasher.hexdigest() != digest:
                raise ProtocolError("digest", f"the pieces make the blob {hasher.hexdigest()}, not {digest}")

    def get(self, digest: str) -> bytes:
        """Read a blob.

        Raises:
            StoreError: there is no such blob.
        """
        with raise_as(StoreError, f"blob {digest} cannot be read"):
            return self.get_path(digest).read_bytes()

    def remove(self, digest: str) -> None:
        """Delete a blob if it exists."""
        self.get_path(digest).unlink(missing_ok=True)


def compute_digest(*data: bytes | bytearray | memoryview) -> str:
    """Return the hexadecimal SHA-256 of these pieces of bytes, by which a blob is named."""
    import hashlib  # 3.5 MB of OpenSSL: import only when hashing

    hasher = hashlib.sha256()
    for piece in data:
        hasher.update(piece)
    return hasher.hexdigest()
