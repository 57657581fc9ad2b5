"""Every kind of problem: its formulas in numpy are those of its loss in torch and of its graph in ONNX.

And what holds for devices whatever they are asked: sensitive samples shape nothing that leaves, padding counts nowhere,
DP-SGD, masked sums and robust means need no labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import deploy
from coordinator.aggregation.protection import Protection
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from edge_agent.learning.batched import Job, execute_jobs, execute_singly
from export.graph import make_gate_tensors
from export.graph_nodes import Graph
from export.mixture import Candidate, GateWeights, Guard, Mixture
from export.problems.answers import add_answers
from fedge.bundle.formula import compute_log_weights, softmax
from fedge.bundle.runtime import onnxruntime
from fedge.data.problems import scores
from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array, Floats
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.own import Own
from fedge.data.problems.problem import Problem
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import IGNORED, Segmentation
from fedge.data.task import INPUT, LOGITS, TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.models.problems.losses import PADDING, compute_losses, compute_mean_loss, reduce_outputs
from fedge.models.training import can_stack
from fedge.steps.contract import Action
from fedge.steps.descriptions.trial import Trial
from fedge.steps.mixture.fit_candidates import FitCandidates
from fedge.steps.mixture.fit_energy import FitEnergy
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.fit_weights import FitWeights
from fedge.steps.noise import Privacy
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.steps.training.train_dp import TrainDp, TrainedDp
from fedge.system.loading import allow_code
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, unflatten
from fedge.wire.messages import Role
from tests.support.candidates import WITH_LOCAL, WITHOUT_LOCAL
from tests.support.orders import Blobs, order
from tests.support.own_problem import NEAREST
from tests.support.simulation import Fleet

N, M = 7, 3


@dataclass(frozen=True)
class Case:
    """A kind of problem, and samples of it: inputs (N, ...), raw targets, and outputs (M, N, ...)."""

    task: TaskSpec
    x: NDArray[np.float32]
    y: NDArray[Any]
    outputs: NDArray[np.float32]
    calibration: Calibration

    @property
    def problem(self) -> Problem:
        return self.task.problem

    def convert(self) -> NDArray[Any]:
        return self.problem.convert_targets(self.y, len(self.y), self.task.input_shape, "y")

    def reduce(self, k: int) -> Floats:
        return reduce_outputs(self.problem, self.outputs[k], self.x, self.convert())

    def fit_offset(self, k: int) -> Array:
        return self.problem.fit_offset(self.convert(), lambda: self.reduce(k))


def make_case(name: str) -> Case:
    rng = np.random.default_rng(3)
    problems: dict[str, tuple[Any, tuple[int, ...], NDArray[Any]]] = {
        "classification": (msgspec.UNSET, (4,), rng.integers(0, 3, N)),
        "multi-label": (MultiLabel(labels=("a", "b", "c")), (4,), rng.integers(0, 2, (N, 3))),
        "regression": (
            Regression(targets=("a", "b"), mean=(1.0, -2.0), std=(2.0, 0.5)),
            (4,),
            rng.normal(size=(N, 2)).astype(np.float32),
        ),
        "variance": (
            Regression(targets=("a", "b"), mean=(1.0, -2.0), std=(2.0, 0.5), variance=True),
            (4,),
            rng.normal(size=(N, 2)).astype(np.float32),
        ),
        "segmentation": (
            Segmentation(classes=("none", "cat", "dog")),
            (1, 5, 6),
            np.where(rng.random((N, 5, 6)) < 0.1, IGNORED, rng.integers(0, 3, (N, 5, 6))),
        ),
        "reconstruction": (Reconstruction(), (2, 5), np.zeros(N, np.int64)),
        "own": (Own(code=NEAREST, outputs=(1, 2), targets=(2,)), (4,), rng.normal(size=(N, 2)).astype(np.float32)),
    }
    allow_code([NEAREST])
    asked, shape, y = problems[name]
    classes = ("a", "b", "c") if asked is msgspec.UNSET else ()
    task = TaskSpec(name=name, classes=classes, input_shape=shape, model="mlp", asked=asked)
    x = rng.normal(size=(N, *shape)).astype(np.float32)
    outputs = rng.normal(size=(M, N, *task.problem.get_output_shape(shape))).astype(np.float32)
    how = Calibration(temperature=1.4, kappa=0.5)
    if name == "regression":
        how = msgspec.structs.replace(how, deviation=(0.7, 1.3))
    if name == "reconstruction":
        how = msgspec.structs.replace(how, deviation=(0.8,))
    return Case(task, x, y, outputs, how)


NAMES = ("classification", "multi-label", "regression", "variance", "segmentation", "reconstruction", "own")


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_a_task_reads_back_what_it_wrote(case: Case) -> None:
    read = msgspec.json.decode(msgspec.json.encode(case.task), type=TaskSpec)
    assert read == case.task
    assert read.compute_fingerprint() == case.task.compute_fingerprint()


def test_the_loss_in_torch_is_the_likelihood_in_numpy(case: Case) -> None:
    """Up to what does not depend on the outputs, such as ln 2 pi."""
    problem, y = case.problem, case.convert()
    found = [
        compute_losses(problem, *(torch.from_numpy(a) for a in (o, case.x, y))).double().numpy() for o in case.outputs
    ]
    none = np.zeros_like(case.fit_offset(0))
    wanted = [-problem.compute_log_likelihood(problem.calibrate(case.reduce(k), PLAIN, none), y) for k in range(M)]
    apart = np.stack(found) - np.stack(wanted)
    np.testing.assert_allclose(apart, np.broadcast_to(apart[:1, :1], apart.shape), atol=1e-5)


def test_padding_counts_in_no_loss(case: Case) -> None:
    y = case.convert()
    more = np.concatenate([y, np.full_like(y[:1], np.nan if y.dtype.kind == "f" else PADDING)])
    x, o = (np.concatenate([a, 1e3 * np.ones_like(a[:1])]) for a in (case.x, case.outputs[0]))
    outputs = torch.from_numpy(o).requires_grad_()
    loss = compute_mean_loss(case.problem, outputs, torch.from_numpy(x), torch.from_numpy(more))
    plain = compute_mean_loss(case.problem, *(torch.from_numpy(a) for a in (case.outputs[0], case.x, y)))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    loss.backward()
    assert outputs.grad is not None
    assert not outputs.grad[-1].any()


def make_mixture(case: Case, guard: Guard | None, weights: tuple[float, ...] = (0.5, 0.3, 0.2)) -> Mixture:
    raw = [case.reduce(k) for k in range(M)]
    return Mixture(
        candidates=tuple(
            Candidate(
                role=role,
                name=role.value,
                model=None,  # type: ignore[arg-type] - no network is in these graphs
                offset=case.fit_offset(k),
                calibration=case.calibration,
                energy_mean=0.1 * k,
                energy_std=1.5,
                weight=weights[k],
            )
            for k, role in enumerate((Role.PRIVATE, Role.GLOBAL, Role.EXPERT))
        ),
        beta=0.5,
        gate=GateWeights.make_untrained(case.task.input_shape, len(raw)),
        guard=guard,
    )


def run_graph(case: Case, mixture: Mixture, outputs: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Run the fusion on these outputs in place of the networks', with a gate of zeros."""
    import onnx

    graph = Graph()
    log_weights = compute_log_weights(np.array([c.weight for c in mixture.candidates]))
    for name, array in make_gate_tensors(case.task, mixture).items():
        graph.add_array(name, np.asarray(array))
    shapes = add_answers(graph, case.task, mixture)
    model = onnx.load_from_string(
        graph.encode(
            case.task.input_shape, shapes | {"weights": (M,), "energies": (M,)}, [onnx.helper.make_opsetid("", 20)]
        )
    )
    for name, shape in [(f"c{k}/{LOGITS}", outputs.shape[2:]) for k in range(M)] + [("gate", (M,))]:
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", *shape]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    gate = np.tile(log_weights.astype(np.float32), (N, 1))
    given = {INPUT: case.x, "gate": gate, **{f"c{k}/{LOGITS}": outputs[k] for k in range(M)}}
    names = [*shapes, "weights", "energies"]
    wanted = {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: v for k, v in given.items() if k in wanted}), strict=True))


