"""The mixture's formula: the specification's worked numbers, an independent oracle, and all of its forms together."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="bundles are written with it")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deploy
from edge_agent.learning.gate import TORCH, _select_top, train_gate
from export import GateWeights, Guard
from export.graph import make_gate_tensors
from fedge.bundle.formula import (
    ZERO_WEIGHT,
    clip_energies,
    compute_counted_energy,
    compute_gate_features,
    compute_gate_scores,
    compute_log_weights,
    find_guard,
    flatten_prior,
    fuse,
    mix,
    prepare_formula,
    select_candidates,
)
from fedge.data.problems.calibration import Calibration
from tests.support import oracle
from tests.support.tables import by_formula, calibrated, inputs, log_mixture, mixture_of, scores_of, task_of, write

GUARD = Calibration(temperature=1.4, kappa=0.6)
OTHER = Calibration(temperature=1.3, kappa=0.5)


def formula_of(mixture):
    """In float32, as a runtime has it."""
    return prepare_formula(tensors_of(mixture), mixture.experts, mixture.top)


def tensors_of(mixture):
    (n_classes,) = mixture.candidates[0].offset.shape
    return make_gate_tensors(task_of(1, n_classes), mixture)


def random_mixture(rng, logits, *, guard=None, top=2, gate=None, beta=0.5):
    m, _, n_classes = logits.shape
    return mixture_of(
        logits,
        weights=rng.dirichlet(np.ones(m)).tolist(),
        temperature=rng.uniform(0.5, 2, m).tolist(),
        kappa=rng.uniform(0.5, 2, m).tolist(),
        mean=rng.normal(2, 1, m).tolist(),
        std=rng.uniform(0.01, 1, m).tolist(),
        beta=beta,
        energy_clip=3.0,
        log_prior=np.log(rng.dirichlet(np.ones(n_classes))),
        guard=guard,
        top=top,
        gate=gate,
    )


# --------------------------------------------------------------------------------------- some candidates alone


@pytest.mark.parametrize("guard", [None, Guard(3, GUARD), Guard(1, GUARD)])
@pytest.mark.parametrize("used", [(0, 2, 3), (3,), (0, 1, 2, 3, 4)])
def test_some_candidates_alone_are_all_of_them_where_the_others_are_not_finite(guard, used):
    rng, (m, n) = np.random.default_rng(7), (5, 20)
    logits = np.float32(rng.normal(size=(m, n, 4)) * 3)
    gate = GateWeights(*(rng.normal(size=s) * 0.3 for s in ((16, 1), (16,), (m, 16), (m,))))
    mixture = random_mixture(rng, logits, guard=guard, gate=gate)
    how, x = formula_of(mixture), inputs(n)
    experts = [i for i, k in enumerate(used) if k in mixture.experts]
    alone = prepare_formula(select_candidates(tensors_of(mixture), used), experts, mixture.top)
    found = fuse(alone, list(logits[[*used]]), compute_gate_scores(alone, x))
    left_out = [k for k in range(m) if k not in used]
    logits[left_out] = np.nan
    p, weights, energies = fuse(how, list(logits), compute_gate_scores(how, x))
    np.testing.assert_allclose(found[0], p, atol=1e-6)
    np.testing.assert_allclose(found[1], weights[:, [*used]], atol=1e-6)
    np.testing.assert_allclose(found[2], energies[:, [*used]], atol=1e-4, rtol=1e-4)
    assert (weights[:, left_out] == 0).all()


# --------------------------------------------------------------------------------------- all of its forms agree


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 9999),
    m=st.integers(2, 6),
    top=st.integers(1, 3),
    guarded=st.booleans(),
)
def test_numpy_in_both_precisions_torch_and_the_graph_are_one_formula(tmp_path, seed, m, top, guarded):
    """The runtime's formula, the parity check's, the loss that the gate is trained by, the terms of the fit, ONNX."""
    rng, n = np.random.default_rng(seed), 20
    logits = rng.normal(size=(m, n, 4)) * 3
    y, gate = rng.integers(0, 4, n), GateWeights(*(rng.normal(size=s) * 0.3 for s in ((16, 1), (16,), (m, 16), (m,))))
    guard = Guard(m - 1, GUARD) if guarded else None
    mixture = random_mixture(rng, np.float32(logits), guard=guard, top=top, gate=gate)
    r = scores_of(gate, inputs(n))
    p, weights, energies = by_formula(mixture, np.float32(logits), r - gate.out_bias)

    how = formula_of(mixture)
    runtime = fuse(how, list(np.float32(logits)), compute_gate_scores(how, inputs(n)))
    write(tmp_path / "bundle", logits, mixture)
    predicted = deploy.load(tmp_path / "bundle").predict(inputs(n))
    graph = [predicted.probabilities, predicted.weights, predicted.energies]
    for form in (runtime, graph):
        for found, wanted, tolerance in zip(form, (p, weights, energies), (1e-5, 1e-5, 1e-3), strict=True):
            np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=1e-5)

    scores = compute_log_weights(np.array([c.weight for c in mixture.candidates])) + clip_energies(how, energies)
    log_q = np.stack(
        [calibrated(row, c.offset, c.calibration) for row, c in zip(logits, mixture.candidates, strict=True)]
    )
    experts = torch.tensor(mixture.experts if len(mixture.experts) > top else ())
    selected = _select_top(torch.from_numpy(scores + r), experts, top).float()
    np.testing.assert_allclose(torch.softmax(selected, dim=1), weights, atol=1e-4)
    log_p = log_q[:, np.arange(n), y].T
    trained = mix(torch.from_numpy(log_p).float(), selected, TORCH)
    if guard is None:
        np.testing.assert_allclose(trained, np.log(p[np.arange(n), y]), atol=1e-3)
        if not len(experts):
            np.testing.assert_allclose(np.exp(log_mixture(log_q, scores + r)), p, atol=1e-5)


def describe(one):
    """A candidate, as a manifest says it."""
    return SimpleNamespace(
        role=one.role, energy_mean=one.energy_mean, energy_std=one.energy_std,
        temperature=one.calibration.temperature, kappa=one.calibration.kappa,
    )  # fmt: skip


def describe_fusion(mixture):
    guard = mixture.guard and SimpleNamespace(
        candidate=mixture.guard.candidate,
        temperature=mixture.guard.calibration.temperature,
        kappa=mixture.guard.calibration.kappa,
    )
    return SimpleNamespace(beta=mixture.beta, energy_clip=mixture.energy_clip, top=mixture.top, guard=guard)


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_the_specification_sample_by_sample(seed):
    """Against an oracle that shares no code with it; some candidates have no weight or are not finite."""
    rng = np.random.default_rng(seed)
    m, n, n_classes = seed + 1, 20, 4
    logits = rng.normal(size=(m, n, n_classes)) * 3
    logits[rng.random(logits.shape) < 0.05] = np.nan
    logits[:, 0], logits[1:, 1] = np.inf, np.nan
    scores, prior = rng.normal(size=(n, m)), np.log(rng.dirichlet(np.ones(n_classes)))
    scores[2, 0] = np.inf
    weights = rng.dirichlet(np.ones(m))
    weights[0] = 0.0
    mixture = mixture_of(
        logits,
        weights=weights.tolist(),
        temperature=rng.uniform(0.5, 2, m).tolist(),
        kappa=rng.uniform(0.5, 2, m).tolist(),
        mean=rng.normal(2, 1, m).tolist(),
        std=rng.uniform(0.01, 1, m).tolist(),
        beta=0.5,
        energy_clip=3.0,
        log_prior=prior,
        guard=Guard(m - 1, GUARD) if seed % 2 else None,
    )
    p, alpha, _ = by_formula(mixture, logits, scores)
    manifest = SimpleNamespace(fusion=describe_fusion(mixture), candidates=[describe(c) for c in mixture.candidates])
    log_weight = np.where(weights > 0, np.log(np.maximum(weights, 1e-300)), ZERO_WEIGHT)
    for i in range(n):
        expected, shares = oracle.fusion(manifest, logits[:, i], log_weight + scores[i], prior)
        np.testing.assert_allclose(p[i], expected, atol=1e-12)
        np.testing.assert_allclose(alpha[i], shares, atol=1e-12)


@pytest.mark.parametrize("guard", [None, Guard(2, OTHER)])
@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_float32_drops_what_float64_drops(guard, magnitude):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 30, 4)) * magnitude
    logits[1, 3] = np.nan
    logits[2, 5, 1] = -np.inf
    logits[:, 7] = np.inf
    scores = rng.normal(size=(30, 5))
    scores[9] = np.nan
    mixture = mixture_of(logits, beta=0.5, energy_clip=3.0, guard=guard, log_prior=np.log(rng.dirichlet(np.ones(4))))
    p, weights, energies = by_formula(mixture, logits, scores)
    gate = (scores + np.log([c.weight for c in mixture.candidates])).astype(np.float32)
    found = fuse(formula_of(mixture), list(logits.astype(np.float32)), gate)
    np.testing.assert_allclose(found[0], p, atol=1e-6 if magnitude == 1 else 1e-3)
    np.testing.assert_allclose(found[1], weights, atol=1e-6)
    np.testing.assert_allclose(found[2], energies, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("largest", [1.0, 59.0, 61.0, 300.0])
@pytest.mark.parametrize("lift", [-1, 0, 1])
def test_no_size_of_the_logits_costs_accuracy(largest, lift):
    """Whether all of them are large, of either sign, or some beside small ones."""
    logits = np.random.default_rng(3).uniform(-1, 1, size=(3, 200, 5))
    logits += lift * (largest - 1)
    logits[:, :, 0] *= 1 if lift else largest
    mixture = mixture_of(logits, std=[1, 2, 3], beta=0.2, energy_clip=3.0)
    wanted = by_formula(mixture, logits)
    gate = np.full((200, 3), np.log(1 / 3), np.float32)
    found = fuse(formula_of(mixture), list(logits.astype(np.float32)), gate)
    tolerance = max(1e-6, 2e-7 * largest)  # of a float32 of that size
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


# ------------------------------------------------------------------------------------------------- worked numbers


def test_scmoes_gate_is_the_special_case_of_raw_energy():
    logits = np.array([[[2.0, 0, 0]], [[1.0, 1, 1]], [[0.0, 3, 0]]])
    p, alpha, energies = by_formula(mixture_of(logits), logits)
    assert energies[0] == pytest.approx([2.23954, 2.09861, 3.09492], abs=1e-5)
    assert alpha[0] == pytest.approx([0.23692, 0.20578, 0.55730], abs=1e-5)
    assert p[0] == pytest.approx([0.28028, 0.60066, 0.11906], abs=1e-5)
    lifted = logits + np.array([5.0, 0, 0])[:, None, None]
    p, alpha, _ = by_formula(mixture_of(lifted), lifted)
    assert alpha[0] == pytest.approx([0.97876, 0.00573, 0.01551], abs=1e-5)
    assert p[0] == pytest.approx([0.77288, 0.12026, 0.10686], abs=1e-5)
    four = np.concatenate([logits, [[[4.0, -1, 0]]]])
    assert by_formula(mixture_of(four), four)[1][0] == pytest.approx([0.10738, 0, 0.25258, 0.64005], abs=1e-5)


def test_extreme_logits_stay_finite():
    logits = np.array([[[1e4, 0, 0]], [[-1e4, -1e4, -1e4]]])
    p, alpha, energies = by_formula(mixture_of(logits), logits)
    assert energies[0] == pytest.approx([10000, -9998.901388], abs=1e-5)
    assert np.isfinite(p).all()
    assert alpha.sum() == pytest.approx(1)


def test_a_candidate_that_is_not_finite_is_dropped_and_none_left_means_uniform():
    logits = np.array([[[np.nan, 0, 0], [np.inf, 0, 0]], [[2.0, 0, 0], [0, -np.inf, 0]]])
    p, alpha, _ = by_formula(mixture_of(logits, weights=[0.9, 0.1]), logits)
    assert alpha == pytest.approx(np.array([[0, 1], [0, 0]]))
    log_q = np.stack([calibrated(row, np.zeros(3)) for row in logits])
    for found in (p, np.exp(log_mixture(log_q, np.log([[0.9, 0.1]] * 2)))):
        assert found[0] == pytest.approx(np.exp(log_q[1, 0]))
        assert found[1] == pytest.approx([1 / 3] * 3)


def test_an_expert_that_is_not_finite_leaves_its_place_to_the_next():
    logits = np.zeros((4, 1, 3))
    logits[2] = np.nan
    mixture = mixture_of(logits, weights=[0.1, 0.2, 0.4, 0.3], beta=0.0)
    assert by_formula(mixture, logits)[1][0] == pytest.approx([1 / 6, 1 / 3, 0, 1 / 2])


def test_the_guard_has_half_of_the_output_where_its_candidate_is_usable():
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([[[0.7, 0.2, 0.1]] * 2, [[0.1, 0.1, 0.8], [0.1, 0.1, np.nan]]]))
    mixture = mixture_of(logits, weights=[1.0, 0.0], guard=Guard(1))
    p, alpha, _ = by_formula(mixture, logits)
    assert p == pytest.approx(np.array([[0.4, 0.15, 0.45], [0.7, 0.2, 0.1]]))
    assert alpha == pytest.approx(np.array([[1, 0], [1, 0]]))


def test_the_lower_index_wins_a_tie():
    logits = np.zeros((4, 1, 3))
    mixture = mixture_of(logits, top=1)
    weights = fuse(formula_of(mixture), list(np.zeros((4, 1, 3), np.float32)), np.zeros((1, 4), np.float32))[1]
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0, 0]])


def test_the_gate_is_trained_through_this_formula():
    """The loss that torch descends, at the gate where it ends."""
    rng = np.random.default_rng(0)
    x, y, logits = rng.normal(size=(30, 4)), rng.integers(0, 3, 30), rng.normal(size=(3, 30, 3)) * 2
    log_q = calibrated(logits, np.zeros(3))
    log_p, scores = log_q[:, np.arange(30), y].T, np.tile(np.log([0.5, 0.3, 0.2]), (30, 1))
    gate = train_gate(x, log_p, scores, seed=1, experts=(0, 1, 2), top=3)
    reached = scores + scores_of(gate, x)
    found = mix(torch.from_numpy(log_p).float(), torch.from_numpy(reached).float(), TORCH)
    assert found.numpy() == pytest.approx(log_mixture(log_q, reached)[np.arange(30), y], abs=1e-5)
    assert found.mean() > log_mixture(log_q, scores)[np.arange(30), y].mean()


# ---------------------------------------------------------------------------------------------- gate, parts, shift


def test_gate_features_are_means_of_complete_windows():
    x = np.arange(2 * 1 * 18 * 9.0).reshape(2, 1, 18, 9)
    found = compute_gate_features(x)  # windows of 3 x 2: six rows, and four columns, whose last is in no window
    assert found.shape == (2, 24)
    assert found[0, :2].tolist() == [9.5, 11.5]
    assert found[1, -1] == x[1, 0, 15:, 6:8].mean()
    small = np.arange(40.0).reshape(2, 1, 5, 4)
    np.testing.assert_array_equal(compute_gate_features(small), small.reshape(2, 20))


@pytest.mark.parametrize(("shape", "kernel"), [((2, 20, 28), (3, 4)), ((1, 8, 8), (1, 1)), ((6,), (1, 1))])
def test_gate_scores_are_those_of_the_specification(shape, kernel):
    rng = np.random.default_rng(1)
    x = rng.random((7, *shape), dtype=np.float32)
    gate = GateWeights(*(rng.normal(size=s) for s in ((16, compute_gate_features(x).shape[1]), (16,), (3, 16), (3,))))
    held = {f"gate.{name}": torch.from_numpy(value) for name, value in {
        "hidden.weight": gate.hidden_weight, "hidden.bias": gate.hidden_bias,
        "out.weight": gate.out_weight, "out.bias": gate.out_bias,
    }.items()}  # fmt: skip
    wanted = oracle.gate_scores(held, torch.from_numpy(x).double(), kernel)
    np.testing.assert_allclose(scores_of(gate, x), wanted, atol=1e-12)
    mixture = mixture_of(np.zeros((3, 1, 2)), gate=gate, weights=[1.0] * 3)
    np.testing.assert_allclose(compute_gate_scores(formula_of(mixture), x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guard", [None, Guard(2, OTHER)])
def test_the_candidate_of_the_guard_is_known(guard):
    assert find_guard(formula_of(mixture_of(np.zeros((5, 1, 2)), guard=guard))) == (2 if guard else -1)


def test_what_a_single_energy_counts():
    """The same as in the batch; nothing where a logit is not finite, without a warning."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 20, 4)) * 5
    mixture = mixture_of(logits, mean=[1, 2, 3], std=[0.2, 1, 2], beta=0.7, energy_clip=2.0)
    how, values = formula_of(mixture), logits.astype(np.float32)
    whole = clip_energies(how, fuse(how, list(values), np.zeros((20, 3), np.float32))[2])
    one_by_one = [[compute_counted_energy(how, k, values[k, i]) for k in range(3)] for i in range(20)]
    np.testing.assert_allclose(one_by_one, whole, rtol=1e-4, atol=1e-4)
    for strange in (np.nan, np.inf, -np.inf):
        assert np.isnan(compute_counted_energy(how, 0, np.array([1, strange, 2, 3], np.float32)))


def test_a_shift_leaves_candidates_without_weight_out():
    mixture = mixture_of(np.zeros((3, 1, 2)), weights=[0.9, 0.1, 0.0], kappa=[1, 1, 1], log_prior=np.log([0.9, 0.1]))
    numbers = tensors_of(mixture)
    changed = flatten_prior(numbers)
    assert changed["gate.out.bias"].tolist() == [0, 0, np.float32(ZERO_WEIGHT)]
    assert not changed["prior"].any()
    assert not changed["gate.out.weight"].any()
    assert numbers["prior"].any()  # what was given is as it was
