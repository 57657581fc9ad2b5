from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.baselines.ditto import Ditto
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.tasks import Partitioning, load_pool, make_device_data, partition_pool
from fedge.tensors.layout import Codec, unflatten
from fedge.wire.messages import Role
from tests.support.orders import roles_of
from tests.support.simulation import digits


def settings(**options: float) -> MethodSettings:
    return MethodSettings(
        rounds=3, sgd=Sgd(steps=6), codec=Codec.FLOAT32, down="float32", participation=0.75, options=dict(options)
    )


async def test_the_global_model_is_fedavgs(tmp_path: Path) -> None:
    one, layout, first, _ = digits(tmp_path / "1", n=4, limit=400)
    two, _, _, _ = digits(tmp_path / "2", n=4, limit=400)
    fedavg = await run_rounds(FedAvg(settings()), FedAvg(settings()).init(layout, first), one)
    ditto = await run_rounds(Ditto(settings()), Ditto(settings()).init(layout, first), two)
    found, expected = two.get(ditto.model, layout), one.get(fedavg.model, layout)
    np.testing.assert_allclose(found.params, expected.params, atol=1e-6)  # FedAvg's devices train side by side
    assert ditto.participations == fedavg.participations


@pytest.mark.parametrize("given", [settings(proximal_lambda=0.0), settings(proximal_lambda=50.0)])
async def test_lambda_is_the_strength_of_the_pull(tmp_path: Path, given: MethodSettings) -> None:
    """Strong, the personal models are near the global one of the round's start; with 0 they go their own ways."""
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    given_lambda = given.options["proximal_lambda"]
    gentle = MethodSettings(rounds=3, sgd=Sgd(steps=30, momentum=0.0, learning_rate=0.02), options=given.options)
    method = Ditto(gentle)
    state = method.init(layout, first)
    for number in (1, 2, 3):
        fleet.round = number
        before = fleet.get(state.model, layout).params
        state = await method.advance(state, fleet)
    served = fleet.get(method.get_model(state, ""), layout)
    distances = [
        np.linalg.norm(worker.make_personal_model(served).params - before) for worker in fleet.workers.values()
    ]
    stepped = np.linalg.norm(before - fleet.get(first, layout).params)
    if given_lambda:
        assert max(distances) < 0.1 * stepped
    else:
        assert min(distances) > 0.1 * stepped


async def test_it_splits_nothing_and_takes_a_network_without_a_head(tmp_path: Path) -> None:
    samples = load_pool("digits", seed=0, limit=200)
    spec = msgspec.structs.replace(samples.spec, model="tests.support.networks:without_bias", model_options={})
    layout, first = make_initial_model(spec, 0)
    shares = enumerate(partition_pool(samples, 2, Partitioning(partition="iid", sensitive=0.3), seed=0))
    workers = {f"d{k}": Worker(f"d{k}", spec, make_device_data(spec, share), tmp_path / f"d{k}") for k, share in shares}
    fleet = SimulatedFleet(spec, layout, workers, seed=0)
    method = Ditto(settings())
    state = await run_rounds(method, method.init(layout, fleet.put(unflatten(first, layout))), fleet)
    assert {i: roles_of(workers[i].home, done) for i, done in state.installed.items()} == dict.fromkeys(
        workers, (Role.PRIVATE,)
    )