def mix_in_numpy(case: Case, mixture: Mixture, outputs: NDArray[np.float32]) -> tuple[Floats, ...]:
    """The same by the problem's formulas, in float64."""
    problem = case.problem
    reduced = [problem.reduce_outputs(o, case.x) for o in outputs]
    components: list[Answers] = []
    for k, how in enumerate(mixture.calibrations):
        index = k if k < M else (mixture.guard.candidate if mixture.guard else 0)
        components.append(problem.calibrate(reduced[index], how, mixture.offsets[k]))
    energies = np.stack([problem.compute_energies(r, a) for r, a in zip(reduced, components, strict=False)], axis=1)
    mean, std = (np.array([getattr(c, f) for c in mixture.candidates]) for f in ("energy_mean", "energy_std"))
    usable = np.stack([np.isfinite(o.reshape(N, -1)).all(axis=1) for o in outputs], axis=1)
    standard = np.clip((energies - mean) / std, -3, 3)
    scores = compute_log_weights(np.array([c.weight for c in mixture.candidates])) + mixture.beta * standard
    alpha = np.where(usable, softmax(np.where(usable, scores, -3e38)), 0)
    g = 0.5 * usable[:, [mixture.guard.candidate]] if mixture.guard else np.zeros((N, 1))
    return problem.mix(components, np.concatenate([(1 - g) * alpha, g], axis=1))


