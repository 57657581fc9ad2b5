"""The cases of tuf-conformance that do not concern delegations, by their names there, and power cuts.

Each asserts what the device trusts afterwards: a refused state leaves the one before in force.
"""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata

from deploy.updates.trust import Trust, install_root
from fedge.errors import ConfigError, UpdateRejected
from fedge.wire.messages import Announcement, Rollout, RolloutState, encode_message
from fedge.wire.rollout import MAX_METADATA_BYTES

from ..power import in_a_process_cut_off_at
from ..repository import PAST, Simulator

pytestmark = pytest.mark.torch_free


@pytest.fixture
def server():
    simulator = Simulator()
    simulator.release(1)
    return simulator


@pytest.fixture
def home(tmp_path, server):
    install_root(tmp_path, server.files["1.root.json"])
    return tmp_path


def versions(home):
    """What the device trusts now: version by role."""
    found = {}
    for role in ("root", "timestamp", "snapshot", "targets"):
        path = home / "trust" / f"{role}.json"
        if path.exists():
            found[role] = json.loads(path.read_bytes())["signed"]["version"]
    return found


def get(home, server, target="1/manifest.json"):
    return Trust(home).verify_manifest(server.files, target)


def refused(home, server, name, target="1/manifest.json", *, changes=False):
    """The state is refused for this reason; what the device trusts stays as it was unless `changes`."""
    before = versions(home)
    with pytest.raises(UpdateRejected, match=f"^{name}: "):
        get(home, server, target)
    if not changes:
        assert versions(home) == before


# ------------------------------------------------------------------------------------------------------ test_basic


def test_basic_refresh_trusted_data(home, server):
    assert get(home, server) == b"release 1"
    assert versions(home) == {"root": 1, "timestamp": 2, "snapshot": 2, "targets": 2}


def test_basic_refresh_requests(home, server):
    get(home, server)
    needed = {"timestamp.json"} | {name for name in server.files if name.startswith("1/")}
    assert Trust(home).verify_manifest({name: server.files[name] for name in needed}, "1/manifest.json") == b"release 1"


def test_implicit_refresh(home, server):
    refused(home, server, "unknown", "nonexistent artifact", changes=True)
    assert versions(home) == {"root": 1, "timestamp": 2, "snapshot": 2, "targets": 2}


def test_invalid_initial_root(tmp_path, server):
    for junk in (b"", b"{}", b"[", server.files["timestamp.json"], b'{"signed": {}, "signatures": []}'):
        with pytest.raises(ConfigError, match="not a root of trust"):
            install_root(tmp_path, junk)
    with pytest.raises(ConfigError, match=r"1\.root\.json"):
        Trust(tmp_path)


def test_unsigned_initial_root(tmp_path, server):
    with pytest.raises(ConfigError, match="not a root of trust"):
        install_root(tmp_path, server.signed(server.root, []))


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
def test_unsigned_metadata(home, server, role):
    get(home, server)
    server.signers[role] = []
    server.release(2)
    refused(home, server, "forged", "2/manifest.json", changes=role != "timestamp")
    assert versions(home)[role] == 2


def test_new_targets_version_mismatch(home, server):
    get(home, server)
    server.add("2/manifest.json", b"release 2")
    server.targets.version += 1
    server.files["3.targets.json"] = server.signed(server.targets)  # the snapshot does not name it
    refused(home, server, "unknown", "2/manifest.json")


def test_new_snapshot_version_mismatch(home, server):
    server.snapshot.version += 1
    server.files["2.snapshot.json"] = server.signed(server.snapshot)
    refused(home, server, "rollback", changes=True)
    assert versions(home) == {"root": 1, "timestamp": 2}


@pytest.mark.parametrize("role", ["root", "snapshot", "targets"])
def test_url_and_metadata_version_mismatch(home, server, role):
    get(home, server)
    server.release(2)
    if role == "root":
        server.files["2.root.json"] = server.files["1.root.json"]
    else:
        server.files[f"3.{role}.json"] = server.files[f"2.{role}.json"]
    refused(home, server, "rollback", "2/manifest.json", changes=True)
    assert versions(home).get(role) in {1, 2}


