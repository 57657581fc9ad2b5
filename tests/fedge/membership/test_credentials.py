from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme

from fedge.errors import ConfigError
from fedge.membership.credentials import Credentials
from fedge.settings import Secret, resolve
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.route import Proxy


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """An authority, two certificates with their keys, and what is none of it."""
    authority = trustme.CA()
    blobs = {"ca": authority.cert_pem}
    for name in ("one", "other"):
        issued = authority.issue_cert(common_name=name)
        blobs |= {f"{name}_crt": issued.cert_chain_pems[0], f"{name}_key": issued.private_key_pem}
        blobs[f"{name}_both"] = issued.private_key_and_cert_chain_pem
    for name, blob in blobs.items():
        blob.write_to_path(str(tmp_path / name))
    (tmp_path / "text").write_text("hello")
    return {name: str(tmp_path / name) for name in (*blobs, "text", "missing")}


def test_without_any_nobody_is_named() -> None:
    assert Credentials().make_broker_settings("server") == BrokerSettings("server", 1883)


def test_all_of_it_reaches_the_transport(files: dict[str, str]) -> None:
    given = Credentials(
        username="me", password=Secret("pw"), ca_file=files["ca"], cert_file=files["one_crt"], key_file=files["one_key"]
    )
    assert given.make_broker_settings("server:8883", keepalive_s=60) == BrokerSettings(
        "server", 8883, "me", "pw", files["ca"], files["one_crt"], files["one_key"], 60
    )


def test_a_file_may_hold_certificate_and_key(files: dict[str, str]) -> None:
    assert (
        Credentials(ca_file=files["ca"], cert_file=files["one_both"]).make_broker_settings("server").cert_file
        == files["one_both"]
    )


def test_an_identity_stands_for_the_three_files(files: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    folder.mkdir()
    for name, file in {"ca.crt": "ca", "own.crt": "one_crt", "own.key": "one_key"}.items():
        (folder / name).write_bytes(Path(files[file]).read_bytes())
    found = Credentials(identity=folder).make_broker_settings("server")
    assert [found.ca_file, found.cert_file, found.key_file] == [
        str(folder / name) for name in ("ca.crt", "own.crt", "own.key")
    ]
    with pytest.raises(ConfigError, match="give it, or them"):
        Credentials(identity=folder, ca_file=files["ca"]).make_broker_settings("server")
    (folder / "own.key").unlink()
    with pytest.raises(ConfigError, match=r"own\.key are not a certificate with its private key: .*No such file"):
        Credentials(identity=folder).make_broker_settings("server")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cert_file": "one_crt"}, "need ca_file"),
        ({"key_file": "one_key"}, "need ca_file"),
        ({"ca_file": "missing"}, "ca_file {missing} holds no certificates: .*No such file"),
        ({"ca_file": "text"}, "ca_file {text} holds no certificates"),
        ({"ca_file": "ca", "key_file": "one_key"}, "key_file needs cert_file"),
        ({"ca_file": "ca", "cert_file": "missing"}, "cert_file {missing} and key_file {missing} are .*No such file"),
        ({"ca_file": "ca", "cert_file": "one_crt"}, "cert_file {one_crt} and key_file {one_crt} are not a certificate"),
        (
            {"ca_file": "ca", "cert_file": "one_crt", "key_file": "other_key"},
            "are not a certificate with its private key",
        ),
    ],
)
def test_what_cannot_be_used_is_named_before_anybody_connects(
    files: dict[str, str], given: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Credentials(**{name: files[file] for name, file in given.items()}).make_broker_settings("server")
    assert re.search(says.format_map({name: re.escape(path) for name, path in files.items()}), str(refused.value))


def test_nobody_is_asked_for_a_passphrase(files: dict[str, str], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(Path(files["one_key"]).read_bytes(), password=None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x")))
    with pytest.raises(ConfigError, match="encrypted"):
        Credentials(ca_file=files["ca"], cert_file=files["one_crt"], key_file=str(locked)).make_broker_settings(
            "server"
        )


def test_the_way_and_the_prefixes_reach_the_transport() -> None:
    given = Credentials(proxy=Secret("http://me:pw@proxy:3128"), topic_prefix="company/ai", client_prefix="acme-")
    assert given.make_broker_settings("wss://server/ws") == BrokerSettings(
        "server",
        443,
        path="/ws",
        secure=True,
        proxy=Proxy(False, "proxy", 3128, "me", "pw"),
        topic_prefix="company/ai",
        client_prefix="acme-",
    )
    assert "pw" not in repr(given)


def test_certificates_go_over_tls_alone(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"ws://server is without TLS: with certificates it is wss://"):
        Credentials(ca_file=files["ca"]).make_broker_settings("ws://server")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(
            ("topic_prefix", value, "levels of a topic such as company/site")
            for value in ("a/", "/a", "a//b", "a+", "")
        ),
        ("topic_prefix", "a" * 201, "length <= 200"),
        *(("client_prefix", value, "1 to 28 letters, digits") for value in ("", "a b", "a" * 29)),
        ("proxy", "http://me:pw@proxy", "proxy: write http://HOST:PORT"),
    ],
)
def test_a_wrong_prefix_or_proxy_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        resolve(Credentials, "status", None, {name: value}).make_broker_settings("server")
    assert "pw" not in str(refused.value)


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Credentials().make_broker_settings("host:port")