@pytest.mark.parametrize("guarded", [False, True])
def test_the_graph_answers_what_numpy_does(case: Case, guarded: bool) -> None:
    mixture = make_mixture(case, Guard(1, PLAIN) if guarded else None)
    found = run_graph(case, mixture, case.outputs)
    wanted = mix_in_numpy(case, mixture, case.outputs)
    for name, own in zip(case.problem.OUTPUTS, wanted, strict=True):
        np.testing.assert_allclose(found[name], own, rtol=2e-5, atol=2e-5)
    assert found["weights"].sum(axis=1) == pytest.approx(1, abs=1e-6)


def test_a_candidate_that_is_not_finite_is_dropped_for_that_sample(case: Case) -> None:
    """A first sample without one candidate, and a second one without any."""
    outputs = case.outputs.copy()
    outputs[1, 0] = np.nan
    outputs[:, 1] = np.inf
    mixture = make_mixture(case, None)
    found = run_graph(case, mixture, outputs)
    with np.errstate(invalid="ignore"):
        wanted = mix_in_numpy(case, mixture, outputs)
    for name, own in zip(case.problem.OUTPUTS, wanted, strict=True):
        assert np.isfinite(found[name]).all()
        np.testing.assert_allclose(found[name][[0, *range(2, N)]], own[[0, *range(2, N)]], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found[name][1], own[1], rtol=1e-3)
    assert found["weights"][0, 1] == 0 == found["weights"][1].sum()


def test_a_mixture_of_one_says_what_its_model_says(case: Case) -> None:
    problem = case.problem
    answers = problem.calibrate(case.reduce(0), PLAIN, np.zeros_like(case.fit_offset(0)))
    nothing = Answers(np.full_like(answers.values, np.nan), answers.deviations)
    alone = problem.mix([answers], np.ones((N, 1)))
    beside = problem.mix([answers, nothing], np.array([[1.0, 0.0]] * N))
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_allclose(a, b)
        assert np.isfinite(a).all()


def test_a_devices_own_targets_help_where_they_are_those_of_the_samples(case: Case) -> None:
    """With the offset of these samples, outputs that say nothing are likelier, if the problem has an offset."""
    problem, y = case.problem, case.convert()
    nothing = problem.reduce_outputs(np.zeros_like(case.outputs[0]), case.x)
    offset = problem.fit_offset(y, lambda: nothing)
    full = problem.sum_likelihood(problem.calibrate(nothing, Calibration(temperature=1, kappa=1), offset), y)
    none = problem.sum_likelihood(problem.calibrate(nothing, PLAIN, offset), y)
    assert full > none or (problem.kind in {"reconstruction", "own"} and full == none)