def test_timestamp_content_changes(home, server):
    get(home, server)
    server.add("2/manifest.json", b"release 2")
    server.publish(bump=("targets", "snapshot"))  # the timestamp keeps its number
    refused(home, server, "unknown", "2/manifest.json")


def test_basic_metadata_hash_support(home, server):
    server.publish(hashes=True)
    assert get(home, server) == b"release 1"


@pytest.mark.parametrize("role", ["snapshot", "targets"])
def test_snapshot_and_targets_hash_mismatch(home, server, role):
    get(home, server)
    server.publish(hashes=True)
    name = f"3.{role}.json"
    server.files[name] = server.files[name].replace(b'"_type"', b' "_type"')
    refused(home, server, "endless-data|altered", changes=True)
    assert versions(home)[role] == 2


def test_metadata_bytes_match(home, server):
    server.files["timestamp.json"] = json.dumps(json.loads(server.files["timestamp.json"]), indent=7).encode()
    get(home, server)
    assert (home / "trust" / "timestamp.json").read_bytes() == server.files["timestamp.json"]


def test_custom_fields(home, server):
    server.timestamp.unrecognized_fields["x"] = {"y": 1}
    server.release(2)
    assert get(home, server, "2/manifest.json") == b"release 2"


@pytest.mark.parametrize("name", ["timestamp.json", "3.snapshot.json", "3.targets.json"])
def test_timestamp_snapshot_targets_404(home, server, name):
    get(home, server)
    server.release(2)
    del server.files[name]
    refused(home, server, "missing", "2/manifest.json", changes=True)


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
def test_incorrect_metadata_type(home, server, role):
    get(home, server)
    server.release(2)
    name = "timestamp.json" if role == "timestamp" else f"3.{role}.json"
    server.files[name] = server.signed(server.root, server.signers[role])
    refused(home, server, "malformed", "2/manifest.json", changes=True)
    assert versions(home)[role] == 2


# ------------------------------------------------------------------------------------------------- test_expiration


def test_root_expired(home, server):
    get(home, server)
    server.root.expires = PAST
    server.next_root()
    server.release(2)
    refused(home, server, "expired", "2/manifest.json", changes=True)
    assert versions(home) == {"root": 2, "timestamp": 2, "snapshot": 2, "targets": 2}


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
def test_timestamp_snapshot_targets_expired(home, server, role):
    get(home, server)
    getattr(server, role).expires = PAST
    server.release(2)
    refused(home, server, "expired", "2/manifest.json", changes=True)
    assert versions(home)[role] == 2


def test_expired_local_root(home, server):
    server.root.expires = PAST
    server.next_root()
    server.root.expires = server.targets.expires
    server.next_root()
    assert get(home, server) == b"release 1"
    assert versions(home)["root"] == 3


def test_expired_local_timestamp(home, server):
    get(home, server)
    path = home / "trust" / "timestamp.json"
    server.timestamp.expires = PAST
    path.write_bytes(server.signed(server.timestamp))
    server.timestamp.expires = server.targets.expires
    server.release(2)
    assert get(home, server, "2/manifest.json") == b"release 2"


# --------------------------------------------------------------------------------------------- test_file_download


def test_repository_substitutes_target_file(home, server):
    server.release(2)
    first, second = (next(n for n in server.files if n.startswith(f"{k}/")) for k in (1, 2))
    server.files[first], server.files[second] = server.files[second], server.files[first]
    refused(home, server, "altered", "1/manifest.json", changes=True)


def test_multiple_changes_to_target(home, server):
    assert get(home, server) == b"release 1"
    name = next(n for n in server.files if n.startswith("1/"))
    server.files[name] = b"RELEASE 1"
    refused(home, server, "altered")
    server.files[name] = b"release 1"
    assert get(home, server) == b"release 1"


def test_endless_data(home, server):
    get(home, server)
    name = next(n for n in server.files if n.startswith("1/"))
    server.files[name] = b"release 1" * 10_000
    refused(home, server, "endless-data")
    server.files["timestamp.json"] += b" " * MAX_METADATA_BYTES
    refused(home, server, "endless-data")


