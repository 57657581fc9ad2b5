"""The real ONNX graph against the specifications' worked numbers and the float64 oracle."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deploy
from export import Candidate, GateWeights, Guard, Mixture, write_bundle
from export.parity import compute_expected
from fedge.bundle.formula import count_gate_features
from fedge.bundle.manifest import SKELETON
from fedge.data.problems.calibration import Calibration
from fedge.data.task import TaskSpec, choose_gate_pool
from fedge.models.build import make_initial_model
from fedge.wire.messages import Role
from tests.support.tables import by_formula, inputs, layout_of, mixture_of, task_of, write

FOUR = [Role.PRIVATE, Role.GLOBAL, Role.EXPERT, Role.LOCAL]


@pytest.fixture
def predict(tmp_path):
    def run(logits, **settings_of_mixture):
        logits = np.asarray(logits, float)
        write(tmp_path / "bundle", logits, mixture_of(logits, **settings_of_mixture))
        return deploy.load(tmp_path / "bundle").predict(inputs(logits.shape[1]))

    return run


def oracle(logits, **settings_of_mixture):
    """The formula alone, with the gate's scores of the real inputs."""
    logits = np.float32(logits)
    mixture = mixture_of(logits, **settings_of_mixture)
    _, n, n_classes = logits.shape
    return compute_expected(task_of(n, n_classes), layout_of(logits[0]), mixture, inputs(n))


def gate(rng, m, scale=1.0):
    return GateWeights(*(rng.normal(size=shape) * scale for shape in ((16, 1), (16,), (m, 16), (m,))))


def assert_like_oracle(prediction, wanted, tolerance=1e-6):
    p, weights, energies = wanted
    np.testing.assert_allclose(prediction.probabilities, p, atol=tolerance, rtol=0)
    np.testing.assert_allclose(prediction.weights, weights, atol=tolerance, rtol=0)
    np.testing.assert_allclose(prediction.energies, energies, atol=tolerance, rtol=1e-5)


# ------------------------------------------------------------------------- scmoe_pfl.md section 11.1, the gate's inputs


@pytest.mark.parametrize(
    ("shape", "window"),
    [((6,), (1, 1)), ((3, 32, 32), (4, 4)), ((2, 21, 27), (3, 4)), ((1, 40, 43), (5, 6)), ((1, 9, 70), (2, 9))],
)
@pytest.mark.parametrize("engine", ["fused", "separate"])
def test_the_gate_sees_means_of_windows_of_any_size(tmp_path, shape, window, engine):
    assert choose_gate_pool(shape) == window
    task = TaskSpec(name="t", classes=("a", "b"), input_shape=shape, model="mlp", model_options={"hidden": 2})
    rng = np.random.default_rng(0)
    sizes = (16, count_gate_features(task.input_shape)), (16,), (2, 16), (2,)
    layout, model = make_initial_model(task, 0)
    prior = np.log([0.5, 0.5])
    candidates = tuple(Candidate(role, role.value, model, prior) for role in (Role.PRIVATE, Role.EXPERT))
    mixture = Mixture(candidates, 0.0, GateWeights(*(rng.normal(size=size) * 0.3 for size in sizes)))
    x = np.float32(rng.normal(size=(5, *shape)))
    write_bundle(tmp_path, task=task, layout=layout, mixture=mixture, validation=x, release=1, method="m", metrics={})
    found = deploy.load(tmp_path, engine=engine).predict(x)
    wanted = compute_expected(task, layout, mixture, x)[1]
    np.testing.assert_allclose(found.weights, wanted, atol=1e-6)
    assert np.ptp(wanted[:, 0]) > 0.05


# ------------------------------------------------------------------------- scmoe_pfl.md section 16, "Gate"


def test_scmoe_gate_example(predict):
    found = predict([[[2, 0, 0]], [[1, 1, 1]], [[0, 3, 0]]])
    np.testing.assert_allclose(found.energies, [[2.23954, 2.09861, 3.09492]], atol=5e-6)
    np.testing.assert_allclose(found.weights, [[0.23692, 0.20578, 0.55730]], atol=5e-6)
    np.testing.assert_allclose(found.probabilities, [[0.28028, 0.60066, 0.11906]], atol=5e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 9999), top=st.integers(1, 3))
