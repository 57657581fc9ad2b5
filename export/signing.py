"""The signed repository of releases: the server side of The Update Framework, with python-tuf.

    REPO/keys/{role}.{key}.pem     private keys, mode 0600; those of root and targets can be kept offline
    REPO/metadata/N.root.json, timestamp.json, N.snapshot.json, N.targets.json
    REPO/targets/{release}/{sha256}.manifest.json    the manifests of the released bundles
    REPO/parts/{sha256}            skeletons and parts, each once

`root` lists the keys of each role, `targets` the genuine manifests, and `snapshot` the versions that belong together.
`timestamp`, which expires soonest, names the newest state. A device holds the first root and follows the chain.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from fedge.bundle.manifest import MANIFEST, encode_manifest, read_bundle
from fedge.errors import ConfigError, StoreError, raise_as
from fedge.system.files import BlobFolder, compute_digest, write_atomically
from fedge.wire.messages import MAX_ROOTS, Announcement, Rollout, encode_message
from fedge.wire.rollout import make_signed_bytes

ROLES: Final = (Root.type, Targets.type, Snapshot.type, Timestamp.type)
LIFETIMES: Final = {
    Root.type: timedelta(days=3650),
    Targets.type: timedelta(days=365),
    Snapshot.type: timedelta(days=90),
    Timestamp.type: timedelta(days=30),
}
"""Lifetime of a role's signature. A fleet that gets no newer one in that time refuses updates until `renew`."""

S = TypeVar("S", Root, Targets, Snapshot, Timestamp)


