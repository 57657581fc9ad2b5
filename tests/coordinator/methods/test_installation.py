"""Bundles at the end, also on devices that do not train."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

import deploy
from coordinator.fleet.fleet import Answer
from coordinator.methods.catalogue import make_method
from coordinator.methods.installation import equip
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.steps.contract import Action
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.steps.sgd import Sgd
from fedge.tasks import DeviceData
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef
from tests.support.simulation import Fleet, digits


class Watch(Fleet):
    """A fleet that notes every action."""

    async def run(self, step: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.given = [*getattr(self, "given", []), *actions.items()]
        return await super().run(step, actions)


def with_two_that_do_not_train(home: Path) -> tuple[Watch, Layout, BlobRef]:
    """Three devices of digits and the devices x and y, which only predict."""
    small, layout, first, _ = digits(home, n=3, limit=200)
    x = small.workers["d00"].data.x_val
    data = DeviceData.from_inputs(x)
    others = {i: Worker(i, small.task, data, home / i, trains=False) for i in ("x", "y")}
    fleet = Watch(small.task, layout, dict(small.workers) | others, seed=0)
    fleet._blobs = small._blobs
    return fleet, layout, first


@pytest.mark.parametrize("name", ["fedavg", "fedge", "ditto"])
async def test_devices_that_do_not_train_end_with_the_global_model(tmp_path: Path, name: str) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    method = make_method(name, MethodSettings(rounds=2, sgd=Sgd(steps=3)))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02", "x", "y"}
    assert set(state.participations) == {"d00", "d01", "d02"}
    assert {type(action) for i, action in fleet.given if i in "xy"} == {InstallBundle}
    assert state.installed["x"] == state.installed["y"]
    device = fleet.workers["d00"]
    x = device.data.x_val
    logits = device.network.compute_logits(fleet.get(method.get_model(state, "x"), layout), x)
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    how = device.task.preprocessing
    bundle = deploy.load(tmp_path / "y" / "bundles" / "1")
    assert bundle.manifest.release == state.installed["y"].release
    assert bundle.manifest.method == name
    np.testing.assert_allclose(bundle.predict((x * how.std + how.mean) * how.scale).probabilities, expected, atol=1e-4)


async def test_where_no_whole_model_travels_they_are_not_asked(tmp_path: Path) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    method = make_method("fedper", MethodSettings(rounds=1, sgd=Sgd(steps=1)))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02"}
    assert not {i for i, _ in fleet.given} & {"x", "y"}


async def test_a_network_that_cannot_be_a_bundle_leaves_them_without_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    fleet.task = msgspec.structs.replace(fleet.task, model="no_such_package:net")
    method = make_method("fedavg", MethodSettings(rounds=0))
    before = method.init(layout, first)
    after = await equip(method, before, fleet, dict.fromkeys(("x", "y"), first))
    assert after == before
    assert caplog.text.count("event=no_bundle") == 1
    assert "no_such_package" in caplog.text
