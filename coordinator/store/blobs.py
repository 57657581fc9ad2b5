"""Storage of a coordinator's tensors: its folder, or a bucket shared by processes on several machines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Final

from fedge.errors import ConfigError, StoreError
from fedge.system.files import BlobFolder, compute_digest, lock_folder, sync

GIVEN_UP_S: Final = 60.0
"""Time without an answer, retries included, after which the bucket counts as a broken disk."""


class Blobs(BlobFolder):
    """The durable blobs in a folder, safe to share between processes."""

    def get_received(self) -> BlobFolder:
        """Return the folder in which the dispatcher receives blobs before it takes them."""
        return self

    def take(self, received: Path) -> None:
        """Store a blob that is already on this disk and matches its file name.

        Raises:
            FileNotFoundError: the file no longer exists.
            StoreError: the blob cannot be stored.
        """
        target = self.get_path(received.name)
        if received != target:
            os.utime(received)  # so that a blob checked long after it came counts as young
            received.replace(target)
            sync(target.parent)

    def fetch(self, digest: str) -> Path | None:
        """Return the file of a blob, fetched if need be; None if there is no such blob."""
        return self.get_path(digest) if digest in self else None

    def fetch_all(self) -> int:
        """Fetch the files of all blobs; return their number."""
        return sum(1 for _ in self)

    def send_all(self) -> None:
        """Send all blobs whose files are here to where they are stored."""

    def drop_copies(self, wanted: Collection[str]) -> None:
        """Drop the local copies of blobs stored elsewhere, except these."""

    def remove_others(self, digests: Collection[str], *, spare_s: float = 0.0) -> None:
        """Delete all other blobs, stored or received, except those younger than `spare_s`."""
        for folder in {self.get_path(""), self.get_received().get_path("")}:
            for path in list(folder.iterdir()):
                if path.name.partition(".")[0] not in digests:
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - path.stat().st_mtime >= spare_s:
                            path.unlink()


class _Bucket(Blobs):
    """A bucket of blobs; blobs in the local folder are in the bucket, too, and need not be fetched.

    Credentials come from the environment, as for AWS tools (AWS_ACCESS_KEY_ID and so on).

    Args:
        folder: the folder of local copies.
        url: s3://BUCKET/FOLDER.
        keep: whether stored blobs stay in the folder.

    Raises:
        ConfigError: obstore is not installed, or this is not the address of a bucket.
    """

    def __init__(self, folder: Path, url: str, *, keep: bool) -> None:
        super().__init__(folder)
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise ConfigError("tensors in a bucket need fedge[s3]: pip install 'fedge[s3]'") from error
        if not url.startswith("s3://") or not url.removeprefix("s3://").strip("/"):
            raise ConfigError("the address of the tensors must be s3://BUCKET/FOLDER; without one it is HOME/blobs")
        self._url, self._keep = url, keep
        self._failures = BaseError, OSError, ValueError
        self._api = obstore
        with self._convert_errors():
            self._bucket = S3Store.from_url(url, retry_config={"retry_timeout": timedelta(seconds=GIVEN_UP_S)})

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            raise StoreError(f"{self._url} cannot be read or written: {str(error).splitlines()[0]}") from error

    def get_received(self) -> BlobFolder:
        return BlobFolder(self.get_path("").with_name("received"))

    def put_as(self, digest: str, *data: bytes | memoryview) -> None:
        if digest not in self:
            with self._convert_errors():
                self._api.put(self._bucket, digest, b"".join(data))
            if self._keep:
                super().put_as(digest, *data)

    def take(self, received: Path) -> None:
        with received.open("rb") as file, self._convert_errors():
            self._api.put(self._bucket, received.name, file)
        if self._keep:
            super().take(received)

    def get(self, digest: str) -> bytes:
        if digest in self:
            return super().get(digest)
        if (data := self._read(digest)) is None:
            raise StoreError(f"{self._url} holds no blob {digest}")
        if self._keep:
            super().put_as(digest, data)
        return data

    def _read(self, digest: str) -> bytes | None:
        with self._convert_errors():
            try:
                data = bytes(self._api.get(self._bucket, digest).bytes())
            except FileNotFoundError:
                return None
        if compute_digest(data) != digest:
            raise StoreError(f"{self._url}/{digest} holds other bytes than were stored there")
        return data

    def fetch_all(self) -> int:
        with self._convert_errors():
            there = [one["path"] for some in self._api.list(self._bucket) for one in some]
        for digest in there:
            self.fetch(digest)
        return len(there)

    def send_all(self) -> None:
        for digest in self:
            self.take(self.get_path(digest))

    def fetch(self, digest: str) -> Path | None:
        if digest not in self:
            if (data := self._read(digest)) is None:
                return None
            super().put_as(digest, data)
        return self.get_path(digest)

    def remove_others(self, digests: Collection[str], *, spare_s: float = 0.0) -> None:
        super().remove_others(digests, spare_s=spare_s)
        with self._convert_errors():
            there = [one for some in self._api.list(self._bucket) for one in some]
            if not there:
                return
            spared = max(one["last_modified"] for one in there) - timedelta(seconds=spare_s)  # its clock, not ours
            old = [one["path"] for one in there if one["path"] not in digests and one["last_modified"] <= spared]
            self._api.delete(self._bucket, old)

    def drop_copies(self, wanted: Collection[str]) -> None:
        super().remove_others(wanted)


def open_blobs(home: Path, url: str | None, *, dispatcher: bool) -> Blobs:
    """Open HOME/blobs, or the bucket at `url`; other processes than the dispatcher keep copies in HOME/models."""
    if url is None:
        return Blobs(home / "blobs")
    return _Bucket(home / ("blobs" if dispatcher else "models"), url, keep=dispatcher)


def prevent_deletion(home: Path, taken: str | None = None) -> AbstractContextManager[None]:
    """Prevent the deletion of tensors within this context. `taken`: as in `lock_folder`."""
    return lock_folder(home / "backup", taken)
