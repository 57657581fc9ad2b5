from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.methods.baselines.personal.fedbabu import FedBabu
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.models.training import Trainer
from fedge.steps.mixture.install import Install
from fedge.steps.personal.train_babu import TrainBabu
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.tensors.layout import BASE, Codec
from fedge.wire.messages import Role
from tests.support.simulation import digits, predicted, roles, rounds

SETTINGS = MethodSettings(rounds=2, sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32")


async def test_a_round_is_the_mean_of_bases_that_learned_under_the_first_head(tmp_path: Path) -> None:
    """Algorithm 1 for each device by hand: SGD moves the base alone, from the mean of the round before."""
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=300)
    method, n_base = FedBabu(SETTINGS), layout.select(BASE).n_params
    state = method.init(layout, first)
    w_0 = fleet.get(first, layout)
    for _ in range(2):
        start = fleet.get(state.whole, layout)
        seeds: dict[str, int] = {}
        for i, worker in fleet.workers.items():
            inner = worker.execute

            def noting(order, *args, inner=inner, i=i, seeds=seeds, **more):  # type: ignore[no-untyped-def]
                seeds[i] = order.seed
                return inner(order, *args, **more)

            worker.execute = noting  # type: ignore[method-assign]
        state = await rounds(method, state, fleet)
        bases, sizes = [], []
        for i, worker in fleet.workers.items():
            network = worker.network
            network.load(start)
            x, y = worker.data.shared
            Trainer(network, x, y, SETTINGS.sgd, np.random.default_rng(seeds[i]), moves="base").run(4)
            bases.append(network.dump().params[:n_base].astype(np.float64))
            sizes.append(worker.data.n_shared)
        now = fleet.get(state.whole, layout).params
        np.testing.assert_allclose(now[:n_base], np.average(bases, axis=0, weights=sizes), atol=1e-5)
        np.testing.assert_array_equal(now[n_base:], w_0.params[n_base:])
        assert (now[:n_base] != start.params[:n_base]).any()


async def test_only_the_base_leaves_and_the_end_is_fine_tuned_head_and_all(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=300)
    method = FedBabu(SETTINGS)
    state = await rounds(method, method.init(layout, first), fleet)
    base = {info.name for info in layout.select(BASE).tensors}
    sent = [answer.result for answer in fleet.heard if isinstance(answer.result, Trained)]
    assert len(sent) == 3
    assert all(set(fleet.get_tensors(result.update)) == base for result in sent)
    assert all(order.personal == ("head",) for order in fleet.sent(TrainBabu).values())
    state = await run_rounds(method, state, fleet)
    assert all(order.fine_tune is not None for order in fleet.sent(Install).values())
    assert set(roles(fleet, state).values()) == {(Role.PRIVATE,)}
    for worker in fleet.workers.values():
        x, y = worker.data.x_train, worker.data.y_train
        before = worker.network.compute_logits(fleet.get(state.whole, layout), x).argmax(axis=1)
        assert (predicted(worker, x).argmax(axis=1) == y).mean() > (before == y).mean()


def test_fine_tuning_is_not_asked_for_twice() -> None:
    with pytest.raises(ConfigError, match="fine-tuning of every device anyway"):
        make_method("fedbabu+ft", SETTINGS)
