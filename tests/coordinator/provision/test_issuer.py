from __future__ import annotations

import contextlib
import datetime as dt
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.provision.issuer import SERVER, Federation, Issuer
from coordinator.provision.members import MEMBERS, Member, read_members, write_members
from fedge.errors import ConfigError
from fedge.identity.authority import Authority as Verifier
from fedge.identity.certificates import (
    encode_pem,
    get_validity,
    is_past,
    load_certificate,
    load_crl,
    make_certificate_request,
    make_device_subject,
    make_key,
    read_request,
)
from fedge.identity.names import CRL, Role, Subject, find_subject
from fedge.system.files import skip_fsync
from tests.support.identities import Authority

DAY = dt.timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "f")


def enlist(authority: Authority, name: str, key: object = None) -> x509.Certificate:
    subject = make_device_subject(authority.issuer.settings.federation, name)
    return authority.issuer.enlist(subject, (key or make_key()).public_key())  # type: ignore[attr-defined]


def revoked_in(folder: Path) -> set[int]:
    return {entry.serial_number for entry in load_crl(folder / "crl.pem")}


def test_certificates_pass_a_strict_verification_for_their_purpose_alone(authority: Authority) -> None:
    """By OpenSSL, which is what brokers and Python have."""
    for role in SERVER:
        right, wrong = ("sslserver", "sslclient") if role is Role.BROKER else ("sslclient", "sslserver")
        for purpose, code in ((right, 0), (wrong, 2)):
            command = [
                "openssl",
                "verify",
                "-x509_strict",
                "-purpose",
                purpose,
                "-CAfile",
                str(authority.folder / "ca.crt"),
            ]
            crl = ["-crl_check", "-CRLfile", str(authority.folder / "broker/crl.pem")]
            done = subprocess.run(
                [*command, *crl, str(authority.folder / role / "own.crt")], capture_output=True, check=False
            )
            assert done.returncode == code, done.stderr.decode()


def test_each_certificate_says_federation_role_and_name(authority: Authority) -> None:
    for role in SERVER:
        assert find_subject(load_certificate(authority.folder / role / "own.crt")) == Subject("f", role, role)
    assert find_subject(enlist(authority, "cam1")) == Subject("f", Role.DEVICE, "cam1")


def test_the_brokers_is_for_the_host_and_for_this_machine(tmp_path: Path) -> None:
    for i, host in enumerate(("edge-server.local", "192.168.1.5", "fd00::5")):
        issuer = Issuer.make(tmp_path / str(i), Federation(federation="f", host=host, port=8883, days=365))
        names = load_certificate(tmp_path / str(i) / "broker/own.crt").extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
        told = {
            *names.value.get_values_for_type(x509.DNSName),
            *map(str, names.value.get_values_for_type(x509.IPAddress)),
        }
        assert told == {host, "localhost", "127.0.0.1", "::1"}
        assert issuer.settings.broker == ("[fd00::5]:8883" if ":" in host else f"{host}:8883")


def test_only_its_owner_reads_the_authoritys_key(authority: Authority) -> None:
    for name in ("ca.key", "coordinator/own.key", "broker/own.key"):
        assert (authority.folder / name).stat().st_mode & 0o777 == 0o600


