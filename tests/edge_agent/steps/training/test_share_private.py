"""PM-MoE's upload: what was kept as it is, or clipped and with noise that nobody can take off again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.device.worker import FinishedOrder
from edge_agent.steps.training.share_private import add_noise, clip_module
from fedge.steps.contract import Declined, Failed
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.steps.training.train import Start, Train, find_kept
from fedge.steps.training.train_dbe import TrainDbe
from fedge.steps.training.train_ditto import TrainDitto
from fedge.steps.training.train_rod import TrainRod
from fedge.tensors.layout import BASE, HEAD, Codec, from_bytes
from tests.support.orders import LAYOUT, Blobs, D, order, worker

MODULE = {"w": np.array([[3.0, 0.0]], np.float32), "b": np.array([4.0], np.float32), "n": np.array(7, np.int64)}


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


def train(home: Path, blobs: Blobs, kind: type[Train] = Train, number: int = 1, **fields: Any) -> None:
    fields = fields or {"personal": HEAD}
    start = Start(model=blobs.model(1, fields.get("personal", ())))
    action = kind(starts=(start,), sgd=Sgd(steps=3), initial=blobs.model(0), **fields)
    worker(home).execute(order(action, number), blobs)


def share(home: Path, blobs: Blobs, number: int = 2, **how: Any) -> FinishedOrder:
    action = SharePrivate(**({"kept_by": "train", "personal": HEAD} | how))
    return worker(home).execute(order(action, number), blobs)


def module_of(finished: FinishedOrder) -> dict[str, np.ndarray]:
    assert isinstance(finished.result, PrivateShared), finished.result
    assert finished.result.module.codec is Codec.FLOAT32
    (data,) = finished.blobs.values()
    assert finished.result.module.size_bytes == len(data)
    return from_bytes(data)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Train, {"personal": HEAD}),
        (Train, {"personal": BASE}),
        (TrainRod, {"poolable": True}),
        (TrainDbe, {"global_mean": Blobs().put({"mean": np.ones(D, np.float32)})}),
    ],
)
def test_what_was_kept_is_shared_under_its_own_names(
    tmp_path: Path, blobs: Blobs, kind: type[Train], fields: dict[str, Any]
) -> None:
    blobs.put({"mean": np.ones(D, np.float32)})
    train(tmp_path, blobs, kind, **fields)
    personal = fields.get("personal", ())
    action = SharePrivate(kept_by=kind.STEP, personal=personal)
    found = module_of(share(tmp_path, blobs, kept_by=kind.STEP, personal=personal))
    layout = find_kept(kind.STEP, personal, LAYOUT)
    expected = worker(tmp_path).make_device(order(action, 2), blobs).load_kept(kind.STEP, layout)
    assert expected is not None
    assert {name: t.shape for name, t in found.items()} == {t.name: t.shape for t in layout.tensors}
    assert all((found[name] == expected[name]).all() for name in found)


@pytest.mark.parametrize(("kind", "fields"), [(TrainDitto, {"proximal_lambda": 0.1}), (TrainRod, {"choose": "loss"})])
def test_what_learned_from_all_samples_stays_whether_any_is_sensitive_or_not(
    tmp_path: Path, blobs: Blobs, kind: type[Train], fields: dict[str, Any]
) -> None:
    train(tmp_path, blobs, kind, **fields)
    assert isinstance(share(tmp_path, blobs, kept_by=kind.STEP, personal=()).result, Declined)


def test_who_never_trained_declines_and_who_kept_something_else_fails(tmp_path: Path, blobs: Blobs) -> None:
    assert isinstance(share(tmp_path, blobs).result, Declined)
    train(tmp_path, blobs)
    assert isinstance(share(tmp_path, blobs, kept_by="train_rod", personal=()).result, Failed)
    assert isinstance(share(tmp_path, blobs, personal=BASE).result, Failed)


@pytest.mark.parametrize("kept", [{"personal": ()}, {"kept_by": "profile"}, {"kept_by": "dance"}])
def test_what_no_training_keeps_cannot_be_shared(tmp_path: Path, blobs: Blobs, kept: dict[str, Any]) -> None:
    train(tmp_path, blobs)
    result = share(tmp_path, blobs, **kept).result
    assert isinstance(result, Failed)
    assert "keeps nothing on the device" in result.reason


def test_the_worked_clip() -> None:
    """The norm over all tensors is 5."""
    np.testing.assert_allclose(clip_module(MODULE, 1.0)["w"], [[0.6, 0.0]], atol=1e-7)
    np.testing.assert_allclose(clip_module(MODULE, 1.0)["b"], [0.8], atol=1e-7)
    assert clip_module(MODULE, 1.0)["n"] == 7
    for clip in (5.0, 6.0):
        assert all((clip_module(MODULE, clip)[name] == MODULE[name]).all() for name in MODULE)


@given(st.floats(1e-3, 1e3), st.integers(0, 99))
def test_no_module_is_longer_than_its_clip(clip: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    module = {"w": (100 * rng.normal(size=(4, 3))).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    found = clip_module(module, clip)
    assert np.sqrt(sum((t.astype(float) ** 2).sum() for t in found.values())) <= clip * (1 + 1e-6)
    zero = {"w": np.zeros(3, np.float32)}
    assert (clip_module(zero, clip)["w"] == 0).all()


def test_noise_has_the_deviation_asked_for_and_leaves_counters_alone() -> None:
    found = add_noise({"w": np.zeros((200, 100), np.float32), "n": np.array(7)}, 0.3, np.random.default_rng(0))
    assert found["w"].dtype == np.float32
    assert float(found["w"].std()) == pytest.approx(0.3, rel=0.02)  # 20,000 draws: 4 standard errors
    assert abs(float(found["w"].mean())) < 0.01
    assert found["n"] == 7


def test_noise_is_drawn_once_and_is_not_the_orders(tmp_path: Path, blobs: Blobs) -> None:
    """Asked again, in another round or after a restart, the device sends the same bytes: no mean takes the noise off.

    Two devices that are equal in data, seed and order send different noise: it cannot be computed from the order.
    """
    for home in (tmp_path / "a", tmp_path / "b"):
        train(home, blobs)
    first = share(tmp_path / "a", blobs, 2, clip=1.0, noise=0.5)
    assert share(tmp_path / "a", blobs, 2, clip=1.0, noise=0.5) == first
    train(tmp_path / "a", blobs, number=3)
    assert share(tmp_path / "a", blobs, 4, clip=1.0, noise=0.5).blobs == first.blobs
    other = share(tmp_path / "b", blobs, 2, clip=1.0, noise=0.5)
    mine, others = module_of(first), module_of(other)
    assert all((mine[name] != others[name]).any() for name in mine)
    for how in ({"clip": 1.0, "noise": 0.1}, {"clip": 1.0}, {}):
        assert isinstance(share(tmp_path / "a", blobs, 5, **how).result, Failed)


def test_noise_without_a_clip_is_refused(tmp_path: Path, blobs: Blobs) -> None:
    train(tmp_path, blobs)
    assert isinstance(share(tmp_path, blobs, noise=0.5).result, Failed)


def test_a_clip_alone_scales_what_was_kept(tmp_path: Path, blobs: Blobs) -> None:
    train(tmp_path, blobs)
    plain, short = module_of(share(tmp_path, blobs)), module_of(share(tmp_path, blobs, clip=0.1))
    assert np.sqrt(sum((t**2).sum() for t in short.values())) == pytest.approx(0.1, rel=1e-5)
    ratios = np.concatenate([(short[name] / plain[name]).ravel() for name in plain])
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)
