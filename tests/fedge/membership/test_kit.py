from __future__ import annotations

import datetime as dt
from pathlib import Path

import msgspec
import pytest

from fedge.errors import ConfigError
from fedge.identity.certificates import make_device_subject, make_key
from fedge.membership.kit import Kit, seal_kit, unseal_kit
from fedge.tasks import load_task
from tests.support.identities import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("f") / "f")


def kit_of(authority: Authority, name: str, **changes: object) -> bytes:
    """A kit as `fedge provision device` makes it, changed before it was sealed."""
    key = make_key()
    issuer = authority.issuer
    data = issuer.make_kit(issuer.enlist(make_device_subject("f", name), key.public_key()), key, load_task("digits"))
    kit = msgspec.structs.replace(
        unseal_kit(data) if not authority.ago else msgspec.json.decode(msgspec.json.decode(data)["kit"], type=Kit),
        **changes,
    )
    return seal_kit(kit, issuer._key)


def test_a_kit_comes_out_as_it_went_in(authority: Authority) -> None:
    kit = unseal_kit(kit_of(authority, "cam1"))
    assert (kit.federation, kit.id, kit.broker, kit.task) == ("f", "cam1", "127.0.0.1:8883", load_task("digits"))


def test_an_earlier_fedge_reads_a_kit_that_says_nothing_new(authority: Authority) -> None:
    kit = msgspec.json.decode(msgspec.json.decode(kit_of(authority, "cam7"))["kit"])
    assert kit.keys() <= {"federation", "id", "broker", "ca", "certificate", "key", "task"}
    there = unseal_kit(kit_of(authority, "cam8", topic_prefix="company/ai", client_prefix="acme-"))
    assert (there.topic_prefix, there.client_prefix) == ("company/ai", "acme-")


def test_one_changed_byte_anywhere_is_refused(authority: Authority) -> None:
    data = kit_of(authority, "cam2")
    for i in [*range(0, len(data), 97), *range(len(data) - 160, len(data) - 4)]:
        damaged = bytes([*data[:i], data[i] ^ 1, *data[i + 1 :]])
        try:
            assert unseal_kit(damaged) == unseal_kit(data)  # white space, or a bit of base64 that stands for nothing
        except ConfigError as error:
            assert "is damaged: copy it once more" in str(error)  # noqa: PT017
    for end in (0, 1, len(data) // 2, len(data) - 3):
        with pytest.raises(ConfigError, match="not a start-up kit, or is damaged"):
            unseal_kit(data[:end])


def test_a_kit_that_contradicts_its_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not that of the device cam9 of f"):
        unseal_kit(kit_of(authority, "cam3", id="cam9"))
    with pytest.raises(ConfigError, match="not that of the device cam4 of g"):
        unseal_kit(kit_of(authority, "cam4", federation="g"))
    with pytest.raises(ConfigError, match="not an address of a broker"):
        unseal_kit(kit_of(authority, "cam5", broker="server:mqtt"))
    other = Authority(tmp_path / "other").issuer
    theirs = unseal_kit(
        other.make_kit(other.enlist(make_device_subject("f", "cam6"), make_key().public_key()), None, None)
    )
    with pytest.raises(ConfigError, match="not by the authority that made the kit"):
        unseal_kit(kit_of(authority, "cam6", certificate=theirs.certificate))


def test_a_kit_does_not_keep_for_ever(tmp_path: Path) -> None:
    old = Authority(tmp_path / "f", days=30)
    old.ago = dt.timedelta(days=40)
    with pytest.raises(ConfigError, match=r"expired on .*have a new kit made on the server"):
        unseal_kit(kit_of(old, "cam1"))
    old.ago = -dt.timedelta(days=40)
    with pytest.raises(ConfigError, match=r"is not valid before .*if that clock is right"):
        unseal_kit(kit_of(old, "cam2"))


@pytest.mark.parametrize("field", ["name", "model"])
def test_a_kit_names_no_code(authority: Authority, field: str) -> None:
    task = msgspec.structs.replace(load_task("digits"), **{field: "os:fork"})
    with pytest.raises(ConfigError, match="no kit may name code, and its task names os:fork"):
        kit_of(authority, f"cam-{field}", task=task)