def test_download_with_unknown_hash_algorithm(home, server):
    server.targets.targets["1/manifest.json"].hashes = {"sha999": "ab"}
    server.files["3.targets.json"] = _bumped(server, "targets")
    server.files["3.snapshot.json"] = _bumped(server, "snapshot")
    server.timestamp.snapshot_meta.version = 3
    server.files["timestamp.json"] = _bumped(server, "timestamp")
    server.files["1/ab.manifest.json"] = b"release 1"
    refused(home, server, "altered|malformed", changes=True)


def _bumped(server, role):
    signed = getattr(server, role)
    signed.version += 1
    if role == "snapshot":
        signed.meta["targets.json"].version = server.targets.version
    return server.signed(signed)


def test_a_target_that_nobody_signed(home, server):
    refused(home, server, "unknown", "7/manifest.json", changes=True)


# ------------------------------------------------------------------------------------------------------- test_keys


def test_snapshot_does_not_meet_threshold(home, server):
    get(home, server)
    server.new_key("snapshot")
    server.root.roles["snapshot"].threshold = 2
    server.next_root()
    server.signers["snapshot"].pop()
    server.release(2)
    refused(home, server, "forged", "2/manifest.json", changes=True)
    assert versions(home)["snapshot"] == 2


def test_snapshot_has_too_few_keys(home, server):
    get(home, server)
    server.root.roles["snapshot"].threshold = 2
    server.next_root()
    server.release(2)
    refused(home, server, "forged", "2/manifest.json", changes=True)


def test_duplicate_keys_root(home, server):
    """One key named often is one key."""
    get(home, server)
    signer = server.new_key("snapshot")
    for _ in range(9):
        server.root.add_key(signer.public_key, "snapshot")
    server.root.roles["snapshot"].threshold = 6
    server.next_root()
    server.release(2)
    refused(home, server, "forged", "2/manifest.json", changes=True)
    assert versions(home)["snapshot"] == 2


def test_duplicate_sig_keyids(home, server):
    get(home, server)
    server.new_key("timestamp")
    server.root.roles["timestamp"].threshold = 2
    server.next_root()
    server.release(2)
    message = json.loads(server.files["timestamp.json"])
    message["signatures"] = [message["signatures"][0]] * 2
    server.files["timestamp.json"] = json.dumps(message).encode()
    refused(home, server, "malformed|forged", "2/manifest.json", changes=True)
    assert versions(home)["timestamp"] == 2


@pytest.mark.parametrize("field", ["keytype", "scheme"])
def test_keytype_and_scheme(tmp_path, server, field):
    root = json.loads(server.files["1.root.json"])
    for key in root["signed"]["keys"].values():
        key[field] = "nonsense"
    with pytest.raises(ConfigError, match="not a root of trust"):
        install_root(tmp_path, json.dumps(root).encode())


def test_invalid_sig_in_valid_metadata(home, server):
    message = json.loads(server.files["timestamp.json"])
    message["signatures"].append({"keyid": "ab" * 32, "sig": "00" * 64})  # of nobody we know: it does no harm
    server.files["timestamp.json"] = json.dumps(message).encode()
    assert get(home, server) == b"release 1"


# --------------------------------------------------------------------------------------------------- test_rollback


def test_new_timestamp_version_rollback(home, server):
    old = dict(server.files)
    server.release(2)
    get(home, server, "2/manifest.json")
    server.files = old
    refused(home, server, "rollback")


def test_simple_snapshot_rollback(home, server):
    server.release(2)
    get(home, server, "2/manifest.json")
    server.snapshot.version -= 1
    server.files["3.snapshot.json"] = server.signed(server.snapshot)
    assert get(home, server, "2/manifest.json") == b"release 2"  # it has the one that the timestamp names
    assert versions(home)["snapshot"] == 3


@pytest.mark.parametrize("hashes", [False, True])
def test_snapshot_rollback(home, server, hashes):
    server.add("2/manifest.json", b"release 2")
    server.publish(hashes=hashes)
    get(home, server, "2/manifest.json")
    server.snapshot.version = 1
    server.publish(bump=("timestamp",), hashes=hashes)
    refused(home, server, "rollback", "2/manifest.json")


