"""What the repository signs the device's side accepts, through rotations, renewals and writes that were cut off."""

import json
import shutil
import stat

import pytest

from deploy.updates.trust import Trust, install_root
from export.signing import ROLES, Repository
from fedge.errors import ConfigError, UpdateRejected
from fedge.wire.messages import MAX_ROOTS, Rollout, encode_message
from tests.deploy.bundles import digest, other_gate, variant
from tests.support.clock import Clock


@pytest.fixture
def repository(tmp_path):
    return Repository.make(tmp_path / "repo")


@pytest.fixture
def bundle(tmp_path):
    return variant(tmp_path / "bundle", release=1)


@pytest.fixture
def home(tmp_path, repository):
    install_root(tmp_path / "home", repository.read_root())
    return tmp_path / "home"


def received(repository, target):
    return {name: path.read_bytes() for name, path in repository.find_files(target).items()}


def trusted(home, repository, target):
    return Trust(home).verify_manifest(received(repository, target), target)


def test_a_released_bundle_is_trusted(home, repository, bundle):
    target = repository.add(bundle)

    assert target == "1/manifest.json"
    assert trusted(home, repository, target) == (bundle / "manifest.json").read_bytes()
    assert len(set(repository.parts)) == len({p.name for p in bundle.iterdir()}) - 1


def test_releases_are_added_and_equal_parts_kept_once(tmp_path, home, repository, bundle):
    first = repository.add(bundle)
    n_parts = len(set(repository.parts))
    second = repository.add(variant(tmp_path / "second", release=2, gate=other_gate))

    assert repository.list_targets() == [first, second]
    assert len(set(repository.parts)) == n_parts + 1
    assert trusted(home, repository, first) == (bundle / "manifest.json").read_bytes()


def test_a_release_is_never_changed(tmp_path, repository, bundle):
    repository.add(bundle)
    assert repository.add(bundle) == "1/manifest.json"

    with pytest.raises(ConfigError, match="count the release up"):
        repository.add(variant(tmp_path / "other", release=1, gate=other_gate))


@pytest.mark.parametrize("role", ROLES)
def test_a_key_is_rotated_and_devices_follow(home, repository, bundle, role):
    target = repository.add(bundle)
    trusted(home, repository, target)

    repository.rotate(role)
    repository.rotate(role)
    repository.renew()

    assert trusted(home, repository, target)
    assert json.loads((home / "trust" / "root.json").read_bytes())["signed"]["version"] == 3


def test_a_key_that_was_replaced_signs_nothing_any_more(tmp_path, home, repository, bundle):
    target = repository.add(bundle)
    thief = tmp_path / "thief"
    shutil.copytree(tmp_path / "repo", thief)
    repository.rotate("targets")
    assert trusted(home, repository, target)

    stolen = Repository(thief)
    for release in range(2, 6):
        forged = stolen.add(variant(tmp_path / f"forged{release}", release=release))
    files = received(stolen, forged) | {"2.root.json": received(repository, target)["2.root.json"]}
    with pytest.raises(UpdateRejected, match=r"^forged: "):
        Trust(home).verify_manifest(files, forged)


def test_without_the_key_nothing_is_signed(tmp_path, repository, bundle):
    for key in (tmp_path / "repo" / "keys").glob("targets.*"):
        key.unlink()

    with pytest.raises(ConfigError, match="the key of role targets"):
        repository.add(bundle)

    assert Repository(tmp_path / "repo").list_targets() == []


def test_renewing_needs_no_key_that_is_kept_off_line(tmp_path, home, repository, bundle):
    target = repository.add(bundle)
    for role in ("root", "targets"):
        for key in (tmp_path / "repo" / "keys").glob(f"{role}.*"):
            key.unlink()

    repository.renew()

    assert trusted(home, repository, target)
    assert json.loads((home / "trust" / "timestamp.json").read_bytes())["signed"]["version"] == 3
    assert json.loads((home / "trust" / "targets.json").read_bytes())["signed"]["version"] == 2


def test_what_is_half_over_is_signed_again_and_asks_for_its_key(tmp_path, repository, bundle, monkeypatch):
    repository.add(bundle)
    clock = Clock(monkeypatch)
    clock.advance(days=200)  # of 365
    repository.renew()
    assert json.loads((tmp_path / "repo" / "metadata" / "4.targets.json").read_bytes())["signed"]["version"] == 4

    clock.advance(days=200)
    for key in (tmp_path / "repo" / "keys").glob("targets.*"):
        key.unlink()
    with pytest.raises(ConfigError, match="the key of role targets"):
        repository.renew()
    assert json.loads((tmp_path / "repo" / "metadata" / "timestamp.json").read_bytes())["signed"]["version"] == 5


def a_rollout(version):
    return Rollout(
        id="r", state="running", target="1/manifest.json", release=1, share=1.0, metadata={}, version=version
    )


def test_what_is_announced_devices_believe_through_all_rotations(tmp_path, home, repository, bundle):
    """Also one that was off while the keys were replaced as often as one announcement can carry."""
    assert Trust(home).verify_rollout(repository.announce(a_rollout(1), "shop"), "shop") == a_rollout(1)
    for version in range(MAX_ROOTS):
        repository.rotate(ROLES[version % len(ROLES)])
    announcement = repository.announce(a_rollout(2), "shop")
    assert len(announcement.roots) == MAX_ROOTS
    assert len(encode_message(announcement)) < 30_000, "of 60 KiB; the rest is for canaries and names of files"
    assert Trust(home).verify_rollout(announcement, "shop") == a_rollout(2)

    for key in (tmp_path / "repo" / "keys").glob("timestamp.*"):
        key.unlink()
    with pytest.raises(ConfigError, match="the key of role timestamp"):
        repository.announce(a_rollout(3), "shop")


def test_private_keys_are_for_the_owner_alone(tmp_path, repository):
    keys = list((tmp_path / "repo" / "keys").iterdir())

    assert len(keys) == len(ROLES)
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)


def test_until_the_timestamp_is_written_nothing_has_changed(tmp_path, home, repository, bundle, monkeypatch):
    target = repository.add(bundle)
    before = trusted(home, repository, target)
    timestamp = (tmp_path / "repo" / "metadata" / "timestamp.json").read_bytes()
    repository.add(variant(tmp_path / "second", release=2))
    (tmp_path / "repo" / "metadata" / "timestamp.json").write_bytes(timestamp)  # cut off before the last file

    again = Repository(tmp_path / "repo")

    assert again.list_targets() == [target]
    assert trusted(home, again, target) == before
    assert again.add(tmp_path / "second") == "2/manifest.json"
    assert trusted(home, again, "2/manifest.json")


def test_several_bundles_of_one_release(tmp_path, home, repository, bundle):
    other = variant(tmp_path / "other", release=1, gate=other_gate)

    assert repository.add(bundle, "door") == "1/door.json"
    assert repository.add(other, "yard") == "1/yard.json"
    assert digest(other) in next(name for name in repository.find_files("1/yard.json") if "yard" in name)


def test_a_bundle_that_is_damaged_is_not_released(repository, bundle):
    next(bundle.glob("*.safetensors")).write_bytes(b"x")

    with pytest.raises(UpdateRejected):
        repository.add(bundle)
    assert repository.list_targets() == []


def test_mistakes_are_explained(tmp_path, repository):
    with pytest.raises(ConfigError, match="fedge release init"):
        Repository(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not empty"):
        Repository.make(tmp_path / "repo")
    with pytest.raises(ConfigError, match="no target"):
        repository.find_files("9/manifest.json")
    with pytest.raises(ConfigError, match="one of root"):
        repository.rotate("boss")
