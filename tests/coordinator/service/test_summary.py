"""What is said of a run: of devices without a bundle, of certificates that expire."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.service.beginning import make_settings_method
from coordinator.service.summary import list_expiring, list_without_bundle
from coordinator.store.records import Device
from coordinator.store.store import Store
from fedge.steps.mixture.install import Installed
from fedge.wire.messages import BlobRef
from tests.coordinator.service.test_service import settings
from tests.support.device import TASK
from tests.support.identities import Authority
from tests.support.learners import LAYOUT

pytestmark = pytest.mark.usefixtures("no_torch")


def test_who_trained_or_was_there_at_the_end_and_has_no_bundle_is_named(tmp_path: Path, store: Store) -> None:
    method = make_settings_method(settings(None, tmp_path, rounds=1), TASK)
    state = FedAvgState(
        round=2,
        layout=LAYOUT,
        model=BlobRef(digest="0" * 64, size_bytes=1),
        participations={"left": 1, "well": 1},
        installed={"well": Installed(release=1)},
    )
    store.start_round(2, (Device("well", 5), Device("there", 5)), 0.0)
    assert list_without_bundle(method, state, store) == ["left", "there"]
    assert list_without_bundle(method, msgspec.structs.replace(state, round=1), store) == [], (
        "it has not come to its end"
    )


class Fleet:
    """A fleet without devices, at a broker without TLS."""

    broker_certificate = None

    def describe_broker(self) -> dict[str, object]:
        return {"address": "localhost:1883"}

    def list_certificates(self) -> dict[str, bytes]:
        return {}

    def list_certified(self) -> dict[str, float]:
        return {}


def test_what_will_lock_everybody_out_is_told_long_before(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f")
    values = msgspec.structs.replace(settings(None, tmp_path), identity=authority.folder / "coordinator")
    fleet: Any = Fleet()
    assert list_expiring(values, fleet) == []
    authority.ago = dt.timedelta(days=280)
    authority.issuer.publish_revoked()
    (told,) = list_expiring(values, fleet)
    assert "list of revoked certificates" in told.what
    assert told.until is not None
    assert 84 < (told.until - time.time()) / 86400 < 86
    assert "run `fedge provision renew`" in told.do
    (authority.folder / "coordinator" / "own.crt").unlink()
    assert "own.crt holds no certificate" in list_expiring(values, fleet)[0].what
    assert list_expiring(settings(None, tmp_path), fleet) == []
