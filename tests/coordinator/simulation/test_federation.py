from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.fleet.simulated import devices
from coordinator.simulation.federation import KEPT, make_fleet, make_hardware, partition_samples
from coordinator.simulation.settings import Scenario
from fedge.data import preprocessing
from fedge.errors import ConfigError
from fedge.tasks import load_pool
from tests.fedge.tasks.test_har import write


def test_every_sample_is_in_one_place_and_the_global_test_set_in_none_of_the_devices() -> None:
    federation = partition_samples(Scenario(devices=4, samples=500, global_test=0.2, server_data=0.3), 3)
    assert federation.global_test is not None
    assert federation.server_data is not None
    assert (len(federation.server_data[1]), len(federation.global_test[1])) == (30, 70)
    raw = [part for share in federation.shares.values() for part in (share.x_train, share.x_val, share.x_test)]
    parts = [preprocessing.preprocess(federation.task, x) for x in raw] + [
        federation.global_test[0],
        federation.server_data[0],
    ]
    expected = preprocessing.preprocess(federation.task, load_pool("digits", seed=3, limit=500).x)
    assert sorted(row.tobytes() for x in parts for row in x) == sorted(row.tobytes() for row in expected)


def test_the_global_test_set_has_all_classes_and_is_seen_by_all_cameras() -> None:
    plain, turned = (partition_samples(Scenario(partition=how, n_groups=2), 0) for how in ("dirichlet", "groups"))
    assert plain.global_test is not None
    assert turned.global_test is not None
    assert np.bincount(plain.global_test[1], minlength=10).min() > 5
    upright = {image.tobytes() for image in plain.global_test[0]}
    seen = [image.tobytes() in upright for image in turned.global_test[0]]
    assert sum(seen) == len(seen) // 2 + len(seen) % 2


def test_without_a_share_there_is_none() -> None:
    federation = partition_samples(Scenario(devices=3, samples=200, global_test=0.0), 0)
    assert federation.global_test is None
    assert federation.server_data is None


def test_equal_seeds_give_equal_federations() -> None:
    scenario = Scenario(devices=3, samples=200)
    one, again, other = (partition_samples(scenario, seed) for seed in (1, 1, 2))
    assert one.first.params.tobytes() == again.first.params.tobytes() != other.first.params.tobytes()
    for i, share in one.shares.items():
        assert share.x_train.tobytes() == again.shares[i].x_train.tobytes()


def test_twenty_devices_or_as_many_as_people(tmp_path: Path) -> None:
    har = Scenario(task="uci-har", data=write(tmp_path / "har.npz"), partition="natural", global_test=0.0)
    assert list(partition_samples(har, 0).shares) == ["device-0", "device-1", "device-2"]
    assert len(partition_samples(Scenario(), 0).shares) == 20


@pytest.mark.parametrize(
    ("scenario", "n_train"),
    [
        ({"devices": 10_001}, 10_001),
        ({"devices": 20_003, "participation": 0.5}, 10_002),
        ({"devices": 4}, 4),
        ({"devices": 8, "min_cohort": 9}, 8),
        ({"devices": 8, "late_joiners": 4}, 4),
    ],
)
def test_devices_that_no_masked_sum_can_cover_are_refused_at_once(scenario: dict[str, Any], n_train: int) -> None:
    with pytest.raises(ConfigError, match=f"to 10000 devices, and {n_train} train in a round: change --devices or"):
        partition_samples(Scenario(masking=True, average="mean", **scenario), 0)


def test_another_network() -> None:
    federation = partition_samples(Scenario(devices=2, samples=100, model="cnn"), 0)
    assert federation.task.model == "cnn"
    assert federation.layout.n_params > 2410
    with pytest.raises(ConfigError, match="unknown model"):
        partition_samples(Scenario(devices=2, samples=100, model="transformer"), 0)


def test_steady_machines_are_the_mixed_ones_without_absence() -> None:
    ids = [f"d{i}" for i in range(7)]
    mixed, steady = (make_hardware(kind, ids, 1) for kind in ("mixed", "steady"))
    assert make_hardware("none", ids, 1) is None
    assert mixed == devices.draw_mixed(ids, seed=1)
    assert mixed is not None
    assert steady is not None
    for i in ids:
        assert (steady[i].availability, steady[i].drops) == (1.0, 0.0)
        assert (steady[i].speed, steady[i].up_mbit_s) == (mixed[i].speed, mixed[i].up_mbit_s)


def test_the_fleet_has_a_worker_and_a_folder_for_each_device(tmp_path: Path) -> None:
    scenario = Scenario(devices=3, samples=200, student=True)
    federation = partition_samples(scenario, 0)
    fleet, first, workers = make_fleet(federation, scenario, 0, tmp_path)
    assert [device.id for device in fleet.get_devices()] == list(federation.shares) == list(workers)
    np.testing.assert_array_equal(fleet.get(first, federation.layout).params, federation.first.params)
    for i, share in federation.shares.items():
        assert workers[i].data.n_train == len(share.y_train)
        assert workers[i].home == tmp_path / i
        assert workers[i].student


@pytest.mark.parametrize("marks", ["samples", "classes"])
def test_devices_of_their_own_making_are_counted_right_and_not_all_kept(tmp_path: Path, marks: str) -> None:
    scenario = Scenario(partition="generated", devices=600, min_samples=20, sensitive=0.3, marks=marks)
    federation = partition_samples(scenario, 1)
    fleet, _, workers = make_fleet(federation, scenario, 1, tmp_path)
    assert [device.n_samples for device in fleet.get_devices()] == [worker.data.n_shared for worker in workers.values()]
    assert workers._made.cache_info().currsize == KEPT
    assert len(federation.draw_measured(7, 1)) == 7
    assert federation.draw_measured(7, 1) != federation.draw_measured(7, 2)


def test_devices_that_are_not_measured_leave_after_the_last_round_of_training(tmp_path: Path) -> None:
    scenario = Scenario(devices=9, samples=300, rounds=3, min_samples=4, measured=4)
    federation = partition_samples(scenario, 0)
    fleet, *_ = make_fleet(federation, scenario, 0, tmp_path)
    there = []
    for fleet.round in (3, 4):
        there.append(tuple(device.id for device in fleet.get_devices()))
    assert there == [tuple(federation.shares), federation.draw_measured(4, 0)]