def test_the_graph_is_the_oracles(predict, seed, top):
    """scmoe_pfl.md 11.2 and 11.3; a candidate that is not finite is dropped, without any p = 1/C."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, 12, 5)) * 6
    logits[1, :3], logits[:, 4] = np.nan, np.inf
    options = {"top": top, "gate": gate(rng, 4, 0.3)}
    found = predict(logits, **options)
    assert_like_oracle(found, oracle(logits, **options), tolerance=1e-5)
    np.testing.assert_allclose(found.probabilities[4], 0.2, atol=1e-7)
    assert (found.weights[:3, 1] == 0).all()


def test_scmoe_shift_of_the_private_logits_flips_the_class(predict):
    found = predict([[[7, 5, 5]], [[1, 1, 1]], [[0, 3, 0]]])
    np.testing.assert_allclose(found.weights, [[0.97876, 0.00573, 0.01551]], atol=5e-6)
    np.testing.assert_allclose(found.probabilities, [[0.77288, 0.12026, 0.10686]], atol=5e-6)


def test_scmoe_third_expert_pushes_out_the_weakest(predict):
    found = predict([[[2, 0, 0]], [[1, 1, 1]], [[0, 3, 0]], [[4, -1, 0]]])
    np.testing.assert_allclose(found.energies[0, 3], 4.0248, atol=1e-4)
    np.testing.assert_allclose(found.weights, [[0.10738, 0, 0.25258, 0.64005]], atol=5e-6)


def test_scmoe_extremes(predict):
    found = predict([[[1e4, 0, 0], [0, 0, 1e4]], [[-1e4, -1e4, -1e4], [1e4, 0, 0]]])
    np.testing.assert_allclose(found.energies[0], [10000, -9998.901388], rtol=1e-7)
    np.testing.assert_allclose(found.weights, [[1, 0], [0.5, 0.5]])
    np.testing.assert_allclose(found.probabilities, [[1, 0, 0], [0.5, 0, 0.5]], atol=1e-7)


def test_identity_of_the_plain_formula(predict):
    """p = softmax_c(logsumexp_k(s_k + l_kc)) with everything selected (scmoe_pfl.md 11.3)."""
    logits = np.random.default_rng(1).normal(size=(3, 40, 5)) * 4
    joint = np.logaddexp.reduce(logits, axis=0)
    p = np.exp(joint - np.logaddexp.reduce(joint, axis=1)[:, None])
    np.testing.assert_allclose(predict(logits).probabilities, p, atol=1e-6)


# ------------------------------------------------------------------------------ fedge.md section 16, "Fusion"


@pytest.mark.parametrize(("beta", "p"), [(0.0, [0.443606, 0.421183, 0.135211]), (1.0, [0.627915, 0.215625, 0.156460])])
def test_fedge_fusion_numbers(predict, beta, p):
    found = predict(
        [[[2, 0, 0], [0.5, 0.4, 0]], [[0, 3, 0], [0, 0, 6]]],
        weights=(0.6, 0.4), temperature=(1.4, 1.4), mean=(1.830186, 4.549934), std=(0.409359, 1.455011),
        beta=beta, energy_clip=3.0,
    )  # fmt: skip
    np.testing.assert_allclose(found.energies, [[1, -1], [-1, 1]], atol=1e-5)
    np.testing.assert_allclose(found.probabilities[0], p, atol=1e-6)


def test_prior_numbers(predict):
    """fedge.md section 16: counts (8, 2, 0), logits (1, 2, 2.5)."""
    prior = np.log((np.array([8, 2, 0]) + 0.5) / 11.5)
    for t, kappa, p in [
        (1.0, 0.0, (0.121952, 0.331499, 0.546549)),
        (1.0, 1.0, (0.484702, 0.387517, 0.127781)),
        (2.0, 1.0, (0.621331, 0.301295, 0.077374)),
    ]:
        found = predict([[[1, 2, 2.5]]], temperature=(t,), kappa=(kappa,), log_prior=prior)
        np.testing.assert_allclose(found.probabilities[0], p, atol=1e-6)


def test_guard_numbers(predict):
    """Output for (0.7, 0.2, 0.1) and (0.1, 0.1, 0.8): (0.4, 0.15, 0.45). The alternative has no share of its own."""
    found = predict(
        np.log([[[0.7, 0.2, 0.1]], [[0.1, 0.1, 0.8]]]), weights=(1.0, 0.0), beta=0.0, guard=Guard(candidate=1)
    )
    np.testing.assert_allclose(found.probabilities, [[0.4, 0.15, 0.45]], atol=1e-6)
    np.testing.assert_array_equal(found.weights, [[1, 0]])


# --------------------------------------------------------------------------------------------- oracle and ONNX


@pytest.mark.parametrize("n_experts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("guarded", [False, True])
def test_agrees_with_the_oracle(predict, n_experts, guarded):
    rng = np.random.default_rng(n_experts)
    m = n_experts + 1
    settings_of_mixture = {
        "weights": rng.dirichlet(np.ones(m)).tolist(),
        "temperature": rng.uniform(0.7, 3, m).tolist(),
        "kappa": rng.uniform(0, 1.5, m).tolist(),
        "mean": rng.normal(2, 1, m).tolist(),
        "std": rng.uniform(0.01, 1, m).tolist(),
        "beta": 0.5,
        "energy_clip": 3.0,
        "log_prior": np.log(rng.dirichlet(np.ones(7))),
        "gate": gate(rng, m, 0.3),
        "guard": Guard(m - 1, Calibration(temperature=1.4, kappa=0.6)) if guarded else None,
    }
    logits = np.float32(rng.normal(size=(m, 64, 7)) * 3)
    found = predict(logits, **settings_of_mixture)
    assert_like_oracle(found, oracle(logits, **settings_of_mixture))
    dropped = (found.weights[:, 1:] == 0).sum(axis=1)
    assert (dropped == max(0, n_experts - 2)).all()


def test_private_and_local_need_no_place(predict):
    """fedge.md section 9: private, global, expert, local: the top-2 rule never drops anything."""
    logits = np.random.default_rng(0).normal(size=(4, 30, 3))
    found = predict(logits, roles=FOUR)
    assert (found.weights > 0).all()
    assert_like_oracle(found, oracle(logits, roles=FOUR))


def test_private_stays_where_it_is_weakest(predict):
    logits = np.array([[[-50.0, -50, -51]], [[1, 2, 3]], [[3, 2, 1]], [[0, 0, 0]]])
    found = predict(logits)
    assert found.weights[0, 0] > 0
    assert found.weights[0, 3] == 0


def test_ties_go_to_the_lower_index(predict):
    found = predict(np.tile([[[1.0, 2.0, 3.0]]], (5, 1, 1)))
    np.testing.assert_allclose(found.weights, [[1 / 3, 1 / 3, 1 / 3, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("guard", [None, Guard(1, Calibration(temperature=1.4, kappa=0.0))])
def test_a_candidate_that_is_not_finite_is_dropped_for_that_sample(predict, bad, guard):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 6, 3))
    logits[1, 0, 1] = bad  # an expert: its place goes to the next
    logits[0, 1, 0] = bad  # private
    logits[:3, 2, 2] = bad  # one is left
    logits[:, 3, 0] = bad  # none is left
    logits[1:, 4] = bad  # private alone is left
    found = predict(logits, guard=guard)
    assert_like_oracle(found, oracle(logits, guard=guard))
    np.testing.assert_array_equal(found.weights == 0, [
        [False, True, False, False],
        [True, *(oracle(logits)[1][1, 1:] == 0)],
        [True, True, True, False],
        [True, True, True, True],
        [False, True, True, True],
        *(oracle(logits)[1][5:] == 0),
    ])  # fmt: skip
    np.testing.assert_allclose(found.probabilities[3], 1 / 3, atol=1e-7)
    assert np.isnan(found.energies[3]).all()
    assert np.isfinite(found.probabilities).all()


def test_a_gate_score_that_overflows_drops_its_candidate(predict):
    huge = GateWeights(
        np.full((16, 1), 3e38), np.zeros(16), np.r_[np.full((1, 16), 3e38), np.zeros((1, 16))], np.zeros(2)
    )
    found = predict(np.ones((2, 3, 3)), gate=huge)
    np.testing.assert_array_equal(
        found.weights, [[0.5, 0.5], [0, 1], [0, 0]]
    )  # at x = 2 the hidden layer itself overflows


@pytest.mark.parametrize("scale", [30, 1e3, 1e4])
def test_large_logits(predict, scale):
    """Accuracy is that of float32: scores of size `scale` are rounded to about scale * 1e-7."""
    logits = np.random.default_rng(5).normal(size=(5, 20, 4)) * scale
    found = predict(logits)
    assert_like_oracle(found, oracle(logits), tolerance=1e-6 * scale)
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, atol=1e-6)


def test_a_candidate_without_weight_serves_when_no_other_can(predict):
    logits = np.array([[[1.0, 2, 3], [math.nan] * 3], [[3, 2, 1], [3, 2, 1]]])
    found = predict(logits, weights=(1.0, 0.0))
    np.testing.assert_array_equal(found.weights, [[1, 0], [0, 1]])
    assert found.class_index.tolist() == [2, 0]


def test_equal_candidates_give_the_single_models_probabilities(predict):
    one = np.random.default_rng(2).normal(size=(1, 10, 4))
    single = predict(one).probabilities
    found = predict(np.tile(one, (4, 1, 1)), gate=gate(np.random.default_rng(0), 4))
    np.testing.assert_allclose(found.probabilities, single, atol=1e-6)


def test_one_number_added_to_all_gate_scores_changes_nothing(predict):
    rng = np.random.default_rng(8)
    logits, g = rng.normal(size=(3, 10, 4)), gate(rng, 3)
    shifted = GateWeights(g.hidden_weight, g.hidden_bias, g.out_weight, g.out_bias + 5)
    np.testing.assert_allclose(
        predict(logits, gate=g).probabilities, predict(logits, gate=shifted).probabilities, atol=2e-6
    )


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_batches_give_what_samples_give(tmp_path, batch):
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(4, 64, 5))
    write(tmp_path / "bundle", logits, mixture_of(logits, gate=gate(rng, 4)))
    runtime, x = deploy.load(tmp_path / "bundle"), inputs(64)
    parts = [runtime.predict(x[i : i + batch]).probabilities for i in range(0, 64, batch)]
    np.testing.assert_allclose(np.concatenate(parts), runtime.predict(x).probabilities, atol=1e-6)


# ------------------------------------------------------------------------------------------------- the oracle

finite = st.floats(-20, 20, width=32)


@given(
    st.lists(st.lists(st.lists(st.one_of(finite, st.just(math.nan)), min_size=3, max_size=3), min_size=2, max_size=2),
             min_size=5, max_size=5),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invariants_of_the_oracle(rows, guarded):
    logits = np.array(rows)
    guard = Guard(candidate=2) if guarded else None
    p, weights, _ = by_formula(mixture_of(logits, guard=guard), logits)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    usable = np.isfinite(logits).all(axis=2).T
    np.testing.assert_allclose(weights.sum(axis=1), usable.any(axis=1).astype(float))
    assert (weights[~usable] == 0).all()
    assert ((weights[:, 1:] > 0).sum(axis=1) <= 2).all()


# ------------------------------------------------------------------------------------------------ the skeleton


def test_the_skeleton_is_one_for_all_devices(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        logits = rng.normal(size=(3, 4, 3))
        guard = Guard(candidate=0) if name == "b" else None
        write(tmp_path / name, logits, mixture_of(logits, gate=gate(rng, 3), guard=guard, beta=0.5, kappa=[0.3] * 3))
    assert (tmp_path / "a" / SKELETON).read_bytes() == (tmp_path / "b" / SKELETON).read_bytes()


def test_the_skeleton_holds_no_path_no_trace_and_no_large_tensor(tmp_path):
    logits = np.zeros((3, 4, 3))
    write(tmp_path / "a", logits, mixture_of(logits))
    data = (tmp_path / "a" / SKELETON).read_bytes()
    assert len(data) < 20_000
    for trace in (b".py", b"site-packages", b"Traceback", b"File ", b"torch"):
        assert trace not in data
    model = onnx.load_from_string(data)
    assert not model.metadata_props
    assert all(not node.metadata_props and not node.doc_string for node in model.graph.node)
    held = [i for i in model.graph.initializer if i.data_location != onnx.TensorProto.EXTERNAL]
    assert all(math.prod(i.dims) <= 8 for i in held)
    assert model.ir_version == 9
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