@pytest.mark.parametrize("hashes", [False, True])
def test_targets_rollback(home, server, hashes):
    server.add("2/manifest.json", b"release 2")
    server.publish(hashes=hashes)
    get(home, server, "2/manifest.json")
    server.targets.version = 1
    server.publish(bump=("snapshot", "timestamp"), hashes=hashes)
    refused(home, server, "rollback", "2/manifest.json", changes=True)
    assert versions(home)["targets"] == 3


def test_targets_role_removal(home, server):
    get(home, server)
    server.publish()
    meta = server.snapshot.meta.pop("targets.json")
    server.files["3.snapshot.json"] = server.signed(server.snapshot)
    assert meta is not None
    refused(home, server, "malformed", changes=True)
    assert versions(home)["snapshot"] == 2


@pytest.mark.parametrize("role", ["targets", "snapshot", "timestamp"])
def test_targets_snapshot_timestamp_fast_forward_recovery(home, server, role):
    get(home, server)
    getattr(server, role).version = 99_999  # whoever had the key
    server.publish(bump=tuple(r for r in ("targets", "snapshot", "timestamp") if r != role))
    get(home, server)
    assert versions(home)[role] == 99_999

    for changed in ("snapshot", "timestamp") if role != "timestamp" else ("timestamp",):
        server.drop_keys(changed)
        server.new_key(changed)
    server.next_root()
    getattr(server, role).version = 4
    server.publish(bump=tuple(r for r in ("targets", "snapshot", "timestamp") if r != role))
    get(home, server)
    assert versions(home)[role] == 4


def test_mix_and_match(home, server):
    """Files of different releases, each genuine, do not belong together."""
    server.publish(hashes=True)
    get(home, server)
    old = server.files["3.targets.json"]
    server.add("2/manifest.json", b"release 2")
    server.publish(hashes=True)
    server.files["4.targets.json"] = old
    refused(home, server, "altered|rollback|endless-data", "2/manifest.json", changes=True)
    assert versions(home)["targets"] == 3


# -------------------------------------------------------------------------------------- test_updater_key_rotations


FIVE = [0, 1, 2, 3, 4]
ONE_OTHER = [0, 1, 3, 4, 5]
FIVE_OTHERS = [5, 6, 7, 8, 9]
ROOTS = {  # of each root its keys, how many must sign, and who does; whether the last one is believed
    "1-of-1": ([([1], 1, [1]), ([2], 1, [2, 1]), ([2], 1, [2])], True),
    "1-of-1, unused signatures": ([([1], 1, [3, 1, 4]), ([2], 1, [3, 2, 1, 4]), ([2], 1, [3, 2, 4])], True),
    "1-of-1, not signed with old key": ([([1], 1, [1]), ([2], 1, [2, 3, 4])], False),
    "1-of-1, not signed with new key": ([([1], 1, [1]), ([2], 1, [1, 3, 4])], False),
    "3-of-5, different key combos": ([(FIVE, 3, sigs) for sigs in ([0, 2, 4], [0, 4, 1], [0, 1, 3])], True),
    "3-of-5, one key rotated": ([(FIVE, 3, [0, 2, 4]), (ONE_OTHER, 3, [0, 4, 1])], True),
    "3-of-5, one key, with a step between": (
        [(FIVE, 3, [0, 2, 4]), (ONE_OTHER, 3, [0, 2, 4, 5]), (ONE_OTHER, 3, [0, 4, 5])],
        True,
    ),
    "3-of-5, all keys, with a step between": (
        [(FIVE, 3, [0, 2, 4]), (FIVE_OTHERS, 3, [0, 2, 4, 5, 6, 7]), (FIVE_OTHERS, 3, [5, 6, 7])],
        True,
    ),
    "3-of-5, not signed with 3 new keys": ([(FIVE, 3, [0, 2, 4]), (ONE_OTHER, 3, [0, 2, 4])], False),
    "3-of-5, not signed with 3 old keys": ([(FIVE, 3, [0, 2, 4]), (ONE_OTHER, 3, [0, 4, 5])], False),
    "threshold up": ([([1, 2, 3], 1, [1]), ([1, 2, 3], 2, [1, 2])], True),
    "threshold up, new one not reached": ([([1, 2, 3], 1, [1]), ([1, 2, 3], 2, [2])], False),
    "threshold and keys up": ([([1], 1, [1]), ([1, 2], 2, [1, 2])], True),
    "threshold down": ([([1, 2, 3], 2, [1, 2]), ([1, 2, 3], 1, [1, 2]), ([1, 2, 3], 1, [1])], True),
    "threshold down, old one not reached": ([([1, 2, 3], 2, [1, 2]), ([1, 2, 3], 1, [1])], False),
}


