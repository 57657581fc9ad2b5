from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.methods.baselines.fedper import FedPer
from coordinator.methods.settings import MethodSettings
from fedge.models.training import Trainer
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import BASE, HEAD, Codec
from tests.support.simulation import digits

SETTINGS = MethodSettings(rounds=2, sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32")


async def test_two_rounds_against_a_slow_oracle(tmp_path: Path) -> None:
    """The pseudocode: W_B <- sum_j (n_j / n) W_B^j; the head of each device goes on where its last round ended."""
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    seeds: dict[tuple[int, str], int] = {}
    for i, worker in fleet.workers.items():
        inner = worker.execute

        def noting(order, *args, inner=inner, i=i, **more):  # type: ignore[no-untyped-def]
            seeds[order.round, i] = order.seed
            return inner(order, *args, **more)

        worker.execute = noting  # type: ignore[method-assign]
    method = FedPer(SETTINGS)
    state = method.init(layout, first)
    for number in (1, 2):
        fleet.round = number
        state = await method.advance(state, fleet)

    base_layout = layout.select(BASE)
    whole = {i: fleet.get(first, layout) for i in fleet.workers}
    n = np.array([worker.data.n_shared for worker in fleet.workers.values()])
    for number in (1, 2):
        bases = []
        for i, worker in fleet.workers.items():
            network = worker.network
            network.load(whole[i])
            rng = np.random.default_rng(seeds[number, i])
            Trainer(network, *worker.data.shared, SETTINGS.sgd, rng).run(4)
            whole[i] = network.dump()
            bases.append(whole[i].params[: base_layout.n_params].astype(np.float64))
        mean = (n @ np.stack(bases) / n.sum()).astype(np.float32)
        for model in whole.values():
            model.params[: base_layout.n_params] = mean
    np.testing.assert_allclose(fleet.get(state.model, base_layout).params, mean, atol=1e-5)
    for i, worker in fleet.workers.items():
        found = worker.make_personal_model(fleet.get(method.get_model(state, i), layout))
        np.testing.assert_allclose(found.params, whole[i].params, atol=1e-5)


def test_the_head_stays() -> None:
    method = FedPer(SETTINGS)
    assert method.personal == HEAD
