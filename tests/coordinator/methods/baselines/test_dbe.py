from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.fleet.fleet import Answer
from coordinator.methods.baselines.dbe import Dbe, DbeState
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.settings import MethodSettings
from fedge.errors import ConfigError
from fedge.steps.descriptions.mean_features import FeaturesMeasured, MeanFeatures
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train
from fedge.steps.training.train_dbe import TrainDbe
from fedge.tensors.layout import Codec, Layout, TensorInfo
from fedge.wire.messages import BlobRef
from tests.support.simulation import Fleet, digits, rounds

SETTINGS = MethodSettings(rounds=4, sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32")


def federation(home: Path) -> tuple[Fleet, Any, Dbe, DbeState]:
    fleet, layout, first, _ = digits(home, n=4, limit=400)
    method = Dbe(SETTINGS)
    return fleet, layout, method, method.init(layout, first)


async def test_round_1_is_fedavgs_and_ends_with_the_mean_of_all_features(tmp_path: Path) -> None:
    fleet, layout, method, state = federation(tmp_path / "a")
    after = await rounds(method, state, fleet)
    other, _, first, _ = digits(tmp_path / "b", n=4, limit=400)
    other.round = 1
    fedavg = await FedAvg(SETTINGS).advance(FedAvg(SETTINGS).init(layout, first), other)
    assert after.model == fedavg.model
    assert not (tmp_path / "a" / "d00" / "kept").exists()
    assert after.global_mean is not None
    w = fleet.get(after.model, layout)
    every = np.concatenate([k.network.compute_features(w, k.data.shared[0]) for k in fleet.workers.values()])
    np.testing.assert_allclose(fleet.get_tensors(after.global_mean)["mean"], every.mean(axis=0), atol=1e-5)


async def test_g_is_measured_once_and_every_later_round_is_drawn_to_it(tmp_path: Path) -> None:
    fleet, _, method, state = federation(tmp_path)
    for _ in range(3):
        state = await rounds(method, state, fleet)
    actions = [(number, action) for number, _, _, action in fleet.orders]
    assert [number for number, action in actions if isinstance(action, MeanFeatures)] == [1] * 4
    drawn = {
        (number, action.STEP, getattr(action, "global_mean", None))
        for number, action in actions
        if isinstance(action, Train)
    }
    assert state.global_mean is not None
    later = ("train_dbe", state.global_mean)
    assert drawn == {(1, "train", None), (2, *later), (3, *later)}
    assert {action.kappa for _, action in actions if isinstance(action, TrainDbe)} == {1.0}


async def test_if_nobody_tells_a_mean_the_next_round_is_like_the_first(tmp_path: Path) -> None:
    fleet, _, method, state = federation(tmp_path)
    everybody = frozenset(fleet.workers)

    def no_means(step: str, _: object) -> None:
        fleet.unresponsive = everybody if step == "mean" else frozenset()

    fleet.before = no_means
    state = await rounds(method, state, fleet)
    assert (state.global_mean, method.find_kept_step(state)) == (None, None)
    fleet.before = lambda *_: None
    fleet.unresponsive = frozenset()
    state = await rounds(method, state, fleet)
    assert state.global_mean is not None
    assert not (tmp_path / "d00" / "kept").exists()


async def test_means_of_another_length_or_of_no_samples_change_nothing(tmp_path: Path) -> None:
    fleet, _, method, state = federation(tmp_path)

    def odd(step: str, answers: dict[str, Answer]) -> None:
        if step == "mean":
            d = len(answers["d00"].result.mean)  # type: ignore[union-attr]
            answers["d00"] = Answer("d00", FeaturesMeasured(mean=(9.0,) * (d + 1), n_samples=10**9))
            answers["d01"] = Answer("d01", FeaturesMeasured(mean=(9.0,) * d, n_samples=0))
            answers["d02"] = Answer("d02", FeaturesMeasured(mean=(1.0,) * d, n_samples=3))
            answers["d03"] = Answer("d03", FeaturesMeasured(mean=(5.0,) * d, n_samples=1))

    fleet.change = odd
    state = await rounds(method, state, fleet)
    assert state.global_mean is not None
    np.testing.assert_allclose(fleet.get_tensors(state.global_mean)["mean"], (3 * 1 + 1 * 5) / 4)


async def test_the_offset_is_kept_over_the_rounds(tmp_path: Path) -> None:
    fleet, layout, method, state = federation(tmp_path)
    for _ in range(3):
        state = await rounds(method, state, fleet)
    served = fleet.get(method.get_model(state, "d00"), layout)
    mine = fleet.workers["d00"].make_personal_model(served)
    differs = np.flatnonzero(mine.params != served.params)
    assert set(differs) <= set(range(layout.n_params - 10, layout.n_params))  # the head's bias alone
    assert len(differs)


@pytest.mark.parametrize("number", [1e300, 1e39])
async def test_a_mean_that_is_no_float32_is_left_out(tmp_path: Path, number: float) -> None:
    fleet, _, method, state = federation(tmp_path)

    def one_lies(_: str, answers: dict[str, Answer]) -> None:
        result = answers["d00"].result
        if isinstance(result, FeaturesMeasured):
            lie = FeaturesMeasured(mean=(number,) * len(result.mean), n_samples=2**53)
            answers["d00"] = Answer("d00", lie)

    fleet.change = one_lies
    state = await rounds(method, state, fleet)
    assert state.global_mean is not None
    assert np.abs(fleet.get_tensors(state.global_mean)["mean"]).max() < 100
    assert (await rounds(method, state, fleet)).history[-1].answered == 4


def test_more_features_than_a_message_takes_are_refused_before_the_first_round() -> None:
    layout = Layout(
        tensors=tuple(
            TensorInfo(name=name, shape=shape, layer="head" if name in {"w", "c"} else "")
            for name, shape in {"a": (4097, 2), "b": (4097,), "w": (3, 4097), "c": (3,)}.items()
        )
    )
    with pytest.raises(ConfigError, match="has 4097, at most 4096"):
        Dbe(SETTINGS).init(layout, BlobRef(digest="0" * 64, size_bytes=1))
