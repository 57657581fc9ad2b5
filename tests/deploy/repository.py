"""A signed repository in memory that can be made to lie in every way; what it sends is a dict of files by name."""

from datetime import UTC, datetime, timedelta

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from fedge.wire.messages import Announcement, encode_message
from fedge.wire.rollout import make_signed_bytes

TOP = (Root.type, Targets.type, Snapshot.type, Timestamp.type)
LATER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=30)
PAST = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)


class Simulator:
    """`files` is what a client is sent. The signed states are there to be changed; `publish` signs and sends them."""

    def __init__(self):
        self.root = Root(consistent_snapshot=True, expires=LATER)
        self.signers = {}
        for role in TOP:
            self.new_key(role)
        self.targets = Targets(expires=LATER)
        self.snapshot = Snapshot(expires=LATER)
        self.timestamp = Timestamp(expires=LATER)
        self.contents = {}
        self.files = {}
        self.sign_root()
        self.publish(bump=())

    def new_key(self, role):
        signer = CryptoSigner.generate_ed25519()
        self.root.add_key(signer.public_key, role)
        self.signers.setdefault(role, []).append(signer)
        return signer

    def drop_keys(self, role):
        for keyid in list(self.root.roles[role].keyids):
            self.root.revoke_key(keyid, role)
        return self.signers.pop(role)

    def signed(self, signed, signers=None):
        metadata = Metadata(signed)
        for signer in self.signers[signed.type] if signers is None else signers:
            metadata.sign(signer, append=True)
        return metadata.to_bytes()

    def sign_root(self, *others):
        """Sign and send the root as it is, also by others, such as the keys that it replaces."""
        self.files[f"{self.root.version}.root.json"] = self.signed(self.root, [*self.signers[Root.type], *others])

    def next_root(self, *others):
        self.root.version += 1
        self.sign_root(*others)

    def announce(self, rollout, federation, role="timestamp"):
        """A rollout as devices are told of it, signed by this role's keys."""
        data = encode_message(rollout)
        signatures = [signer.sign(make_signed_bytes(federation, data)) for signer in self.signers[role]]
        roots = {name: file for name, file in self.files.items() if name.endswith(".root.json")}
        return Announcement(rollout=data, signatures={s.keyid: s.signature for s in signatures}, roots=roots)

    def add(self, path, data):
        self.contents[path] = data
        self.targets.targets[path] = TargetFile.from_data(path, data, ["sha256"])

    def publish(self, bump=("targets", "snapshot", "timestamp"), hashes=False):
        """Raise the versions in `bump`, sign and send everything but the root."""
        for name in bump:
            getattr(self, name).version += 1
        targets = self.signed(self.targets)
        self.snapshot.meta["targets.json"] = _meta(self.targets.version, targets, hashes)
        snapshot = self.signed(self.snapshot)
        self.timestamp.snapshot_meta = _meta(self.snapshot.version, snapshot, hashes)
        self.files[f"{self.targets.version}.targets.json"] = targets
        self.files[f"{self.snapshot.version}.snapshot.json"] = snapshot
        self.files["timestamp.json"] = self.signed(self.timestamp)
        for path, data in self.contents.items():
            folder, _, name = path.rpartition("/")
            self.files[f"{folder}/{self.targets.targets[path].hashes['sha256']}.{name}"] = data

    def release(self, number, data=None):
        self.add(f"{number}/manifest.json", data or f"release {number}".encode())
        self.publish()


def _meta(version, data, hashes):
    return MetaFile.from_data(version, data, ["sha256"]) if hashes else MetaFile(version)
