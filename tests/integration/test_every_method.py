"""Every method once over a real broker: six agents on digits, and what their bundles predict is what torch predicts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

import deploy
from coordinator.methods.catalogue import get_installed_methods
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.store import Store
from export import parity
from fedge.bundle import manifest as bundle
from fedge.bundle.manifest import PoolInfo
from fedge.commands.broker import LocalBroker
from fedge.privacy.egress import ALL
from fedge.tasks import Partitioning, load_pool, partition_pool, read_device_data, write_share
from tests.support.agents import agents
from tests.support.oracle import by_torch

DEVICES = tuple(f"cam{k}" for k in range(6))
SEED = 5
ROUNDS = {"fedge": 8}
"""fedge profiles after six rounds with everybody."""
EPOCHS = {"cfic": 3, "fedepc": 3}
"""Their papers count local work in epochs; the others take steps."""
OPTIONS: dict[str, dict[str, float | int | str]] = {
    "fedge for data that shift": {"mode": "shift"},
    "fedge with experts": {"split": "always", "local_pilot": True},
    "fedge that waits for nobody": {"buffer": 4},
    "fedepc": {"warm_up": 2},
    "fedepc with server data": {"warm_up": 1, "extractor": "server", "sigma_dp": 0.01},
    "scmoe-pfl as printed": {"preset": "paper"},
    **{f"pm-moe over {base}": {"base": base} for base in ("fedrep", "lg-fedavg", "fedrod", "dbe")},
}
POOLS = [case for case in OPTIONS if case.startswith("pm-moe over")]
VARIANTS = [case for case in OPTIONS if case.startswith(("fedge ", "scmoe-pfl "))]
FEWEST_RIGHT = 0.3
"""Mean share of right answers on the devices' test samples; chance is 0.1."""


@pytest.mark.usefixtures("first_model_made_here")
@pytest.mark.parametrize("case", [*get_installed_methods(), "fedavg+ft", "fedepc with server data", *POOLS, *VARIANTS])
async def test_it_ends_in_bundles_that_predict_like_torch(case: str, mosquitto: LocalBroker, tmp_path: Path) -> None:
    method = case.split(maxsplit=1)[0]
    samples = load_pool("digits", seed=SEED, limit=700)
    shares = partition_pool(samples, len(DEVICES), Partitioning(sensitive=0.3), seed=SEED)
    for device, share in zip(DEVICES, shares, strict=True):
        write_share(share, tmp_path / f"{device}.npz")
    np.savez(tmp_path / "server_data.npz", x=samples.x[:100], y=samples.y[:100])
    settings = CoordinatorSettings(
        broker=f"{mosquitto.host}:{mosquitto.port}",
        federation="all",
        home=tmp_path / "coordinator",
        task="digits",
        method=method,
        rounds=ROUNDS.get(method, 3),
        local_epochs=EPOCHS.get(method),
        devices=len(DEVICES),
        seed=SEED,
        once=True,
        server_data=tmp_path / "server_data.npz" if case in {"fedcoe", "fedepc with server data"} else None,
    )
    data = {device: read_device_data(samples.spec, tmp_path / f"{device}.npz", seed=SEED) for device in DEVICES}
    async with agents(mosquitto, samples.spec, data, tmp_path, rules=ALL):
        with contextlib.closing(Store(settings.home)) as store:
            summary = await serve(settings, samples.spec, store, lambda *_: None, OPTIONS.get(case, {}))
    assert summary["done"]
    assert set(summary["installed"]) == set(DEVICES)
    assert set(summary["refused"]) <= {"replayed-report"}  # a report is repeated after 2 s, however slow the Ack is
    right, pools = [], []
    for device, share in zip(DEVICES, shares, strict=True):
        folder = tmp_path / device / "bundles" / str(summary["installed"][device]["release"])
        predicted = deploy.load(folder).predict(share.x_test)
        right.append((predicted.class_index == share.y_test).mean())
        np.testing.assert_allclose(predicted.probabilities.sum(axis=1), 1, atol=1e-5)
        manifest = bundle.read_bundle(folder).manifest
        assert manifest.max_abs_diff <= parity.TOLERANCE
        pools.append(isinstance(manifest.pool, PoolInfo))
        expected, weights = by_torch(folder, share.x_test)
        np.testing.assert_allclose(predicted.probabilities, expected, atol=parity.TOLERANCE)
        np.testing.assert_allclose(predicted.weights, weights, atol=10 * parity.TOLERANCE)
    assert any(pools) == (method == "pm-moe")
    assert np.mean(right) > FEWEST_RIGHT