def given_keys(server, role, signers, keys, threshold, sigs):
    """Who may sign for a role from the next root on, and who does."""
    server.root.roles[role].keyids.clear()
    server.root.roles[role].threshold = threshold
    for key in keys:
        server.root.add_key(signers[key].public_key, role)
    server.signers[role] = [signers[key] for key in sigs]


@pytest.fixture(scope="module")
def signers():
    return [CryptoSigner.generate_ed25519() for _ in range(10)]


@pytest.mark.parametrize("case", ROOTS)
def test_root_rotation(tmp_path, server, signers, case):
    roots, believed = ROOTS[case]
    for version, root in enumerate(roots, 1):
        given_keys(server, "root", signers, *root)
        server.root.version = version
        server.sign_root()
    install_root(tmp_path, server.files["1.root.json"])

    if believed:
        assert get(tmp_path, server) == b"release 1"
    else:
        refused(tmp_path, server, "forged", changes=True)
    assert versions(tmp_path)["root"] == len(roots) - (not believed)


def test_root_rotation_that_the_old_key_has_not_signed(home, server):
    get(home, server)
    server.drop_keys("root")
    server.new_key("root")
    server.next_root()
    refused(home, server, "forged")


def test_root_rotation_by_a_key_that_was_revoked(home, server):
    old = server.drop_keys("root")
    server.new_key("root")
    server.next_root(*old)
    get(home, server)
    server.signers["root"] = old
    server.next_root()
    refused(home, server, "forged")


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
@pytest.mark.parametrize(
    ("keys", "threshold", "sigs", "believed"),
    [
        ([2], 1, [2], True),
        ([1], 1, [3, 1, 4], True),
        ([2], 1, [1, 3, 4], False),
        (ONE_OTHER, 3, [0, 2, 4], False),
        (ONE_OTHER, 3, [0, 4], False),
        *((FIVE, 3, sigs, True) for sigs in ([0, 2, 4], [0, 4, 1], [0, 1, 3], [1, 2, 3], [2, 3, 4])),
    ],
)
def test_non_root_rotations(home, server, signers, role, keys, threshold, sigs, believed):
    get(home, server)
    given_keys(server, role, signers, keys, threshold, sigs)
    server.next_root()
    server.release(2)

    if believed:
        assert get(home, server, "2/manifest.json") == b"release 2"
    else:
        refused(home, server, "forged", "2/manifest.json", changes=True)
    assert versions(home)[role] == 2 + believed


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
def test_a_key_that_was_replaced_counts_no_more(home, server, role):
    get(home, server)
    old = server.drop_keys(role)
    server.new_key(role)
    server.next_root()
    server.release(2)
    assert get(home, server, "2/manifest.json") == b"release 2"

    server.signers[role] = old  # whoever has the old key
    server.release(3)
    refused(home, server, "forged", "3/manifest.json", changes=True)
    assert versions(home)[role] == 3


# -------------------------------------------------------------------------------------------------- beyond the list


@pytest.mark.parametrize("name", ["timestamp.json", "snapshot.json", "targets.json", "root_history/1.root.json"])
@pytest.mark.parametrize("damage", [b"", b'{"signed": {"_ty'])
def test_a_power_cut_may_empty_any_file(home, server, name, damage):
    get(home, server)
    (home / "trust" / name).write_bytes(damage)
    server.release(2)

    assert get(home, server, "2/manifest.json") == b"release 2"
    assert versions(home) == {"root": 1, "timestamp": 3, "snapshot": 3, "targets": 3}