class Repository:
    """A repository on disk; every change is signed at once. One process at a time."""

    def __init__(self, folder: Path) -> None:
        """Open a repository.

        Raises:
            ConfigError: the folder holds no repository; make one with `make`.
        """
        self._folder = folder
        if not (folder / "metadata" / "1.root.json").is_file():
            raise ConfigError(f"no repository at {folder}: make one with `fedge release init {folder}`")
        self.parts = BlobFolder(folder / "parts")

    @classmethod
    def make(cls, folder: Path) -> Repository:
        """Make keys and an empty repository.

        Raises:
            ConfigError: the folder is not empty.
            StoreError: it cannot be written.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: name a new folder")
        root = Root(consistent_snapshot=True, expires=_compute_expiry(Root.type))
        for role in ROLES:
            root.add_key(_make_key(folder, role), role)
        _write(folder, "1.root.json", root, [_load_signer(folder, Root.type, root)])
        (folder / "parts").mkdir()
        repository = cls(folder)
        repository._publish(Targets(expires=_compute_expiry(Targets.type)))
        return repository

    # ------------------------------------------------------------------------------------------------- releasing

    def add(self, bundle: Path, name: str = "manifest", *, number: int | None = None) -> str:
        """Release a bundle: its manifest becomes a target, and its files are stored for devices to fetch.

        `name` distinguishes bundles of one release. `number` is the release's number; if None, the manifest's is used.

        Returns:
            The path of the target, such as "5/manifest.json".

        Raises:
            UpdateRejected: the bundle is not what its manifest says.
            ConfigError: the target exists with another content. Releases are never changed; use the next number.
            StoreError: the disk is full or broken.
        """
        manifest = read_bundle(bundle).manifest
        data = (bundle / MANIFEST).read_bytes()
        if number is not None and number != manifest.release:
            manifest = msgspec.structs.replace(manifest, release=number)
            data = encode_manifest(manifest)
        path = f"{manifest.release}/{name}.json"
        targets = self._load_current(Targets)
        found = TargetFile.from_data(path, data, ["sha256"])
        if path in targets.targets and targets.targets[path].hashes != found.hashes:
            raise ConfigError(f"{path} is released already with another content: count the release up")
        with raise_as(StoreError, f"cannot read {bundle}"):
            for file, part in manifest.files.items():
                if part.digest not in self.parts:
                    self.parts.put((bundle / file).read_bytes())
        write_atomically(self._get_target_path(path, compute_digest(data)), data)
        targets.targets[path] = found
        self._publish(targets)
        return path

    def renew(self) -> None:
        """Sign the newest state again before it expires. Run it well within the lifetimes.

        This needs the keys of snapshot and timestamp; it needs those of root and targets only after half of their
        lifetime.

        Raises:
            ConfigError: a required key is missing. Snapshot and timestamp are renewed all the same.
        """
        self._publish(None)
        root, targets = self._load_current(Root), self._load_current(Targets)
        if _is_old(targets):
            self._publish(targets)
        if _is_old(root):
            self._publish_root(root, old=root)

    def rotate(self, role: str) -> None:
        """Replace a role's key that was lost or leaked, or is old; devices learn the new key from the new root.

        A new root key must be signed by the old one; otherwise devices need a new root of trust installed by hand.

        Raises:
            ConfigError: there is no such role.
        """
        if role not in ROLES:
            raise ConfigError(f"there is no role {role!r}: choose one of {', '.join(ROLES)}")
        old = self._load_current(Root)
        new = self._load_current(Root)
        for keyid in old.roles[role].keyids:
            new.revoke_key(keyid, role)
        new.add_key(_make_key(self._folder, role), role)
        self._publish_root(new, old=old)
        self._publish(self._load_current(Targets) if role == Targets.type else None)

    def announce(self, rollout: Rollout, federation: str) -> Announcement:
        """Sign an announcement to a federation's devices.

        Raises:
            ConfigError: the timestamp key is missing.
        """
        root, data = self._load_current(Root), encode_message(rollout)
        signature = _load_signer(self._folder, Timestamp.type, root).sign(make_signed_bytes(federation, data))
        names = [f"{version}.root.json" for version in range(2, root.version + 1)][-MAX_ROOTS:]
        roots = {name: (self._folder / "metadata" / name).read_bytes() for name in names}
        return Announcement(rollout=data, signatures={signature.keyid: signature.signature}, roots=roots)

    # ------------------------------------------------------------------------------------------------- serving

    def read_root(self) -> bytes:
        """Read the first root, to be installed on devices."""
        return (self._folder / "metadata" / "1.root.json").read_bytes()

    def find_files(self, target: str) -> dict[str, Path]:
        """Return the files that a device needs to verify a target, by the names that `deploy.updates.trust` uses.

        Raises:
            ConfigError: there is no such target.
        """
        targets = self._load_current(Targets)
        if target not in targets.targets:
            known = ", ".join(self.list_targets()) or "none"
            raise ConfigError(f"no target {target}: there are {known}")
        metadata = self._folder / "metadata"
        digest = targets.targets[target].hashes["sha256"]
        path = self._get_target_path(target, digest)
        names = [f"{version}.root.json" for version in range(1, self._load_current(Root).version + 1)]
        names += [f"{self._load_current(Snapshot).version}.snapshot.json", f"{targets.version}.targets.json"]
        files = {name: metadata / name for name in (*names, "timestamp.json")}
        return files | {path.relative_to(self._folder / "targets").as_posix(): path}

    def list_targets(self) -> list[str]:
        """Return the paths of all releases, by ascending number."""
        return sorted(self._load_current(Targets).targets, key=lambda path: (_parse_number(path), path))

    def list_releases(self) -> list[int]:
        """Return the numbers of all releases."""
        return [_parse_number(path) for path in self.list_targets()]

    def get_expiries(self) -> dict[str, datetime]:
        """Return the expiry of each role's newest signature."""
        roles = (
            self._load_current(Root),
            self._load_current(Targets),
            self._load_current(Snapshot),
            self._load_current(Timestamp),
        )
        return {signed.type: signed.expires for signed in roles}

    # ------------------------------------------------------------------------------------------------- within

    def _load_current(self, kind: type[S]) -> S:
        """Load the newest published state of a role, to be read or changed."""
        folder = self._folder / "metadata"
        if kind is Root:
            version = max(int(path.name.split(".")[0]) for path in folder.glob("*.root.json"))
            path = folder / f"{version}.root.json"
        elif kind is Timestamp:
            path = folder / "timestamp.json"
        elif kind is Snapshot:
            path = folder / f"{self._load_current(Timestamp).snapshot_meta.version}.snapshot.json"
        else:
            path = folder / f"{self._load_current(Snapshot).meta['targets.json'].version}.targets.json"
        with raise_as(StoreError, f"cannot read {path}", on=(RepositoryError, OSError, ValueError)):
            metadata = Metadata[S].from_file(str(path))
        assert isinstance(metadata.signed, kind)
        return metadata.signed

    def _publish(self, targets: Targets | None) -> None:
        """Write targets (unless None), snapshot and timestamp. Devices see no change before the last is written."""
        root = self._load_current(Root)
        first = not (self._folder / "metadata" / "timestamp.json").exists()
        n = 1 if first else self._load_current(Timestamp).version + 1
        if targets is None:
            listed = self._load_current(Snapshot).meta["targets.json"].version
        else:
            listed = targets.version = n
            targets.expires = _compute_expiry(Targets.type)
        snapshot = Snapshot(version=n, expires=_compute_expiry(Snapshot.type), meta={"targets.json": MetaFile(listed)})
        timestamp = Timestamp(version=n, expires=_compute_expiry(Timestamp.type), snapshot_meta=MetaFile(n))
        if targets is not None:
            _write(self._folder, f"{n}.targets.json", targets, [_load_signer(self._folder, Targets.type, root)])
        _write(self._folder, f"{n}.snapshot.json", snapshot, [_load_signer(self._folder, Snapshot.type, root)])
        _write(self._folder, "timestamp.json", timestamp, [_load_signer(self._folder, Timestamp.type, root)])

    def _publish_root(self, new: Root, *, old: Root) -> None:
        """Publish a root signed by its own key and by the key of the old root, which devices know."""
        new.version, new.expires = old.version + 1, _compute_expiry(Root.type)
        signers = {root.roles[Root.type].keyids[0]: _load_signer(self._folder, Root.type, root) for root in (old, new)}
        _write(self._folder, f"{new.version}.root.json", new, list(signers.values()))

    def _get_target_path(self, path: str, digest: str) -> Path:
        folder, _, name = path.rpartition("/")
        return self._folder / "targets" / folder / f"{digest}.{name}"


