"""The rivals of benchmarks/rivals: their equations by hand, and a run of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals import fedala
from benchmarks.rivals.fedala import FedAla
from benchmarks.rivals.fedpac import FedPac, global_means, shares, statistics
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.tensors.layers import make_layers
from fedge.tensors.layout import HEAD
from tests.support.orders import INITIAL, LAYOUT
from tests.support.simulation import digits, predicted


def test_what_a_fedpac_device_tells() -> None:
    """Shares 2/3 and 1/3; the mean of |f|^2 is 10, the sum of |h|^2 is 4, so V = 6/3."""
    features = np.array([[1.0, 0.0], [3.0, 2.0], [0.0, 4.0]])
    h, v, means, counts = statistics(features, np.array([0, 0, 1]), 3)
    np.testing.assert_allclose(h, [[4 / 3, 2 / 3], [0, 4 / 3], [0, 0]])
    np.testing.assert_allclose(v, [2.0])
    np.testing.assert_allclose(means, [[2, 1], [0, 4], [0, 0]])
    np.testing.assert_array_equal(counts, [2, 1, 0])


def test_fedpac_weighs_heads_by_variance_and_distance() -> None:
    """Equal devices: by 1/V. Others: alpha_1^2 + 2 alpha_2^2 is smallest at (2/3, 1/3)."""
    np.testing.assert_allclose(shares(0, np.ones((2, 1, 1)), np.array([1.0, 3.0])), [0.75, 0.25])
    apart = np.array([[[0.0]], [[1.0]]])
    np.testing.assert_allclose(shares(0, apart, np.ones(2)), [2 / 3, 1 / 3])
    np.testing.assert_allclose(shares(1, apart, np.ones(2)), [1 / 3, 2 / 3])
    np.testing.assert_allclose(shares(0, 1e6 * apart, np.ones(2)), [1, 0], atol=1e-9)


def test_fedpac_means_are_weighted_by_counts() -> None:
    told = [
        {"counts": np.array([1, 0, 2]), "means": np.array([[4.0], [0.0], [1.0]])},
        {"counts": np.array([3, 0, 0]), "means": np.array([[0.0], [0.0], [0.0]])},
    ]
    assert global_means(told) == ((1.0,), None, (1.0,))


def test_fedala_mixes_heads_number_by_number() -> None:
    n = LAYOUT.select(HEAD).n_params
    own, mix = np.zeros(n, np.float32), np.linspace(0, 1, n, dtype=np.float32)
    mixed = fedala.overlay(INITIAL, make_layers({fedala.OWN: own, fedala.MIX: mix}, LAYOUT), LAYOUT).params
    np.testing.assert_array_equal(mixed[:-n], INITIAL.params[:-n])
    np.testing.assert_allclose(mixed[-n:], INITIAL.params[-n:] * mix)
    fresh = np.full(n, fedala.FRESH, np.float32)
    kept = make_layers({fedala.OWN: own, fedala.MIX: fresh}, LAYOUT)
    assert not fedala.overlay(INITIAL, kept, LAYOUT).params[-n:].any()


@pytest.mark.parametrize("kind", [FedPac, FedAla])
async def test_a_run_leaves_each_device_a_model_of_its_own_that_has_learned(tmp_path: Path, kind: type) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, how="dirichlet", limit=320, sensitive=0.0)
    method = kind(MethodSettings(rounds=6, participation=0.75))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.installed.keys() == fleet.workers.keys()
    data = [worker.data for worker in fleet.workers.values()]
    own = [predicted(worker, own.x_train) for worker, own in zip(fleet.workers.values(), data, strict=True)]
    assert np.mean([(p.argmax(axis=1) == d.y_train).mean() for p, d in zip(own, data, strict=True)]) > 0.7
    common = [predicted(worker, data[0].x_train).tobytes() for worker in fleet.workers.values()]
    assert len(set(common)) == 4
