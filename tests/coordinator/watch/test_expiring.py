"""What will expire soon: real certificates, lists and signatures near the end of their lives."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.watch.attention import list_attention
from coordinator.watch.expiring import (
    DAY_S,
    SIGNED_DAYS,
    list_of_broker,
    list_of_devices,
    list_own,
    list_signatures,
    read_validity,
    write_repositories,
)
from export import signing
from export.signing import LIFETIMES, Repository
from fedge.identity.certificates import load_certificate
from tests.support.identities import DAY, Authority, now


def encode(files: dict[str, str]) -> bytes:
    return load_certificate(Path(files["cert_file"])).public_bytes(Encoding.DER)


def test_the_identity_of_a_coordinator_is_looked_at(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f", days=100)
    files = authority.client("coordinator")
    ca, own = Path(str(files["ca_file"])), Path(str(files["cert_file"]))
    begin, end = read_validity(encode({"cert_file": str(own)}))
    assert list_own(ca, own, begin + 0.74 * (end - begin)) == []
    (told,) = list_own(ca, own, begin + 0.76 * (end - begin))
    assert (told.what, told.until, told.device) == (f"the certificate {own}", end, "")
    assert told.since == pytest.approx(begin + 0.75 * (end - begin))
    late = [item.what for item in list_own(ca, own, begin + 1e10)]
    assert late[1:] == [
        f"the authority's certificate {ca}",
        f"the list of revoked certificates {ca.with_name('crl.pem')}",
    ]
    own.unlink()
    assert "holds no certificate" in list_own(ca, own, begin)[0].what


def test_a_device_that_did_not_renew_is_named_with_what_the_server_knows(tmp_path: Path) -> None:
    authority, at = Authority(tmp_path / "f"), time.time()
    begin = now() - 10 * DAY
    used = {
        name: encode(authority.issue(name, begin=begin, end=now() + left))
        for name, left in (("fresh", 40 * DAY), ("old", dt.timedelta(seconds=60)), ("over", dt.timedelta(seconds=-1)))
    }
    old, over = list_of_devices(used, {"old": at}, at)
    assert (old.device, over.device) == ("old", "over")
    assert old.until == pytest.approx(at + 60, abs=2)
    assert "`fedge provision renew` on the server" in old.do
    assert "revoke over" in over.do
    ready, _ = list_of_devices(used, {"old": at + 100}, at)
    assert "its new one is made" in ready.do


def test_of_a_broker_its_own_certificate_counts(tmp_path: Path) -> None:
    der = encode(Authority(tmp_path / "f").issue("server", begin=now() - DAY, end=now() + DAY / 10))
    assert list_of_broker("server:8883", None, time.time()) == []
    assert list_of_broker("server:8883", der, time.time() - 43200) == []
    (told,) = list_of_broker("server:8883", der, time.time())
    assert told.what == "the certificate of the broker server:8883"


def test_signatures_of_releases_are_told_before_devices_refuse_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {role: life.days for role, life in LIFETIMES.items()} == SIGNED_DAYS
    home, at = tmp_path / "home", time.time()
    home.mkdir()
    assert list_signatures(home, at) == []
    monkeypatch.setattr(signing, "LIFETIMES", LIFETIMES | {"timestamp": dt.timedelta(days=5)})
    Repository.make(tmp_path / "releases")
    write_repositories(home, [tmp_path / "releases", tmp_path / "elsewhere"])
    (told,) = list_signatures(home, at)
    assert told.what == f"the signature timestamp of {tmp_path / 'releases'}"
    assert told.until == pytest.approx(at + 5 * DAY_S, abs=5)
    assert "fedge release renew" in told.do
    later = [item.what.split()[2] for item in list_signatures(home, at + 80 * DAY_S)]
    assert later == ["snapshot", "timestamp"]
    (tmp_path / "releases" / "metadata" / "timestamp.json").write_text("{}")
    assert list_signatures(home, at) == []


def test_what_is_retired_needs_no_certificate() -> None:
    item = {"device": "cam1", "what": "its certificate", "since": 1.0, "until": 2.0, "do": "x"}
    summary = {"coordinator": {"state": "running"}, "expiring": [item], "retired": ["cam1"], "at": 1.0}
    assert list_attention(summary, 3.0) == []
    (told,) = list_attention(summary | {"retired": []}, 3.0)
    assert (told.device, told.severity) == ("cam1", "error")
