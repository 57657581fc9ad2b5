"""IFCA: who chooses which model, the means of the clusters, the initial models, and groups that it finds."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.shared.ifca import Ifca, IfcaState, randomise_tensors
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layout import Codec, Layout, TensorInfo
from tests.support.simulation import Fleet, digits, predicted, rounds

EXACT = {"sgd": Sgd(steps=4), "codec": Codec.FLOAT32, "down": "float32"}


def made(home: Path, k: int = 3, *, n: int = 6, **changes: object) -> tuple[Fleet, Layout, Ifca, IfcaState]:
    fleet, layout, first, _ = digits(home, n=n, limit=400)
    method = Ifca(MethodSettings(**{"rounds": 3, "options": {"n_clusters": k}, **EXACT, **changes}))
    return fleet, layout, method, method.init(layout, first)


async def test_a_round_is_the_mean_of_those_who_chose_each_model(tmp_path: Path) -> None:
    """Every device chooses the model with the smallest mean loss on D_L; a model that nobody chose stays."""
    fleet, layout, method, state = made(tmp_path, 4)
    state = await rounds(method, state, fleet, 1)
    (order,) = {id(a): a for _, _, _, a in fleet.orders if isinstance(a, Train)}.values()
    starts = [fleet.get(start.model, layout) for start in order.starts]
    assert len({start.params.tobytes() for start in starts}) == 4
    for i, worker in fleet.workers.items():
        x, y = worker.data.shared
        logits = [worker.network.compute_logits(start, x).astype(np.float64) for start in starts]
        losses = [(np.logaddexp.reduce(each, axis=1) - each[range(len(y)), y]).mean() for each in logits]
        assert state.clusters[i] == np.argmin(losses)
    updates = {answer.device_id: answer.result for answer in fleet.heard if isinstance(answer.result, Trained)}
    for j, start in enumerate(starts):
        of = [u for i, u in updates.items() if state.clusters[i] == j]
        found = fleet.get(state.models[j], layout).params
        if not of:
            np.testing.assert_array_equal(found, start.params)
            continue
        n = np.array([u.n_samples for u in of])
        deltas = np.stack([fleet.get(u.update, layout).params for u in of])
        np.testing.assert_allclose(found, start.params + n @ deltas / n.sum(), atol=1e-6)
    assert len(set(state.clusters.values())) > 1


async def test_with_one_model_it_is_fedavg(tmp_path: Path) -> None:
    fleet, layout, method, state = made(tmp_path / "a", 1)
    one = await run_rounds(method, state, fleet)
    other, _, first, _ = digits(tmp_path / "b", limit=400)
    fedavg = FedAvg(MethodSettings(rounds=3, **EXACT))  # type: ignore[arg-type]
    two = await run_rounds(fedavg, fedavg.init(layout, first), other)
    assert method.get_model(one, "d00") == two.model


async def test_it_finds_groups_and_at_the_end_each_device_chooses_again(tmp_path: Path) -> None:
    """Cameras turned by 0 and 180 degrees. d05, which never trained, gets the model of its group, too."""
    fleet, layout, first, group_of = digits(tmp_path, n=6, limit=900, alpha=100.0, n_groups=2)
    method = Ifca(MethodSettings(rounds=12, sgd=Sgd(steps=10), options={"n_clusters": 4}))
    fleet.before = lambda label, _: setattr(fleet, "unresponsive", frozenset({"d05"} if label == "train" else ()))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert "d05" not in state.participations
    assert len({(state.clusters[i], g) for i, g in group_of.items()}) == len(set(group_of.values()))
    summary = method.summarise(state)
    found = summary["clusters"]
    assert summary["split"]
    assert sorted(itertools.chain(*found.values())) == sorted(fleet.workers)
    x, y = fleet.data("d05").labelled
    assert (predicted(fleet.workers["d05"], x).argmax(axis=1) == y).mean() > 0.7


async def test_without_answers_and_with_too_few_all_models_stay(tmp_path: Path) -> None:
    fleet, _, method, state = made(tmp_path, n=2, min_reports=2)
    fleet.unresponsive = frozenset(fleet.workers)
    state = await rounds(method, state, fleet)
    assert (state.clusters, len(state.models)) == ({}, 3)
    fleet.unresponsive = frozenset({"d01"})
    after = await rounds(method, state, fleet)
    assert after.models == state.models
    assert list(after.clusters) == ["d00"]


def test_an_unknown_device_gets_the_model_of_the_largest_cluster(tmp_path: Path) -> None:
    fleet, layout, method, state = made(tmp_path, n=1)
    models = method.draw_models(state, fleet)
    known = IfcaState(
        round=1, layout=layout, model=state.model, models=models, clusters={"a": 2, "b": 1, "c": 1, "d": 2}
    )
    assert [method.get_model(known, i) for i in ("a", "b", "new")] == [models[2], models[1], models[1]]


def test_shuffled_tensors_have_the_same_numbers_in_another_order() -> None:
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.arange(3)}
    infos = (TensorInfo(name="w", shape=(3, 4)), TensorInfo(name="n", shape=(3,), kind="counter"))
    found = randomise_tensors(tensors, Layout(tensors=infos), np.random.default_rng(0))
    assert list(found) == ["w"]
    assert found["w"].shape == (3, 4)
    assert sorted(found["w"].ravel()) == list(range(12))
    assert (found["w"] != tensors["w"]).any()
