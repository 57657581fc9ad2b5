from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric import ed25519

from fedge.errors import ConfigError
from fedge.identity.certificates import (
    encode_pem,
    explain_overdue,
    get_time,
    get_validity,
    is_issued_by,
    is_past,
    list_overdue,
    load_certificate,
    load_crl,
    load_key,
    make_certificate_request,
    make_device_subject,
    make_key,
    read_request,
)
from tests.support.identities import Authority


@pytest.mark.parametrize("name", ["broker", "coordinator", "status", "rollout", "relay", "intake", "operator"])
def test_a_device_cannot_have_the_name_of_a_part_of_the_server(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no device can be called {name}"):
        make_device_subject("f", name)


@pytest.mark.parametrize("name", ["", "a/b", "-x", "+", "#", "a b", "a" * 64])
def test_a_device_is_called_as_topics_allow(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name of a device"):
        make_device_subject("f", name)


def test_a_request_says_its_name_and_shows_its_key() -> None:
    key = make_key()
    text = encode_pem(make_certificate_request("cam1", key))
    assert read_request(text) == ("cam1", key.public_key())
    for damaged in (b"", b"hello", text[:100], text.replace(b"MI", b"MJ", 1)):
        with pytest.raises(ConfigError, match="that is not a request for a certificate"):
            read_request(damaged)


def test_files_that_are_none_of_it_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for read, says in ((load_certificate, "no certificate"), (load_key, "no private key"), (load_crl, "no list of")):
        with pytest.raises(ConfigError, match=f"file holds {says}.*No such file"):
            read(file)
    file.write_text("hello")
    for read in (load_certificate, load_key, load_crl):
        with pytest.raises(ConfigError, match="file holds no "):
            read(file)
    other = ed25519.Ed25519PrivateKey.generate()
    file.write_bytes(other.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    with pytest.raises(ConfigError, match="not on an elliptic curve"):
        load_key(file)


def test_certificate_and_list_of_an_identity_are_looked_at(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f", days=100)
    named = authority.client("coordinator")
    ca, own = Path(str(named["ca_file"])), Path(str(named["cert_file"]))
    assert list_overdue(ca, own, get_time()) == []
    (told,) = list_overdue(ca, own, get_time() + dt.timedelta(days=90))
    assert told.startswith(f"the certificate {own} expires in 9 days")
    told, crl = list_overdue(ca, own, get_time() + dt.timedelta(days=300))
    assert told.startswith(f"the certificate {own} expired on")
    assert crl.startswith(f"the list of revoked certificates {ca.with_name('crl.pem')} expires in 64 days")
    device = authority.client("cam1")
    assert list_overdue(Path(str(device["ca_file"])), Path(str(device["cert_file"])), get_time()) == []


def test_lives_are_measured_and_whoever_forgets_to_renew_is_warned_in_time(tmp_path: Path) -> None:
    issuer = Authority(tmp_path / "f", days=100).issuer
    for item in (load_certificate(tmp_path / "f/broker/own.crt"), load_crl(tmp_path / "f/broker/crl.pem")):
        begin, end = get_validity(item)
        assert is_past(0.5, item, begin + (end - begin) / 2)
        assert not is_past(0.5, item, begin + (end - begin) / 2.01)
        assert explain_overdue("it", item, begin + 0.7 * (end - begin)) == ""
        soon = explain_overdue("it", item, end - dt.timedelta(days=20, hours=1))
        assert soon == f"it expires in 20 days, on {end:%Y-%m-%d}: run `fedge provision renew` on the server"
        assert explain_overdue("it", item, end).startswith(f"it expired on {end:%Y-%m-%d}")
    assert is_issued_by(load_certificate(tmp_path / "f/broker/own.crt"), issuer.certificate)
    assert not is_issued_by(
        load_certificate(tmp_path / "f/broker/own.crt"), Authority(tmp_path / "g").issuer.certificate
    )
