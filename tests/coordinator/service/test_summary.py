"""What is said of a run: of devices without a bundle, of certificates that expire."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

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


def test_what_will_lock_everybody_out_is_told_long_before(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "f")
    values = msgspec.structs.replace(settings(None, tmp_path), identity=authority.folder / "coordinator")
    assert list_expiring(values) == []
    authority.ago = dt.timedelta(days=280)
    authority.issuer.publish_revoked()
    (told,) = list_expiring(values)
    assert "list of revoked certificates" in told
    assert "expires in 84 days" in told
    assert "run `fedge provision renew`" in told
    (authority.folder / "coordinator" / "own.crt").unlink()
    assert "own.crt holds no certificate" in list_expiring(values)[0]
    assert list_expiring(settings(None, tmp_path)) == []
