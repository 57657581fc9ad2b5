from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.demo import baselines
from coordinator.demo.run import DemoSettings, deal
from coordinator.methods import MethodSettings
from fedge.messages import Sgd
from fedge.models import initial
from fedge.models.training import Network, mean_loss
from fedge.task import TaskSpec
from fedge.tasks import DeviceData, share_data


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskSpec, dict[str, DeviceData]]:
    cameras = deal(DemoSettings(out=tmp_path_factory.mktemp("demo"), agents=4, samples=320))
    return cameras.task, {i: share_data(cameras.task, share) for i, share in cameras.shares.items()}


@pytest.fixture
def device(federation: tuple[TaskSpec, dict[str, DeviceData]]) -> tuple[TaskSpec, DeviceData]:
    task, data = federation
    return task, data["camera-0"]


async def test_all_baselines_with_the_budget_they_were_given(
    federation: tuple[TaskSpec, dict[str, DeviceData]], tmp_path: Path
) -> None:
    task, data = federation
    settings = MethodSettings(rounds=3, seed=1)
    participations = {"camera-0": 3, "camera-1": 0, "camera-2": 3, "camera-3": 3}
    found = await baselines.learn(task, data, settings, participations, tmp_path / "a")
    _, first = initial(task, 1)
    assert [line.round for line in found.history] == [1, 2, 3]
    assert [line.answered for line in found.history] == [4, 4, 4]
    assert np.array_equal(found.local_only["camera-1"].params, first.params), "no participation, no step"
    assert not np.array_equal(found.local_only["camera-0"].params, first.params)
    assert not np.array_equal(found.fedavg.params, first.params)
    again = await baselines.learn(task, data, settings, participations, tmp_path / "b")
    assert np.array_equal(found.fedavg.params, again.fedavg.params)
    for device_id in data:
        assert np.array_equal(found.local_only[device_id].params, again.local_only[device_id].params)
        assert np.array_equal(found.fedavg_finetuned[device_id].params, again.fedavg_finetuned[device_id].params)


async def test_fedavg_never_sees_a_sensitive_sample(
    federation: tuple[TaskSpec, dict[str, DeviceData]], tmp_path: Path
) -> None:
    task, data = federation
    settings = MethodSettings(rounds=2)
    relabelled = {
        i: replace(own, y_train=np.where(own.sensitive, 9 - own.y_train, own.y_train)) for i, own in data.items()
    }
    one = await baselines.learn(task, data, settings, {}, tmp_path / "a")
    other = await baselines.learn(task, relabelled, settings, {}, tmp_path / "b")
    assert np.array_equal(one.fedavg.params, other.fedavg.params)
    assert not np.array_equal(one.fedavg_finetuned["camera-0"].params, other.fedavg_finetuned["camera-0"].params)


def test_local_training_learns_all_training_samples(device: tuple[TaskSpec, DeviceData]) -> None:
    task, data = device
    network = Network(task)
    _, first = initial(task, 0)
    model = baselines.trained(network, first, data, Sgd(), 300, np.random.default_rng(0))
    assert baselines.accuracy(network, model, data.x_train[data.sensitive], data.y_train[data.sensitive]) > 0.9


def test_fine_tuning_is_never_worse_on_validation_than_its_start(device: tuple[TaskSpec, DeviceData]) -> None:
    task, data = device
    network = Network(task)
    _, start = initial(task, 0)
    tuned = baselines.fine_tuned(network, start, data, Sgd(), np.random.default_rng(0))
    losses = []
    for model in (start, tuned):
        network.load(model)
        losses.append(mean_loss(network, data.x_val, data.y_val))
    assert losses[1] < losses[0]


def test_fine_tuning_keeps_its_start_where_every_step_harms(device: tuple[TaskSpec, DeviceData]) -> None:
    task, data = device
    network = Network(task)
    _, first = initial(task, 0)
    good = baselines.trained(network, first, data, Sgd(), 300, np.random.default_rng(0))
    misled = replace(data, y_train=(data.y_train + 1) % 10)
    kept = baselines.fine_tuned(network, good, misled, Sgd(), np.random.default_rng(0))
    assert np.array_equal(kept.params, good.params)


def test_without_validation_the_number_of_steps_is_fixed(device: tuple[TaskSpec, DeviceData]) -> None:
    task, data = device
    network = Network(task)
    _, start = initial(task, 0)
    blind = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])
    tuned = baselines.fine_tuned(network, start, blind, Sgd(), np.random.default_rng(3))
    expected = baselines.trained(network, start, data, Sgd(), 40, np.random.default_rng(3))
    assert np.array_equal(tuned.params, expected.params)


def test_accuracy_is_the_share_of_right_answers(device: tuple[TaskSpec, DeviceData]) -> None:
    task, data = device
    network = Network(task)
    _, model = initial(task, 0)
    predicted = network.logits(model, data.x_train).argmax(axis=1)
    assert baselines.accuracy(network, model, data.x_train, predicted) == 1.0
    half = predicted.copy()
    half[::2] = (half[::2] + 1) % 10
    assert baselines.accuracy(network, model, data.x_train, half) == pytest.approx(len(half) // 2 / len(half))