def test_everything_is_on_the_disk_when_the_manifest_is_handed_out(home, server, forced):
    get(home, server)

    trust = home / "trust"
    assert forced.has(trust, *trust.rglob("*.json"))


def test_a_power_cut_while_another_root_is_installed_leaves_one_of_the_two(home, server, tmp_path):
    get(home, server)
    other = Simulator()
    other.release(1, b"theirs")
    change, seen = 0, set()
    while True:
        copy = shutil.copytree(home, tmp_path / f"copy{change}", ignore=shutil.ignore_patterns("copy*"))
        was_cut = in_a_process_cut_off_at(change, lambda: install_root(copy, other.files["1.root.json"]))  # noqa: B023
        theirs = (copy / "root.json").read_bytes() == other.files["1.root.json"]
        seen.add(theirs)
        mine, stranger = (other, server) if theirs else (server, other)
        refused(copy, stranger, "forged", changes=True)
        assert get(copy, mine) == (b"theirs" if theirs else b"release 1")
        if not was_cut:
            break
        change += 1
    assert theirs
    assert seen == {False, True}


# ------------------------------------------------------------------------------------------------ announcements


def rollout(version=1, state=RolloutState.RUNNING):
    return Rollout(
        id="r", state=state, target="1/manifest.json", release=1, share=1.0, metadata={}, version=version
    )  # fmt: skip


def told(home, announcement, federation="shop"):
    return Trust(home).verify_rollout(announcement, federation)


def not_believed(home, announcement, reason, federation="shop"):
    before = {path: path.read_bytes() for path in (home / "trust").rglob("*.json")}
    with pytest.raises(UpdateRejected, match=f"^{reason}: "):
        told(home, announcement, federation)
    assert before.items() <= {path: path.read_bytes() for path in (home / "trust").rglob("*.json")}.items()


def test_an_announcement_of_the_timestamps_key_is_believed(home, server):
    """By a device that has verified nothing before, and by one that has."""
    assert told(home, server.announce(rollout(5), "shop")) == rollout(5)
    get(home, server)
    assert told(home, server.announce(rollout(6, RolloutState.ABORTED), "shop")).state is RolloutState.ABORTED
    assert told(home, server.announce(rollout(6), "shop")) == rollout(6), "the same one, as after a reconnection"


def test_one_that_is_not_signed_by_it_is_forged(home, server):
    get(home, server)
    genuine = server.announce(rollout(), "shop")
    (keyid,) = genuine.signatures
    for forged in (
        replace(genuine, signatures={}),
        replace(genuine, signatures={keyid: "no hex"}),
        replace(genuine, signatures={keyid: "00" * 64}),
        replace(genuine, rollout=encode_message(rollout(state=RolloutState.ABORTED))),
        server.announce(rollout(), "shop", role="snapshot"),
        Simulator().announce(rollout(), "shop"),
        server.announce(rollout(), "factory"),
        Announcement(rollout=server.files["timestamp.json"], signatures=genuine.signatures),
    ):
        not_believed(home, forged, "forged")
    assert not (home / "trust" / "announced.json").exists()
    assert told(home, genuine) == rollout()


def test_one_that_is_older_than_the_newest_is_a_replay(home, server):
    old = server.announce(rollout(7), "shop")
    told(home, old)
    told(home, server.announce(rollout(9, RolloutState.DONE), "shop"))
    not_believed(home, old, "rollback")
    not_believed(home, server.announce(rollout(8, RolloutState.ABORTED), "shop"), "rollback")


def test_what_a_thief_counted_up_to_is_forgotten_with_the_key(home, server):
    told(home, server.announce(rollout(2**53), "shop"))
    not_believed(home, server.announce(rollout(8), "shop"), "rollback")
    server.drop_keys("timestamp")
    server.new_key("timestamp")
    server.next_root()
    assert told(home, server.announce(rollout(8), "shop")) == rollout(8)
    not_believed(home, server.announce(rollout(7), "shop"), "rollback")


