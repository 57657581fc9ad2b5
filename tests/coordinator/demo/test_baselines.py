from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.demo import baselines
from coordinator.demo.run import partition_samples
from coordinator.methods import MethodSettings
from coordinator.simulation.settings import DemoSettings
from fedge.models import initial
from fedge.models.training import Network, mean_loss
from fedge.task import TaskSpec
from fedge.tasks import DeviceData, share_data
from fedge.tensors import Model


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskSpec, dict[str, DeviceData]]:
    cameras = partition_samples(DemoSettings(out=tmp_path_factory.mktemp("demo"), devices=4, samples=320))
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


async def test_local_training_learns_all_training_samples(
    federation: tuple[TaskSpec, dict[str, DeviceData]], tmp_path: Path
) -> None:
    task, data = federation
    found = await baselines.learn(task, data, MethodSettings(rounds=1), dict.fromkeys(data, 30), tmp_path)
    own = data["camera-0"]
    marked = own.x_train[own.sensitive], own.y_train[own.sensitive]
    assert baselines.accuracy(Network(task), found.local_only["camera-0"], *marked) > 0.9


async def test_fine_tuning_is_never_worse_on_validation_than_fedavg(
    federation: tuple[TaskSpec, dict[str, DeviceData]], tmp_path: Path
) -> None:
    task, data = federation
    found = await baselines.learn(task, data, MethodSettings(rounds=3), {}, tmp_path)
    network = Network(task)

    def loss(model: Model, own: DeviceData) -> float:
        network.load(model)
        return mean_loss(network, own.x_val, own.y_val)

    gains = [loss(found.fedavg, own) - loss(found.fedavg_finetuned[i], own) for i, own in data.items()]
    assert min(gains) >= 0
    assert max(gains) > 0


def test_accuracy_is_the_share_of_right_answers(device: tuple[TaskSpec, DeviceData]) -> None:
    task, data = device
    network = Network(task)
    _, model = initial(task, 0)
    predicted = network.logits(model, data.x_train).argmax(axis=1)
    assert baselines.accuracy(network, model, data.x_train, predicted) == 1.0
    half = predicted.copy()
    half[::2] = (half[::2] + 1) % 10
    assert baselines.accuracy(network, model, data.x_train, half) == pytest.approx(len(half) // 2 / len(half))