def _parse_number(target: str) -> int:
    return int(target.partition("/")[0])


def _compute_expiry(role: str) -> datetime:
    return (datetime.now(UTC) + LIFETIMES[role]).replace(microsecond=0)


def _is_old(signed: Root | Targets) -> bool:
    return signed.expires - datetime.now(UTC) < LIFETIMES[signed.type] / 2


def _make_key(folder: Path, role: str) -> SSlibKey:
    signer = CryptoSigner.generate_ed25519()
    path = _get_key_path(folder, role, signer.public_key.keyid)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, signer.private_bytes)  # mode 0600, as all files written so
    return signer.public_key


def _get_key_path(folder: Path, role: str, keyid: str) -> Path:
    return folder / "keys" / f"{role}.{keyid[:16]}.pem"


def _load_signer(folder: Path, role: str, root: Root) -> CryptoSigner:
    """Load the signer that `root` names for a role; its private key must be in the folder."""
    (keyid,) = root.roles[role].keyids
    path = _get_key_path(folder, role, keyid)
    public = root.keys[keyid]
    assert isinstance(public, SSlibKey)
    try:
        return CryptoSigner(load_pem_private_key(path.read_bytes(), None), public)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key of role {role} is not at {path}; bring it and try again ({error})") from error


def _write(folder: Path, name: str, signed: Root | Targets | Snapshot | Timestamp, signers: list[CryptoSigner]) -> None:
    metadata: Metadata[Any] = Metadata(signed)
    for signer in signers:
        metadata.sign(signer, append=True)
    write_atomically(folder / "metadata" / name, metadata.to_bytes())