@pytest.mark.parametrize("role", ["timestamp", "root"])
def test_a_device_that_was_off_follows_the_roots_of_an_announcement_to_its_key(home, server, role):
    before = server.announce(rollout(1), "shop")
    told(home, before)
    for _ in range(3):
        old = server.drop_keys(role)
        server.new_key(role)
        server.next_root(*(old if role == "root" else ()))
    after = server.announce(rollout(2), "shop")
    if role == "timestamp":
        not_believed(home, replace(after, roots={}), "forged")
    assert told(home, after) == rollout(2)
    assert versions(home)["root"] == 4
    if role == "timestamp":
        not_believed(home, replace(before, roots={}), "forged")


def test_roots_of_somebody_else_lead_nowhere(home, server):
    thief = Simulator()
    thief.next_root()
    not_believed(home, thief.announce(rollout(), "shop"), "forged")
    assert told(home, server.announce(rollout(), "shop")) == rollout()


def test_cut_off_wherever_it_is_an_announcement_is_believed_again(home, server, tmp_path):
    told(home, server.announce(rollout(1), "shop"))
    old = server.drop_keys("timestamp")
    assert old
    server.new_key("timestamp")
    server.next_root()
    change = 0
    while True:
        copy = shutil.copytree(home, tmp_path / f"copy{change}", symlinks=True, ignore=shutil.ignore_patterns("copy*"))
        was_cut = in_a_process_cut_off_at(change, lambda: told(copy, server.announce(rollout(2), "shop")))  # noqa: B023
        assert told(copy, server.announce(rollout(2), "shop")) == rollout(2)
        not_believed(copy, server.announce(rollout(1), "shop"), "rollback")
        if not was_cut:
            break
        change += 1
    assert change > 3


def test_a_clock_that_was_lost_cannot_tell_what_has_expired(home, server):
    get(home, server)
    ahead = time.time() + 7200
    os.utime(home / "trust" / "timestamp.json", (ahead, ahead))
    refused(home, server, "clock")


def test_a_clock_that_was_ahead_is_forgiven_by_what_the_reason_says(home, server):
    get(home, server)
    ahead = time.time() + 5 * 86400
    os.utime(home / "trust" / "timestamp.json", (ahead, ahead))
    server.release(2)
    with pytest.raises(UpdateRejected, match=r"^clock: .* touch ") as caught:
        get(home, server, "2/manifest.json")

    Path(str(caught.value).rpartition("touch ")[2]).touch()

    assert get(home, server, "2/manifest.json") == b"release 2"


@pytest.mark.parametrize("junk", [b"", b"\xff" * 100, b"[" * 100_000, b'{"signed": 1, "signatures": {}}', b"null"])
@pytest.mark.parametrize("name", ["timestamp.json", "3.snapshot.json", "3.targets.json", "2.root.json"])
def test_junk_is_refused_and_changes_nothing_that_is_trusted(home, server, name, junk):
    get(home, server)
    server.release(2)
    server.files[name] = junk
    with pytest.raises(UpdateRejected):
        get(home, server, "2/manifest.json")
    role = name.split(".")[-2]
    assert versions(home)[role] in {1, 2}
    assert get_again(home, server, name) == b"release 2"


def get_again(home, server, name):
    """Once the junk is gone, everything goes on."""
    if name == "2.root.json":
        del server.files[name]
    else:
        server.publish(bump=("targets", "snapshot", "timestamp"))
    return get(home, server, "2/manifest.json")


def test_another_repository_is_another_trust(home, server):
    get(home, server)
    other = Simulator()
    other.release(1, b"forged")
    refused(home, other, "forged")


def test_a_new_root_of_trust_forgets_the_old(home, server):
    get(home, server)
    other = Simulator()
    other.release(1, b"theirs")

    install_root(home, other.files["1.root.json"])

    assert get(home, other) == b"theirs"
    refused(home, server, "forged|rollback")


def test_metadata_are_what_the_library_reads(server):
    assert Metadata.from_bytes(server.files["timestamp.json"]).signed.version == 2
