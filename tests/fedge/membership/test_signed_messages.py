from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path

import msgspec
import pytest

from fedge.errors import ConfigError, ProtocolError, TransportError
from fedge.identity.names import CRL, Role, Subject
from fedge.membership.signed_messages import MAX_ENVELOPE_BYTES, Envelope, Plain, Signed, make_speaker
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import MAX_MESSAGE_BYTES
from fedge.wire.topics import Topics
from tests.support.clock import Clock
from tests.support.identities import DAY, Authority, now

TOPICS = Topics("test")
ORDERS, STATUS, CONTEXT = (TOPICS.make_agent_topic("cam1", leaf) for leaf in ("orders", "status", "context"))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", "test")


class Party:
    """Somebody with a certificate, started as often as a test likes."""

    def __init__(self, authority: Authority, name: str, role: Role, home: Path) -> None:
        self.subject = Subject(authority.federation, role, name)
        self.settings = BrokerSettings("127.0.0.1", **authority.issue(name, role))
        self.home = home / name

    def start(self) -> Signed:
        signed = make_speaker(self.settings, self.subject, self.home)
        assert isinstance(signed, Signed)
        return signed


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Party:
    return Party(authority, "coordinator", Role.COORDINATOR, tmp_path)


@pytest.fixture
def cam(authority: Authority, tmp_path: Path) -> Party:
    return Party(authority, "cam1", Role.DEVICE, tmp_path)


def refusal(signed: Signed | Plain, topic: str, data: bytes, role: Role, *, name: str = "", to: str = "") -> str:
    """By which word it is refused."""
    with pytest.raises(ProtocolError) as refused:
        signed.open(topic, data, role, name=name, to=to)
    return refused.value.name