def test_statistics_are_as_many_as_announced(case: Case) -> None:
    for own in (False, True):
        found = case.problem.compute_statistics(case.reduce(0), case.convert(), case.fit_offset(0), own=own)
        assert len(found) == case.problem.count_statistics(own=own)
        assert np.isfinite(found).all()


def test_groups_are_whole_numbers_from_0(case: Case) -> None:
    groups = case.problem.group_targets(case.convert())
    assert groups.shape == (N,)
    assert groups.dtype == np.int64
    assert groups.min() >= 0


def test_a_score_is_better_for_the_true_answers(case: Case) -> None:
    problem, y = case.problem, case.convert()
    mixed = problem.mix([problem.calibrate(case.reduce(0), PLAIN, np.zeros_like(case.fit_offset(0)))], np.ones((N, 1)))
    score = problem.compute_score(mixed, y)
    assert score is not None
    true: dict[str, Any] = {
        "classification": lambda: (y[:, None] == np.arange(3),),
        "multi-label": lambda: (y,),
        "regression": lambda: (y, y),
        "segmentation": lambda: (np.moveaxis(np.eye(3)[np.where(y == IGNORED, 0, y)], -1, 1),),
        "reconstruction": lambda: (np.full((N, 1), -10.0),),
        "own": lambda: (y[:, np.newaxis],),
    }
    best = problem.compute_score(tuple(np.asarray(a, np.float64) for a in true[problem.kind]()), y)
    assert best is not None
    assert best > score
    assert problem.kind == "reconstruction" or best == pytest.approx(1)
    metrics, details = problem.compute_metrics(mixed, y), problem.compute_details(mixed, y)
    assert all(np.isfinite(v) for v in details.values())
    assert metrics.items() <= details.items()


def test_answers_are_counted_by_what_is_true(case: Case) -> None:
    problem, y = case.problem, case.convert()
    mixed = problem.mix([problem.calibrate(case.reduce(0), PLAIN, np.zeros_like(case.fit_offset(0)))], np.ones((N, 1)))
    found = problem.count_answers(mixed, y)
    assert (found is not None) == (problem.kind in {"classification", "multi-label", "segmentation"})
    if found is not None:
        assert np.shape(found.counts) == (len(found.rows), len(found.columns))
        counted = {"classification": N, "multi-label": N * 3, "segmentation": int((y != IGNORED).sum())}
        assert np.sum(found.counts) == counted[problem.kind]
        assert np.array_equal(found.add(found).counts, 2 * np.array(found.counts))


def test_a_rare_label_is_given_at_a_smaller_probability() -> None:
    labels = ("often", "half", "rare", "never")
    problem = MultiLabel(labels=labels, shares=(1.0, 0.5, 0.2, 0.0))
    assert problem.thresholds.round(4).tolist() == [0.5, 0.4082, 0.2887, 0.1]
    said = np.array([[0.49, 0.41, 0.29, 0.09], [0.5, 0.4, 0.28, 0.11]])
    assert problem.name_answers([said]) == ("half, rare", "often, never")
    assert MultiLabel(labels=labels).name_answers([said]) == ("", "often")


def test_worked_counts_and_areas() -> None:
    found, wanted = np.array([[1, 0], [1, 0], [0, 1], [0, 0]]) > 0, np.array([[1, 0], [0, 1], [1, 1], [0, 0]]) > 0
    assert scores.count_marks(found, wanted).tolist() == [[1, 1, 1, 1], [1, 1, 0, 2]]
    chances = np.array([[0.9, 0.1], [0.8, 0.3], [0.2, 0.6], [0.1, 0.2]])
    assert scores.compute_macro_auroc(chances, wanted) == pytest.approx((3 / 4 + 1) / 2)
    assert scores.compute_macro_auroc(chances, wanted | True) is None


