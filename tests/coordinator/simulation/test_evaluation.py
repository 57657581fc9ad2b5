"""Real runs on digits: the figures are those of the models that the devices have."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

import deploy
from benchmarks.default_method import ablated
from benchmarks.steps.ablated_mixture import FitAblatedMixture
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.papers.scmoe_pfl import ScmoePfl, ScmoeState
from coordinator.methods.settings import Option
from coordinator.simulation.evaluation import SERVER, Evaluation, write_global_bundle
from coordinator.simulation.federation import Federation, make_fleet, partition_samples
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.settings import Scenario
from fedge.bundle import manifest as bundle
from fedge.data import preprocessing
from fedge.models.training import Network
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.tensors.layout import flatten, from_bytes

SCENARIO = Scenario(devices=3, samples=300, rounds=3, local_steps=5)


class UniformMean(ScmoePfl):
    """Every model of a device's mixture counts the same."""

    steps = (FitAblatedMixture,)

    def make_mixture_order(self, state: ScmoeState, device_id: str) -> FitMixture:
        return ablated(
            FitAblatedMixture, super().make_mixture_order(state, device_id), learns="uniform", offset="untrained"
        )


async def finished(tmp_path: Path, name: str, scenario: Scenario = SCENARIO, options: dict[str, Option] | None = None):
    federation = partition_samples(scenario, 0)
    method = make_method(
        name, scenario.make_method_settings(0, options or {}), Server(federation.task, federation.server_data)
    )
    fleet, first, workers = make_fleet(federation, scenario, 0, tmp_path)
    state = await run_rounds(method, method.init(federation.layout, first), fleet)
    return federation, method, fleet, workers, state


def accuracy(federation: Federation, device_id: str, model) -> float:
    share = federation.shares[device_id]
    logits = Network(federation.task).compute_logits(model, preprocessing.preprocess(federation.task, share.x_test))
    return float((logits.argmax(axis=1) == share.y_test).mean())


async def test_the_model_now_is_the_served_one_on_own_test_samples(tmp_path: Path) -> None:
    federation, method, fleet, workers, state = await finished(tmp_path, "fedavg")
    evaluation = Evaluation(federation, workers, list(workers))
    served = fleet.get(state.model, federation.layout)
    now = evaluation.evaluate_now(method, state, fleet)
    assert {i: score.accuracy for i, score in now.items()} == {
        i: accuracy(federation, i, served) for i in federation.shares
    }
    assert evaluation.seconds > 0


async def test_the_model_now_holds_what_a_device_keeps(tmp_path: Path) -> None:
    federation, method, fleet, workers, state = await finished(tmp_path, "ditto")
    now = Evaluation(federation, workers, list(workers)).evaluate_now(method, state, fleet)
    for i, score in now.items():
        own = workers[i].make_personal_model(fleet.get(method.get_model(state, i), federation.layout))
        assert score.accuracy == accuracy(federation, i, own)


async def test_the_end_is_the_bundle_that_was_installed(tmp_path: Path) -> None:
    federation, method, fleet, workers, state = await finished(tmp_path, "fedavg+ft")
    final = Evaluation(federation, workers, list(workers)).evaluate_finally(method, state, fleet)
    assert list(final) == sorted(federation.shares)
    for i, end in final.items():
        assert end.release == "1"
        folder = tmp_path / i / "bundles" / str(state.installed[i].release)
        (candidate,) = bundle.read_bundle(folder).manifest.candidates
        model = flatten(from_bytes((folder / candidate.part.file_name).read_bytes()), federation.layout)
        assert end.score.accuracy == pytest.approx(accuracy(federation, i, model))


async def test_the_end_tells_what_the_private_model_weighs(tmp_path: Path) -> None:
    uniform = f"{__name__}:UniformMean"
    federation, method, fleet, workers, state = await finished(tmp_path / "a", uniform)
    for i, end in Evaluation(federation, workers, list(workers)).evaluate_finally(method, state, fleet).items():
        manifest = bundle.read_bundle(tmp_path / "a" / i / "bundles" / str(state.installed[i].release)).manifest
        assert end.private_weight == pytest.approx(1 / len(manifest.candidates))
    federation, method, fleet, workers, state = await finished(tmp_path / "b", "fedavg")
    assert {
        end.private_weight
        for end in Evaluation(federation, workers, list(workers)).evaluate_finally(method, state, fleet).values()
    } == {None}


async def test_a_device_without_bundle_is_judged_by_what_it_is_served_and_marked(tmp_path: Path) -> None:
    federation, method, fleet, workers, state = await finished(tmp_path, "fedavg+ft")
    gone = "device-1"
    lacking = msgspec.structs.replace(state, installed={i: b for i, b in state.installed.items() if i != gone})
    evaluation = Evaluation(federation, workers, list(workers))
    final = evaluation.evaluate_finally(method, lacking, fleet)
    assert [i for i, end in final.items() if end.release is None] == [gone]
    assert final[gone].score == evaluation.evaluate_now(method, lacking, fleet)[gone]


async def test_the_global_accuracy_is_the_mean_over_devices_of_what_they_are_served(tmp_path: Path) -> None:
    federation, method, fleet, workers, state = await finished(tmp_path, "fedavg")
    assert federation.global_test is not None
    x, y = federation.global_test
    logits = Network(federation.task).compute_logits(fleet.get(state.model, federation.layout), x)
    found = Evaluation(federation, workers, list(workers)).evaluate_globally(method, state, fleet)
    assert found == pytest.approx(np.mean(logits.argmax(axis=1) == y))


async def test_experts_with_a_gate_are_judged_together_and_left_as_a_bundle_for_the_server(tmp_path: Path) -> None:
    federation, method, fleet, workers, state = await finished(tmp_path, "fedcoe")
    found = Evaluation(federation, workers, list(workers)).evaluate_globally(method, state, fleet)
    write_global_bundle(federation, method, state, fleet, tmp_path)
    x, y = federation.global_test
    runtime = deploy.load(tmp_path / SERVER / "bundles" / "1")
    assert len(runtime.manifest.candidates) == 5
    assert found == np.mean(runtime.predict_inputs(x).class_index == y) > 0.5


async def test_without_a_global_test_set_there_is_no_global_accuracy(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(SCENARIO, global_test=0.0)
    federation, method, fleet, workers, state = await finished(tmp_path, "fedavg", scenario)
    assert Evaluation(federation, workers, list(workers)).evaluate_globally(method, state, fleet) is None
