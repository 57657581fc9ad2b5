"""The fleet of workers in this process."""

import numpy as np
import pytest

from coordinator.fleet.simulated import run
from coordinator.methods import MethodSettings
from coordinator.methods.fedavg import FedAvg
from fedge.errors import ProtocolError
from fedge.messages import Codec, Declined, Sgd, Start, Train, Trained
from tests.support.simulation import digits


def test_devices_are_all_workers_in_order_and_tell_what_may_be_shared(tmp_path) -> None:
    fleet, *_ = digits(tmp_path, n=3)
    devices = fleet.devices()
    assert [device.id for device in devices] == ["d00", "d01", "d02"]
    assert all(device.context is not None and device.n_samples == device.context.n_samples for device in devices)


async def test_answers_are_the_workers_and_their_updates_can_be_read(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    order = Train(starts=(Start(model=first),), sgd=Sgd(steps=2), codec=Codec.FLOAT32)
    answers = await fleet.run("train", {"d02": order, "d00": order})
    assert list(answers) == ["d00", "d02"]
    for answer in answers.values():
        assert isinstance(answer.result, Trained)
        change = fleet.get(answer.result.update, layout)
        assert 0 < np.abs(change.params).max() < 1
    assert fleet.bytes_up == sum(answer.result.update.size_bytes for answer in answers.values())
    assert fleet.bytes_down == 2 * first.size_bytes
    again = await fleet.run("train", {"d00": order})
    assert again["d00"].result == answers["d00"].result


async def test_tensors_that_nobody_needs_are_forgotten(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    other = fleet.put({"v": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(fleet.get_tensors(other)["v"], np.zeros(3))
    fleet.keep_only({first.digest})
    assert len(fleet.get(first, layout).params) == layout.n_params
    with pytest.raises(ProtocolError, match="unknown-blob"):
        fleet.get(other, layout)


async def test_a_run_goes_to_its_end_and_tells_of_each_round(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    method = FedAvg(MethodSettings(rounds=2, sgd=Sgd(steps=2)))
    told: list[int] = []
    state = await run(method, method.initial(layout, first), fleet, lambda summary: told.append(summary["round"]))
    assert method.done(state)
    assert told == [1, 2, 2]
    assert not any(isinstance(result, Declined) for result in state.installed.values())