REFUSED: dict[str, tuple[str, NDArray[Any], str]] = {
    "text that is no class": ("classification", np.array(["z"] * N), "holds the label 'z'.*the classes are a, b, c"),
    "labels of another width": ("multi-label", np.zeros((N, 2)), "0 or 1 for each of 3 labels"),
    "labels that are shares": ("multi-label", np.full((N, 3), 0.5), "found 0.5..0.5"),
    "one target too few": ("regression", np.zeros((N, 1)), r"numbers \(7, 2\)"),
    "a target that is missing": ("regression", np.full((N, 2), np.nan), "in row 0: leave such samples out"),
    "masks of another size": ("segmentation", np.zeros((N, 5, 5), np.int64), "a class number for each pixel"),
    "a pixel of an unknown class": ("segmentation", np.full((N, 5, 6), 7), "holds 7..7: a pixel is 0..2, or 255"),
    "marks that are no marks": ("reconstruction", np.full(N, 3), "must be in 0..1"),
    "marks that are shares": ("reconstruction", np.full(N, 0.5), "must be one whole number per sample"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_targets_that_do_not_fit_are_refused_with_what_to_do(what: str) -> None:
    name, y, text = REFUSED[what]
    with pytest.raises(ConfigError, match=text):
        replace(make_case(name), y=y).convert()


def test_marks_may_be_whole_floats() -> None:
    marks = Reconstruction().convert_targets(np.array([0.0, 1.0]), 2, (3,), "y")
    assert (marks.tolist(), marks.dtype) == ([0, 1], np.int64)


def test_samples_without_marks_have_a_likelihood() -> None:
    problem, surprise = Reconstruction(), np.array([[1.0], [2.0]])
    assert problem.make_figures((surprise,), None) == {"likelihood": -1.5, "metrics": {}}
    assert problem.make_figures((surprise,), np.array([0, 1])) == {"likelihood": -1.0, "metrics": {"auroc": 1.0}}


def test_one_output_is_told_as_one() -> None:
    one = Regression(targets=("power",), mean=(0.0,), std=(1.0,))
    assert one.describe_outputs() == "there is one number"
    assert msgspec.structs.replace(one, variance=True).describe_outputs() == "there is one number and its log-variance"


# ------------------------------------------------------------------------------------------------------- on devices

SGD = Sgd(steps=6, batch_size=8)


def draw_samples(case: Case, n: int, seed: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """n samples like those of the case, with converted targets."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, N, n)
    noise = 0.3 * rng.normal(size=(n, *case.task.input_shape))
    return (case.x[chosen] + noise).astype(np.float32), case.convert()[chosen]


def make_data(case: Case, n: int = 24, seed: int = 1, marked: int | None = None) -> DeviceData:
    """n training samples and half as many for validation; with `marked`, a fourth is sensitive and of that seed."""
    parts = []
    for k, size in enumerate((n, n // 2)):
        x, y = draw_samples(case, size, seed + 100 * k)
        marks = (np.arange(size) % 4 == 0) & (marked is not None)
        other_x, other_y = draw_samples(case, size, 1000 + (marked or 0) + 100 * k)
        x[marks], y[marks] = other_x[marks], other_y[marks]
        parts.append((x, y, marks))
    (x, y, marks), (x_val, y_val, marks_val) = parts
    return DeviceData(x, y, marks, x_val, y_val, marks_val, converted=True)


def make_worker(case: Case, home: Path, data: DeviceData, device: str = "d") -> Worker:
    return Worker(device, case.task, data, home, source=lambda _: np.random.default_rng(0).bytes)


def make_train(blobs: Blobs, sgd: Sgd = SGD) -> Train:
    return Train(starts=(Start(model=blobs.model(1)),), sgd=sgd, codec=Codec.FLOAT32)


def make_steps(case: Case, blobs: Blobs) -> tuple[Action, ...]:
    """What devices are asked whose answers leave, in the order of a run."""
    g, expert = blobs.model(1), blobs.model(2)
    calibration = dict.fromkeys(Role, case.calibration)
    fields: dict[str, Any] = {"calibration": calibration, "pooled": (WITHOUT_LOCAL, WITH_LOCAL), "shrinkage": 10.0}
    fit = FitCandidates(
        global_model=g,
        experts=(Start(model=expert, cluster=1), Start(model=blobs.model(3), cluster=2)),
        initial_model=blobs.model(0),
        sgd=SGD,
        local_steps=6,
    )
    several = Train(
        starts=tuple(Start(model=blobs.model(k), cluster=k) for k in range(1, 4)), sgd=SGD, choose="accuracy"
    )
    return (
        make_train(blobs),
        several,
        Trial(global_model=g, expert=expert),
        fit,
        FitWeights(**fields),
        FitEnergy(**fields),
    )


def test_devices_that_differ_in_sensitive_samples_alone_send_the_same_bytes(case: Case, tmp_path: Path) -> None:
    blobs = Blobs(case.task)
    same = [make_worker(case, tmp_path / str(m), make_data(case, marked=m)) for m in (5, 6)]
    other = make_worker(case, tmp_path / "other", make_data(case, seed=2, marked=5))
    assert same[0].data.compute_digest() != same[1].data.compute_digest()
    for number, action in enumerate(make_steps(case, blobs), 1):
        asked = order(action, number, label=f"{action.STEP}-{number}", task=case.task)
        one, two, three = (worker.execute(asked, blobs) for worker in (*same, other))
        assert isinstance(one.result, action.RESULT), one.result
        action.check(one.result, case.task)
        assert one == two
        if not isinstance(action, FitWeights):  # those of one's own problem are 0 and 1
            assert three != one, "unmarked samples matter"


@pytest.mark.parametrize("n", [0, 1, 6])
def test_a_device_without_validation_samples_does_its_part(case: Case, tmp_path: Path, n: int) -> None:
    """With no sample at all, too: it installs what it was sent."""
    blobs, data = Blobs(case.task), make_data(case, n)
    data = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0], sensitive_val=None)
    worker = make_worker(case, tmp_path, data)
    pooled = {Role.GLOBAL: 0.5, Role.EXPERT: 0.3, Role.PRIVATE: 0.2}
    calibration = dict.fromkeys(pooled, case.calibration)
    gate = FitGate(calibration=calibration, pooled=pooled, shrinkage=20.0, beta=0.5, sgd=SGD)
    for number, action in enumerate((*make_steps(case, blobs)[2:], gate), 1):
        result = worker.execute(order(action, number, label=action.STEP, task=case.task), blobs).result
        assert isinstance(result, action.RESULT), result
        action.check(result, case.task)
    said = deploy.load(tmp_path / "bundles" / "1").predict(case.x)
    assert all(len(answer) == N and np.isfinite(answer).all() for answer in said.answers)


def find_update(finished: Any, layout: Layout) -> NDArray[np.float32]:
    assert isinstance(finished.result, Trained), finished.result
    return np.asarray(codecs.decode(finished.blobs[finished.result.update.digest], Codec.FLOAT32, layout).params)


RECIPES = {
    "plain": Sgd(steps=5, batch_size=8),
    "epochs": Sgd(epochs=2, batch_size=8),
    "adam, clipped": Sgd(steps=5, batch_size=8, optimizer="adam", learning_rate=0.01, clip_norm=0.5),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_devices_side_by_side_learn_what_each_learns_alone(case: Case, tmp_path: Path, recipe: str) -> None:
    """They have different numbers of samples, so all but one get padding, which counts nowhere."""
    blobs = Blobs(case.task)
    action = make_train(blobs, RECIPES[recipe])
    found = []
    for way in (execute_singly, execute_jobs):
        workers = [
            make_worker(case, tmp_path / way.__name__ / str(k), make_data(case, n, k), f"d{k}")
            for k, n in enumerate((9, 24, 15))
        ]
        jobs = [
            Job(w, msgspec.structs.replace(order(action, task=case.task), device_id=w.id), action, blobs)
            for w in workers
        ]
        found.append(way(jobs))
    layout = workers[0].network.layout
    assert can_stack(workers[0].network)
    for alone, beside in zip(*found, strict=True):
        np.testing.assert_allclose(find_update(beside, layout), find_update(alone, layout), rtol=1e-3, atol=2e-5)
        for name in ("loss_before", "loss_after", "gradient_norm"):
            assert getattr(beside.result, name) == pytest.approx(getattr(alone.result, name), rel=1e-3, abs=1e-5)
        one, two = beside.result.val_score, alone.result.val_score
        assert one == two or one == pytest.approx(two, rel=1e-3, abs=1e-5)
        assert beside.result.n_samples == alone.result.n_samples


def test_without_noise_private_training_is_the_training_of_the_others(case: Case, tmp_path: Path) -> None:
    """In whole batches, with a bound that clips nothing; what leaves is the update alone."""
    blobs, sgd = Blobs(case.task), Sgd(steps=3, batch_size=64, learning_rate=0.01)
    privacy = Privacy(clip_norm=1e4, delta=1e-5, participations=4, noise_multiplier=1e-9)
    private = TrainDp(starts=(Start(model=blobs.model(1)),), sgd=sgd, codec=Codec.FLOAT32, privacy=privacy)
    one, two = (make_worker(case, tmp_path / name, make_data(case, marked=5)) for name in "ab")
    found = one.execute(order(private, task=case.task), blobs)
    assert isinstance(found.result, TrainedDp), found.result
    assert found.result == TrainedDp(update=found.result.update, n_samples=18)
    wanted = find_update(two.execute(order(make_train(blobs, sgd), task=case.task), blobs), two.network.layout)
    np.testing.assert_allclose(find_update(found, one.network.layout), wanted, rtol=1e-3, atol=1e-4)


# -------------------------------------------------------------------------------------------------- on a coordinator


async def run_fedavg(case: Case, home: Path, protection: Protection, n: int = 8, liars: int = 0) -> NDArray[np.float32]:
    """The weights after two rounds; the first devices are told wrong targets if they lie."""
    workers = {}
    for k in range(n):
        data = make_data(case, 12 + k, k)
        if k < liars:
            data = replace(data, y_train=-5 * data.y_train)
        workers[f"d{k}"] = make_worker(case, home / f"d{k}", data, f"d{k}")
    fleet = Fleet(case.task, build.make_initial_model(case.task, 0)[0], workers, seed=0)
    settings = MethodSettings(
        rounds=2, sgd=SGD, codec=Codec.FLOAT32, down="float32", protection=protection, participation=1.0
    )
    method = make_method("fedavg", settings, Server(case.task))
    layout, first = build.make_initial_model(case.task, 0)
    state = await run_rounds(method, method.make_first_state(layout, fleet.put(unflatten(first, layout))), fleet)
    return np.asarray(fleet.get(state.model, layout).params)


@pytest.mark.parametrize("name", ["classification", "regression", "segmentation"])
async def test_masked_updates_have_the_mean_of_plain_ones(name: str, tmp_path: Path) -> None:
    case = make_case(name)
    plain = await run_fedavg(case, tmp_path / "plain", Protection(average="mean"))
    masked = await run_fedavg(case, tmp_path / "masked", Protection(average="mean", masking=True))
    np.testing.assert_allclose(masked, plain, atol=1e-4)


async def test_robust_means_hold_off_wrong_targets_of_a_regression(tmp_path: Path) -> None:
    """They compare updates alone: a device that lies moves the model less than it moves the plain mean."""
    case, moved = make_case("regression"), {}
    for rule in ("mean", "norm-clipped", "median", "trimmed-mean", "multi-krum"):
        protection = Protection(average=rule)  # type: ignore[arg-type]
        honest = await run_fedavg(case, tmp_path / rule / "honest", protection)
        found = await run_fedavg(case, tmp_path / rule / "lies", protection, liars=1)
        moved[rule] = float(np.linalg.norm(found - honest))
    assert all(distance < moved["mean"] / 2 for rule, distance in moved.items() if rule != "mean"), moved
