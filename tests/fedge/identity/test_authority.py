from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from cryptography import x509

from fedge.errors import ConfigError, ProtocolError
from fedge.identity.authority import (
    MAX_REVOCATIONS_FILE_BYTES,
    Authority,
    Key,
    explain_certificate_fault,
    verify_signature,
)
from fedge.identity.names import CRL, Role, Subject, find_subject
from tests.support import identities
from tests.support.identities import DAY, now


@pytest.fixture
def authority(tmp_path: Path) -> identities.Authority:
    return identities.Authority(tmp_path / "authority", "test")


def key_of(files: dict[str, str]) -> Key:
    return Key(files["cert_file"], files["key_file"])


def test_a_certificate_names_somebody_in_a_federation(authority: identities.Authority) -> None:
    key = key_of(authority.issue("cam1"))
    assert key.subject == Subject("test", Role.DEVICE, "cam1")
    assert key.subject.uri == "urn:fedge:test:device:cam1"
    subject, public = Authority(authority.file).identify(key.der)
    assert subject == key.subject
    verify_signature(public, "a topic", b"bytes", key.sign("a topic", b"bytes"))


@pytest.mark.parametrize(
    "urn",
    [
        "urn:fedge:test:device:cam2",  # another common name
        "urn:fedge:test:king:cam1",
        "urn:fedge:test:device",
        "urn:fedge:test:device:cam1:x",
        "urn:other:test:device:cam1",
    ],
)
def test_who_is_not_named_as_agreed_is_nobody(authority: identities.Authority, urn: str) -> None:
    files = authority.issue("cam1", urn=urn)
    assert find_subject(x509.load_pem_x509_certificate(Path(files["cert_file"]).read_bytes())) is None
    with pytest.raises(ConfigError, match="names nobody of a federation"):
        key_of(files)


def test_a_signature_is_of_one_context_and_of_these_bytes_alone(authority: identities.Authority) -> None:
    key, other = key_of(authority.issue("cam1")), key_of(authority.issue("cam2"))
    _, public = Authority(authority.file).identify(key.der)
    signature = key.sign("reports", b"bytes")
    for context, data, signed in [
        ("acks", b"bytes", signature),
        ("reports", b"byteS", signature),
        ("reports", b"bytes", signature[:-1]),
        ("reports", b"bytes", b""),
        ("reports", b"bytes", other.sign("reports", b"bytes")),
    ]:
        with pytest.raises(ProtocolError, match="forged"):
            verify_signature(public, context, data, signed)


def test_the_authority_vouches_for_its_own_within_their_dates(authority: identities.Authority, tmp_path: Path) -> None:
    foreign = key_of(identities.Authority(tmp_path / "other", "test").issue("cam1"))
    old = key_of(authority.issue("cam2", begin=now() - 2 * DAY, end=now() - DAY))
    early = key_of(authority.issue("cam3", begin=now() + DAY))
    checked = Authority(authority.file)
    for key, says in ((foreign, "not issued by"), (old, "expired on"), (early, "is not valid before")):
        with pytest.raises(ProtocolError, match=says):
            checked.identify(key.der)
        assert says in checked.explain_invalid(key.certificate)
    with pytest.raises(ProtocolError, match="cannot be read"):
        checked.identify(b"x")


def test_who_is_revoked_is_nobody_any_more_and_an_older_list_changes_nothing(
    authority: identities.Authority, tmp_path: Path
) -> None:
    one, two = key_of(authority.issue("cam1")), key_of(authority.issue("cam2"))
    before = (authority.folder / CRL).read_bytes()
    kept = tmp_path / "kept.pem"
    known = Authority(authority.file, kept)
    known.identify(one.der)
    authority.revoke("cam1")
    assert known.accept_revocations((authority.folder / CRL).read_bytes())
    assert not known.accept_revocations((authority.folder / CRL).read_bytes())
    with pytest.raises(ProtocolError, match="revoked: the certificate of device cam1"):
        known.identify(one.der)
    assert known.explain_invalid(one.certificate) == "it was revoked"
    assert known.identify(two.der)[0].name == "cam2"
    with pytest.raises(ProtocolError, match="replayed"):
        known.accept_revocations(before)
    (authority.folder / CRL).write_bytes(before)  # beside ca_file lies an older one than was heard of
    for restarted in (Authority(authority.file, kept),):
        with pytest.raises(ProtocolError, match="revoked"):
            restarted.identify(one.der)


def test_a_list_by_somebody_else_or_none_at_all_is_refused(authority: identities.Authority, tmp_path: Path) -> None:
    known = Authority(authority.file)
    foreign = identities.Authority(tmp_path / "other", "test").crl(1000)
    for data, name in ((foreign, "forged"), (b"x", "malformed"), (b"x" * 200_000, "oversized")):
        with pytest.raises(ProtocolError) as refused:
            known.accept_revocations(data)
        assert refused.value.name == name
    (authority.folder / CRL).write_bytes(foreign)
    with pytest.raises(ConfigError, match="not a list of certificates"):
        Authority(authority.file)


def test_a_list_in_a_file_may_be_longer_than_one_on_the_wire(authority: identities.Authority) -> None:
    authority.issuer.publish_revoked(2**150 + i for i in range(3_500))
    key = key_of(authority.issue("cam1"))
    authority.revoke("cam1")
    known = Authority(authority.file)
    assert known.explain_invalid(key.certificate) == "it was revoked"
    with pytest.raises(ProtocolError, match="oversized"):
        Authority(identities.Authority(authority.folder / "other", "test").file).accept_revocations(known.revocations)
    (authority.folder / CRL).write_bytes(b"x" * (MAX_REVOCATIONS_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="oversized"):
        Authority(authority.file)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_bit_of_a_list_can_be_changed(authority: identities.Authority) -> None:
    key = key_of(authority.issue("cam1"))
    authority.revoke("cam1")
    known = Authority(authority.file)
    genuine = known.revocations
    for i in range(len(genuine)):
        with contextlib.suppress(ProtocolError):  # some bits of its encoding say nothing
            known.accept_revocations(genuine[:i] + bytes([genuine[i] ^ 4]) + genuine[i + 1 :])
        with pytest.raises(ProtocolError, match="revoked"):
            known.identify(key.der)


def test_what_is_wrong_with_a_certificate_of_any_kind_is_said_in_words(
    authority: identities.Authority, tmp_path: Path
) -> None:
    files = authority.issue("cam1", urn="urn:x:y", begin=now() - 2 * DAY, end=now() - DAY)
    assert re.search(
        r"cert_file .*cam1.crt: expired on", explain_certificate_fault(files["cert_file"], files["ca_file"])
    )
    fine = authority.issue("cam2", urn="urn:x:y")
    assert explain_certificate_fault(fine["cert_file"], fine["ca_file"]) == ""
    foreign = identities.Authority(tmp_path / "other", "test").file
    assert "was not issued by the authority" in explain_certificate_fault(fine["cert_file"], str(foreign))
    assert "missing" in explain_certificate_fault("missing", fine["ca_file"])


def test_files_that_cannot_be_used_are_named(authority: identities.Authority, tmp_path: Path) -> None:
    files = authority.issue("cam1")
    with pytest.raises(ConfigError, match="missing"):
        Key(tmp_path / "missing", None)
    with pytest.raises(ConfigError, match="holds no private key that can be read"):
        Key(files["cert_file"], None)
    with pytest.raises(ConfigError, match="holds no certificates"):
        Authority(files["key_file"])