def test_what_is_signed_comes_out_as_it_went_in(server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    assert other.open(ORDERS, one.seal(ORDERS, b"do", to="7"), Role.COORDINATOR, to="7") == b"do"
    assert one.open(STATUS, other.seal(STATUS, b"here"), Role.DEVICE, name="cam1") == b"here"


def test_a_message_counts_where_it_was_meant_to_and_nowhere_else(server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    said = one.seal(ORDERS, b"do", to="7")
    for topic, to, name in [
        (TOPICS.make_agent_topic("cam1", "acks"), "7", "forged"),
        (TOPICS.make_agent_topic("cam2", "orders"), "7", "forged"),
        (Topics("other").make_agent_topic("cam1", "orders"), "7", "forged"),
        (ORDERS, "8", "replayed"),
        (ORDERS, "", "replayed"),
    ]:
        assert refusal(other, topic, said, Role.COORDINATOR, to=to) == name
    assert refusal(other, ORDERS, said, Role.DEVICE, to="7") == "certificate"  # by who may not say it
    assert refusal(one, STATUS, other.seal(STATUS, b"here"), Role.DEVICE, name="cam2") == "certificate"


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_bit_of_what_is_said_can_be_changed(server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    said = one.seal(ORDERS, b"do", to="7")
    taken = []
    for i in range(len(said)):
        for bit in (1, 16, 128):
            try:
                changed = said[:i] + bytes([said[i] ^ bit]) + said[i + 1 :]
                taken.append(other.open(ORDERS, changed, Role.COORDINATOR, to="7"))
            except ProtocolError:
                pass
    assert set(taken) <= {b"do"}  # some bits of a certificate's encoding say nothing
    assert len(taken) < 10
    for end in range(0, len(said), 7):
        refusal(other, ORDERS, said[:end], Role.COORDINATOR, to="7")
    assert other.open(ORDERS, said, Role.COORDINATOR, to="7") == b"do"


def test_what_is_older_than_the_last_is_refused_and_the_last_may_come_twice(server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    first, second = one.seal(ORDERS, b"1"), one.seal(ORDERS, b"2")
    assert other.open(ORDERS, second, Role.COORDINATOR) == b"2"
    assert other.open(ORDERS, second, Role.COORDINATOR) == b"2"
    assert refusal(other, ORDERS, first, Role.COORDINATOR) == "replayed"


def test_a_process_says_higher_numbers_than_all_before_it_whatever_the_clock_says(
    server: Party, cam: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server.start(), cam.start()
    old = other.seal(STATUS, b"old")
    one.open(STATUS, old, Role.DEVICE, name="cam1")
    clock = Clock(monkeypatch)
    clock.advance(days=-9000)
    assert one.open(STATUS, cam.start().seal(STATUS, b"new"), Role.DEVICE, name="cam1") == b"new"
    restarted = server.start()
    restarted.heard = one.heard
    assert refusal(restarted, STATUS, old, Role.DEVICE, name="cam1") == "replayed"
    (cam.home / "life").write_text("torn")
    clock.ahead = dt.timedelta(minutes=1)
    assert one.open(STATUS, cam.start().seal(STATUS, b"newer"), Role.DEVICE, name="cam1") == b"newer"


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"9" * 30, b"-1", None])
def test_a_damaged_life_begins_anew(cam: Party, server: Party, damage: bytes | None) -> None:
    cam.start()
    life = cam.home / "life"
    before = int(life.read_text())
    life.unlink()
    if damage is None:
        (life / "lost+found").mkdir(parents=True)
    else:
        life.write_bytes(damage)
    one, other = server.start(), cam.start()
    assert one.open(STATUS, other.seal(STATUS, b"here"), Role.DEVICE, name="cam1") == b"here"
    assert int(life.read_text()) >= before
    assert life.with_name("life.damaged").exists()


def test_with_a_damaged_list_of_revocations_nobody_is_believed_until_another_comes(
    authority: Authority, server: Party, cam: Party
) -> None:
    (authority.folder / CRL).rename(authority.folder / "elsewhere.pem")  # no device has it beside its ca_file
    one = server.start()
    cam.home.mkdir()
    (cam.home / CRL).write_bytes(b"-----BEGIN X509 CRL-----\n?")
    for other in (cam.start(), cam.start()):
        assert refusal(other, ORDERS, one.seal(ORDERS, b"do"), Role.COORDINATOR) == "unknown-revocations"
    assert other.authority.accept_revocations((authority.folder / "elsewhere.pem").read_bytes())
    for each in (other, cam.start()):
        assert each.open(ORDERS, one.seal(ORDERS, b"do"), Role.COORDINATOR) == b"do"


@pytest.mark.parametrize("topic", [ORDERS, TOPICS.make_agent_topic("cam1", "acks"), TOPICS.make_wants_topic("cam1")])
def test_a_coordinator_whose_clock_was_ahead_is_heard_again_with_a_new_home(
    server: Party, cam: Party, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    other = cam.start()
    with monkeypatch.context() as ahead:
        Clock(ahead).advance(days=200)
        wrong = server.start()
    first, second = wrong.seal(topic, b"1", to="7"), wrong.seal(topic, b"2", to="7")
    assert other.open(topic, second, Role.COORDINATOR, to="7") == b"2"
    server.home = server.home.with_name("new")
    right = server.start()
    third, fourth = right.seal(topic, b"3", to="7"), right.seal(topic, b"4", to="7")
    assert other.open(topic, fourth, Role.COORDINATOR, to="7") == b"4"
    for old in (first, third):  # of either life what is older than its last one is refused
        assert refusal(other, topic, old, Role.COORDINATOR, to="7") == "replayed"


def test_who_hears_another_process_with_its_key_speaks_with_higher_numbers_from_then_on(
    server: Party, cam: Party, tmp_path: Path
) -> None:
    """As a device does whose card was copied, and which another device with a clock that is ahead speaks for."""
    one, true = server.start(), cam.start()
    copied = cam.start()
    copied._life += 1_000_000
    said, early = copied.seal(STATUS, b"copy"), true.seal(STATUS, b"early")
    assert one.open(STATUS, said, Role.DEVICE, name="cam1") == b"copy"
    assert refusal(one, STATUS, true.seal(STATUS, b"true"), Role.DEVICE, name="cam1") == "replayed"
    assert not true.is_behind
    assert true.open_overheard(STATUS, said, "cam1") == b"copy"
    assert true.is_behind
    true.start_new_life()
    assert not true.is_behind
    assert one.open(STATUS, true.seal(STATUS, b"true"), Role.DEVICE, name="cam1") == b"true"
    assert cam.start()._life > true._life  # also after a restart
    assert true.open_overheard(STATUS, early, "cam1") is None  # older than what it has said: nobody is there now
    assert true.open_overheard(STATUS, copied.seal(STATUS, b"gone", will=True), "cam1") == b"gone"
    with pytest.raises(ProtocolError, match="certificate"):
        true.open_overheard(STATUS, one.seal(STATUS, b"liar"), "cam1")
    thief = cam.start()
    thief._life = 2**32 - 1
    assert true.open_overheard(STATUS, thief.seal(STATUS, b"thief"), "cam1") == b"thief"
    true.start_new_life()  # nobody can go above that: revoke it


def test_a_device_with_a_new_key_is_heard_whatever_numbers_the_old_one_said(
    authority: Authority, server: Party, cam: Party
) -> None:
    one, thief = server.start(), cam.start()
    thief._life = 2**32 - 1
    before = thief.seal(STATUS, b"stolen")
    one.open(STATUS, before, Role.DEVICE, name="cam1")
    lost = cam.start()
    lost._life = 1
    with pytest.raises(ProtocolError, match="revoke it, and enrol it again"):
        one.open(STATUS, lost.seal(STATUS, b"here"), Role.DEVICE, name="cam1")
    authority.revoke("cam1")
    authority.issue("cam1")
    one.authority.read_revocations(authority.folder / CRL)
    again = cam.start()
    assert one.open(STATUS, again.seal(STATUS, b"here"), Role.DEVICE, name="cam1") == b"here"
    assert refusal(one, STATUS, before, Role.DEVICE, name="cam1") == "revoked"


def test_who_connects_again_is_heard_though_a_copy_of_it_spoke_meanwhile(server: Party, cam: Party) -> None:
    one, own, copy = server.start(), cam.start(), cam.start()
    copy._life = own._life + 1
    one.open(STATUS, copy.seal(STATUS, b"the copy"), Role.DEVICE, name="cam1")
    assert refusal(one, STATUS, own.seal(STATUS, b"here"), Role.DEVICE, name="cam1") == "replayed"
    own.start_new_life()
    assert one.open(STATUS, own.seal(STATUS, b"here"), Role.DEVICE, name="cam1") == b"here"


def test_a_last_will_counts_whenever_it_comes(server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    will = other.seal(STATUS, b"gone", will=True)
    one.open(STATUS, other.seal(STATUS, b"here"), Role.DEVICE, name="cam1")
    assert one.open(STATUS, will, Role.DEVICE, name="cam1") == b"gone"


def test_a_context_goes_without_the_certificate_that_came_with_the_status(server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    said = other.seal(CONTEXT, b"warm")
    assert len(said) < 150
    assert refusal(one, CONTEXT, said, Role.DEVICE, name="cam1") == "unknown-device"
    one.open(STATUS, other.seal(STATUS, b"here"), Role.DEVICE, name="cam1")
    assert one.open(CONTEXT, said, Role.DEVICE, name="cam1") == b"warm"


def test_who_signs_and_who_does_not_tell_each_other_so(server: Party) -> None:
    signed = server.start()
    assert refusal(signed, STATUS, b"\x92\x02\x80", Role.DEVICE) == "unsigned"
    assert refusal(Plain(), ORDERS, signed.seal(ORDERS, b"do"), Role.COORDINATOR) == "signed"
    assert Plain().open(STATUS, Plain().seal(STATUS, b"x"), Role.DEVICE) == b"x"


def test_what_is_no_envelope_is_refused(server: Party) -> None:
    signed = server.start()
    large = b"\x95" + b"x" * (MAX_MESSAGE_BYTES + MAX_ENVELOPE_BYTES)
    for data, name in ((large, "oversized"), (b"\x95" + b"\x95" * 10_000, "malformed"), (b"\x95", "malformed")):
        assert refusal(signed, STATUS, data, Role.DEVICE) == name
    nobody = msgspec.msgpack.encode(Envelope(b"", 1, "", b"no certificate", b""))
    assert refusal(signed, STATUS, nobody, Role.DEVICE) == "certificate"


async def test_who_is_revoked_is_heard_no_more(authority: Authority, server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    order = one.seal(ORDERS, b"do")
    authority.revoke("coordinator")
    other.authority.accept_revocations((authority.folder / CRL).read_bytes())
    assert refusal(other, ORDERS, order, Role.COORDINATOR) == "revoked"
    (authority.folder / CRL).write_bytes(authority.crl(0))  # the next process remembers
    assert refusal(cam.start(), ORDERS, order, Role.COORDINATOR) == "revoked"


def test_a_certificate_that_was_renewed_is_taken_up(authority: Authority, server: Party, cam: Party) -> None:
    one, other = server.start(), cam.start()
    end = now() + 3 * DAY
    authority.issue("cam1", end=end)
    one.open(STATUS, other.seal(STATUS, b"here"), Role.DEVICE, name="cam1")
    assert other._key.certificate.not_valid_after_utc == end
    Path(cam.settings.cert_file or "").write_text("half")
    assert one.open(STATUS, other.seal(STATUS, b"still"), Role.DEVICE, name="cam1") == b"still"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "cam2"}, "is of device cam2 of test, and this is device cam1 of test"),
        ({"name": "cam1", "role": Role.STATUS}, "is of status cam1 of test"),
        ({"name": "cam1", "urn": "urn:fedge:other:device:cam1"}, "is of device cam1 of other"),
        ({"name": "cam1", "begin": now() - 3 * DAY, "end": now() - DAY}, "expired on"),
        ({"name": "cam1", "begin": now() + DAY}, "is not valid before"),
    ],
)
def test_a_certificate_that_nobody_would_take_is_named_before_anybody_connects(
    authority: Authority, tmp_path: Path, given: dict, says: str
) -> None:
    settings = BrokerSettings("127.0.0.1", **authority.issue(**given))
    error = TransportError if "begin" in given else ConfigError  # with it a service is started again and again
    with pytest.raises(error, match=says):
        make_speaker(settings, Subject("test", Role.DEVICE, "cam1"), tmp_path)


def test_one_that_was_revoked_or_is_of_another_authority_is_named_too(authority: Authority, tmp_path: Path) -> None:
    me = Subject("test", Role.DEVICE, "cam1")
    files = authority.issue("cam1")
    foreign = Authority(tmp_path / "other", "test").file
    with pytest.raises(ConfigError, match="not issued by the authority"):
        make_speaker(BrokerSettings("127.0.0.1", **(files | {"ca_file": str(foreign)})), me, tmp_path)
    authority.revoke("cam1")
    with pytest.raises(ConfigError, match="it was revoked"):
        make_speaker(BrokerSettings("127.0.0.1", **files), me, tmp_path)


def test_without_a_certificate_of_a_federation_nothing_is_signed(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    me = Subject("test", Role.DEVICE, "cam1")
    assert isinstance(make_speaker(BrokerSettings("127.0.0.1"), me, tmp_path), Plain)
    with caplog.at_level(logging.WARNING):
        assert isinstance(
            make_speaker(BrokerSettings("127.0.0.1", **authority.issue("cam1", urn="urn:x:y")), me, None), Plain
        )
        assert not caplog.records
        other = BrokerSettings("127.0.0.1", **authority.issue("cam2", urn="urn:x:y"))
        assert isinstance(make_speaker(other, me, None), Plain)
    assert "does not name cam1" in caplog.text


def test_a_relay_speaks_as_a_device_and_gives_orders_to_its_site_alone(
    authority: Authority, server: Party, cam: Party, tmp_path: Path
) -> None:
    """Below it is the coordinator of a federation of its own, which nobody else belongs to."""
    above = Party(authority, "north", Role.RELAY, tmp_path / "relay").start()
    status = TOPICS.make_agent_topic("north", "status")
    assert server.start().open(status, above.seal(status, b"here"), Role.DEVICE, name="north") == b"here"
    assert refusal(cam.start(), ORDERS, above.seal(ORDERS, b"do", to="7"), Role.COORDINATOR, to="7") == "certificate"

    sites = {name: Authority(tmp_path / name, name) for name in ("north", "south")}
    below = Party(sites["north"], "coordinator", Role.COORDINATOR, tmp_path / "relay").start()
    for name, expected in (("north", None), ("south", "certificate")):
        device = Party(sites[name], "cam1", Role.DEVICE, tmp_path / name).start()
        orders = Topics(name).make_agent_topic("cam1", "orders")
        order = below.seal(orders, b"do", to="7")
        if expected is None:
            assert device.open(orders, order, Role.COORDINATOR, to="7") == b"do"
        else:
            assert refusal(device, orders, order, Role.COORDINATOR, to="7") == expected
    assert refusal(cam.start(), ORDERS, below.seal(ORDERS, b"do", to="7"), Role.COORDINATOR, to="7") == "certificate"
