"""What a device that its owner wants a student of installs, and what it learns from."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy import load
from edge_agent.device.device import Device
from edge_agent.device.student import load_unlabelled, replace_mixture
from edge_agent.device.worker import Worker
from edge_agent.samples import SampleStore
from export import Candidate, GateWeights, Mixture, student
from fedge.data.problems.regression import Regression
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.steps.mixture.install import Install
from fedge.tasks import DeviceData
from fedge.wire.messages import Role
from tests.support.orders import TASK, Blobs, device_data, order

FLAT = np.full(3, -np.log(3))


def made(*seeds: int) -> Mixture:
    candidates = tuple(
        Candidate(Role.PRIVATE if not k else Role.EXPERT, f"c{k}", build.make_initial_model(TASK, seed)[1], FLAT)
        for k, seed in enumerate(seeds)
    )
    return Mixture(candidates, beta=0.0, gate=GateWeights.make_untrained((6,), len(seeds)))


def of_owner(home: Path, data: DeviceData | None = None) -> Device:
    """A device whose owner wants a student."""
    own = Worker("d", TASK, data or device_data(), home, student=True)
    return own.make_device(order(Install(model=Blobs().model(1), method="fedavg")), Blobs())


def test_the_student_takes_the_place_of_the_mixture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mixture = made(1, 2)
    own = of_owner(tmp_path)
    own.write_bundle(mixture, "fedge", {"validation_loss": 1.0})
    plain = of_owner(tmp_path / "plain")
    plain.student = False
    plain.write_bundle(mixture, "fedge", {})
    found, wanted = (load(home / "bundles" / "1") for home in (tmp_path, tmp_path / "plain"))
    assert [c.name for c in found.manifest.candidates] == ["student"]
    assert len(wanted.manifest.candidates) == 2
    x = own.data.x_val
    assert np.abs(found.predict(x).probabilities - wanted.predict(x).probabilities).mean() < 0.05
    assert {"validation_loss", "student_loss", "mixture_loss"} <= set(found.manifest.metrics)
    assert "event=student_installed n=40 unlabelled=0 validation=15" in caplog.text


def test_a_student_that_is_worse_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(student, "MARGIN_NATS", -100.0)
    monkeypatch.setattr(student, "STEPS", 1)
    mixture = made(1, 2)
    found, metrics = replace_mixture(of_owner(tmp_path), mixture, {})
    assert found is mixture
    assert set(metrics) == {"student_loss", "mixture_loss"}
    assert "event=mixture_kept" in caplog.text


@pytest.mark.parametrize(
    ("mixture", "data", "reason"),
    [
        (made(1), device_data(), "one network already"),
        (made(1, 2), device_data(m=0), "to compare on"),
        (made(1, 2), device_data(n=0), "to learn from"),
    ],
)
def test_where_there_can_be_none_the_log_says_why(
    tmp_path: Path, mixture: Mixture, data: DeviceData, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert replace_mixture(of_owner(tmp_path, data), mixture, {"a": 1.0}) == (mixture, {"a": 1.0})
    assert reason in caplog.text


def test_other_problems_keep_their_mixture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = of_owner(tmp_path)
    own.task = TaskSpec(name="r", input_shape=(6,), model="mlp", asked=Regression(targets=("a",), mean=(0,), std=(1,)))
    mixture = made(1, 2)
    assert replace_mixture(own, mixture, {})[0] is mixture
    assert "a student is for classification, not for regression" in caplog.text


def test_it_also_learns_from_inputs_that_have_no_label(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_unlabelled(of_owner(tmp_path)).shape == (0, 6)
    assert not (tmp_path / "samples").exists(), "nothing is made by looking"
    (tmp_path / "samples.toml").write_text("[samples]\nunlabelled = 50\n")
    x = np.random.default_rng(3).normal(size=(40, 6)).astype(np.float32)
    with SampleStore(tmp_path, TASK) as store:
        for k, each in enumerate(x):
            store.add(each, None, origin="serve", sensitive=k % 2 == 0)
    found = load_unlabelled(of_owner(tmp_path))
    assert 15 < len(found) < 40, "some would be held out"
    assert {tuple(row) for row in found.tolist()} < {tuple(row) for row in x.tolist()}
    caplog.set_level(logging.INFO)
    replace_mixture(of_owner(tmp_path), made(1, 2), {})
    assert f"n={40 + len(found)} unlabelled={len(found)} " in caplog.text


def test_inputs_without_a_label_are_turned_as_the_samples_are(tmp_path: Path) -> None:
    task = TaskSpec(name="image", classes=("a", "b"), input_shape=(1, 2, 2), model="mlp")
    (tmp_path / "samples.toml").write_text("[samples]\nunlabelled = 50\n")
    x = np.arange(4 * 20, dtype=np.float32).reshape(20, 1, 2, 2) + 0.5
    with SampleStore(tmp_path, task) as store:
        for each in x:
            store.add(each, None, origin="serve")
    own = of_owner(tmp_path)
    own.task = task
    straight = load_unlabelled(own)
    own.data = replace(own.data, quarters=1)
    np.testing.assert_array_equal(load_unlabelled(own), np.rot90(straight, 1, axes=(2, 3)))