def test_a_folder_holds_one_federation(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give another --folder"):
        Issuer.make(authority.folder, authority.issuer.settings)
    with pytest.raises(ConfigError, match="make one with `fedge provision init`"):
        Issuer(tmp_path / "nowhere")


def test_of_several_who_found_a_federation_in_one_folder_at_once_one_does(tmp_path: Path) -> None:
    def found(number: int) -> int | None:
        settings = Federation(federation=f"f{number}", host="127.0.0.1", port=8883, days=30)
        with contextlib.suppress(ConfigError):
            Issuer.make(tmp_path / "f", settings)
            return number
        return None

    with skip_fsync(), ThreadPoolExecutor(4) as pool:
        (winner,) = [number for number in pool.map(found, range(4)) if number is not None]
    issuer = Issuer(tmp_path / "f")
    assert issuer.settings.federation == f"f{winner}"
    assert issuer.refresh() == []


def test_members_are_on_the_list_until_they_are_revoked(authority: Authority) -> None:
    file = authority.folder / "coordinator" / "members.json"
    enlist(authority, "cam")
    other = enlist(authority, "cam-1")
    assert read_members(file).admits("cam", Role.DEVICE)
    assert not read_members(file).admits("cam", Role.ROLLOUT)
    authority.issuer.revoke("cam")
    assert not read_members(file).admits("cam", Role.DEVICE)
    assert read_members(file).admits("cam-1", Role.DEVICE)
    assert other.serial_number not in revoked_in(authority.folder / "broker")
    with pytest.raises(ConfigError, match="has no member cam9"):
        authority.issuer.revoke("cam9")


def test_an_intake_knows_members_and_revoked_as_the_coordinator_does(authority: Authority) -> None:
    enlist(authority, "cam1", make_key())
    authority.issuer.equip(Role.INTAKE)
    enlist(authority, "cam2", make_key())
    authority.issuer.revoke("cam1")
    for file in (MEMBERS, CRL):
        known = (authority.folder / "coordinator" / file).read_bytes()
        assert (authority.folder / "intake" / file).read_bytes() == known


def test_a_name_is_given_once_and_again_after_it_was_revoked(authority: Authority) -> None:
    first = enlist(authority, "cam1")
    with pytest.raises(ConfigError, match="`fedge provision revoke cam1` first"):
        enlist(authority, "cam1")
    with pytest.raises(ConfigError, match="status has a certificate already"):
        authority.issuer.equip(Role.STATUS)
    authority.issuer.revoke("cam1")
    second = enlist(authority, "cam1")
    for part in ("broker", "coordinator"):
        assert revoked_in(authority.folder / part) == {first.serial_number}
    assert read_members(authority.folder / "coordinator" / "members.json").admits("cam1", Role.DEVICE)
    authority.issuer.revoke("cam1")
    assert revoked_in(authority.folder / "broker") == {first.serial_number, second.serial_number}


def test_no_name_is_that_of_a_device_behind_a_relay(authority: Authority, tmp_path: Path) -> None:
    issuer = authority.issuer
    issuer.equip_relay("north", tmp_path / "north")
    for add in (lambda name: enlist(authority, name), lambda name: issuer.equip_relay(name, tmp_path / name)):
        with pytest.raises(ConfigError, match="behind the relay north"):
            add("north.cam1")
    for name in ("northern", "south.cam1"):
        enlist(authority, name)
    with pytest.raises(ConfigError, match=r"south\.cam1 .* behind the relay south"):
        issuer.equip_relay("south", tmp_path / "south")
    assert "south" not in issuer.members.members
    issuer.revoke("south.cam1")
    issuer.equip_relay("south", tmp_path / "south")
    issuer.revoke("north")
    enlist(authority, "north.cam1")


def test_a_certificate_leaves_the_list_a_year_after_it_expired(authority: Authority) -> None:
    first = enlist(authority, "cam1")
    authority.issuer.revoke("cam1")
    for days, on_list in ((364, True), (366, False)):
        later = Issuer(authority.folder, lambda: first.not_valid_after_utc + days * DAY)  # noqa: B023 - used at once
        later.publish_revoked()
        assert (first.serial_number in revoked_in(authority.folder / "coordinator")) == on_list
    later.revoke("cam1")
    assert revoked_in(authority.folder / "broker") == set()


def test_every_list_is_newer_than_the_last(authority: Authority) -> None:
    verifier = Verifier(authority.folder / "ca.crt")
    seen = []
    for name in ("cam1", "cam2"):
        enlist(authority, name)
        authority.issuer.revoke(name)
        seen.append((authority.folder / "coordinator/crl.pem").read_bytes())
        assert verifier.accept_revocations(seen[-1])
    with pytest.raises(Exception, match="is older than"):
        verifier.accept_revocations(seen[0])


def test_a_part_of_the_server_that_was_revoked_gets_another_key(authority: Authority) -> None:
    before = (authority.folder / "coordinator/own.key").read_bytes()
    authority.issuer.revoke("coordinator")
    authority.issuer.equip(Role.COORDINATOR)
    assert (authority.folder / "coordinator/own.key").read_bytes() != before
    assert read_members(authority.folder / "coordinator" / "members.json").admits("coordinator", Role.COORDINATOR)


def test_what_is_past_two_thirds_of_its_life_is_made_anew_and_nothing_else(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f", days=90)
    file = authority.folder / "status" / "own.crt"
    old = load_certificate(file)
    authority.ago = -59 * DAY
    assert authority.issuer.refresh() == []
    authority.ago = -62 * DAY
    authority.issuer.revoke("rollout")
    assert authority.issuer.refresh() == ["coordinator", "status", "broker"]
    new = load_certificate(file)
    assert new.public_key() == old.public_key()
    assert (get_validity(new)[1] - get_validity(old)[1]) // DAY == 62
    assert authority.issuer.refresh() == []
    authority.ago = -(62 + 250) * DAY
    assert "crl.pem" in authority.issuer.refresh()
    assert len(revoked_in(authority.folder / "broker")) == 1
    authority.issuer.revoke("status")
    known = revoked_in(authority.folder / "broker")
    assert {old.serial_number, new.serial_number} <= known


def asked(authority: Authority, device: str, key: object, name: str = "") -> x509.Certificate:
    request = encode_pem(make_certificate_request(name or device, key))  # type: ignore[arg-type]
    return authority.issuer.renew(device, *read_request(request))


def test_a_device_goes_on_with_its_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f", days=90)
    key = make_key()
    first = enlist(authority, "cam1", key)
    assert asked(authority, "cam1", key) == first
    authority.ago = -70 * DAY
    second = asked(authority, "cam1", key)
    assert second.public_key() == key.public_key()
    assert is_past(0, second, get_validity(first)[1])
    assert asked(authority, "cam1", key) == second, "a request that is repeated, by whomever, gets nothing new"
    authority.issuer.revoke("cam1")
    assert {first.serial_number, second.serial_number} <= revoked_in(authority.folder / "broker")


def test_nobody_gets_a_certificate_by_a_key_that_is_not_his(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f", days=90)
    key, other = make_key(), make_key()
    enlist(authority, "cam1", key)
    enlist(authority, "cam2", other)
    for device, wrong, name, says in (
        ("cam1", other, "", "not signed with the key of cam1"),
        ("cam1", key, "cam2", "no device cam1 belongs"),
        ("cam9", key, "", "no device cam9 belongs"),
        ("coordinator", key, "", "no device coordinator belongs"),
    ):
        with pytest.raises(ConfigError, match=says):
            asked(authority, device, wrong, name)
    authority.issuer.revoke("cam2")
    with pytest.raises(ConfigError, match="or it was revoked"):
        asked(authority, "cam2", other)
    authority.ago = -91 * DAY
    with pytest.raises(ConfigError, match="has expired: revoke it, and make a new start-up kit"):
        asked(authority, "cam1", key)


def copies(authority: Authority) -> dict[str, bytes]:
    """What the user of the coordinator can overwrite."""
    return {name: (authority.folder / "coordinator" / name).read_bytes() for name in ("members.json", "crl.pem")}


def put(authority: Authority, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (authority.folder / "coordinator" / name).write_bytes(data)


def test_a_coordinator_that_was_taken_over_lets_nobody_in_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f", days=90)
    key = make_key()
    first = enlist(authority, "cam1", key)
    before = copies(authority)
    authority.issuer.revoke("cam1")
    put(authority, before)
    authority.ago = -70 * DAY
    with pytest.raises(ConfigError, match="or it was revoked"):
        asked(authority, "cam1", key)
    authority.issuer.publish_revoked()
    enlist(authority, "cam2")
    for part in ("", "broker", "coordinator"):
        assert revoked_in(authority.folder / part) == {first.serial_number}
    assert not read_members(authority.folder / "coordinator" / "members.json").admits("cam1", Role.DEVICE)


def test_a_list_that_the_authority_has_not_signed_is_not_gone_on_with(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (authority.folder / "crl.pem").write_bytes(Authority(tmp_path / "g").crl(9))
    with pytest.raises(ConfigError, match="is not by this authority: bring it back from a backup"):
        authority.issuer.revoke("status")


def test_the_copies_do_not_stand_in_for_a_list_that_is_lost(authority: Authority) -> None:
    authority.issuer.members_file.unlink()
    before = copies(authority)
    with pytest.raises(ConfigError, match=f"{authority.issuer.members_file} is not there"):
        authority.issuer.revoke("status")
    assert copies(authority) == before


@pytest.mark.process
def test_two_commands_at_once_lose_nothing(authority: Authority) -> None:
    """Many members make reading and writing the list slow enough to meet."""
    gone = Member(role=Role.DEVICE, serial="1", not_after="2030-01-31T00:00:00Z", revoked="2029-01-31T00:00:00Z")
    known = authority.issuer.members
    many = {f"old{number}": gone for number in range(5000)} | known.members
    write_members(authority.issuer.members_file, type(known)(federation=known.federation, members=many))
    code = "import sys; from pathlib import Path; from coordinator.provision.issuer import Issuer\n"
    code += "from fedge.identity.certificates import make_device_subject, make_key\n"
    code += "issuer = Issuer(Path(sys.argv[1]))\n"
    code += "print(flush=True); sys.stdin.readline()\n"
    code += "for n in range(5):\n    name = f'{sys.argv[2]}{n}'\n"
    code += "    issuer.enlist(make_device_subject(issuer.settings.federation, name), make_key().public_key())\n"
    code += "    issuer.revoke(name)\n"
    command = [sys.executable, "-c", code, str(authority.folder)]
    both = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    for process in both:
        assert process.stdout is not None
        process.stdout.readline()
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate()
        assert process.returncode == 0
    names = {f"{name}{number}" for name in "ab" for number in range(5)}
    members = authority.issuer.members.members
    assert {name for name in names if name in members and members[name].revoked is not None} == names
    assert revoked_in(authority.folder) == {int(members[name].serial, 16) for name in names}
    assert (authority.folder / "lock").stat().st_mode & 0o777 == 0o600
