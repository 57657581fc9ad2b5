"""The formula in float32 numpy against the float64 oracle, and what a shift changes."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="bundles are written with it")

from deploy.fusion import counted, counted_energy, fuse, gate_scores, guarding, only, prepared, shifted
from export import GateWeights, Guard
from export.graph import gate_tensors
from export.reference import ZERO_WEIGHT, gate_features, reference
from export.reference import gate_scores as oracle_scores
from tests.support.tables import mixture_of


def formula_of(mixture, shape=(1,)):
    return prepared(shape, gate_tensors(mixture), mixture.experts, mixture.top)


@pytest.mark.parametrize(("space", "guard"), [("prob", None), ("prob", Guard(2, 1.3, 0.5)), ("logit", None)])
@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_agrees_with_the_oracle(guard, space, magnitude):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 30, 4)) * magnitude
    logits[1, 3] = np.nan
    logits[2, 5, 1] = -np.inf
    logits[:, 7] = np.inf
    scores = rng.normal(size=(30, 5))
    scores[9] = np.nan
    mixture = mixture_of(
        logits, beta=0.5, energy_clip=3.0, guard=guard, space=space, log_prior=np.log(rng.dirichlet(np.ones(4)))
    )
    p, weights, energies = reference(mixture, logits, scores)
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
    p, weights, energies = reference(mixture, logits, np.zeros((200, 3)))
    gate = np.full((200, 3), np.log(1 / 3), np.float32)
    found = fuse(formula_of(mixture), list(logits.astype(np.float32)), gate)
    tolerance = max(1e-6, 2e-7 * largest)  # of a float32 of that size
    for ours, wanted in zip(found, (p, weights, energies), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=tolerance)


@pytest.mark.parametrize(("space", "guard"), [("prob", None), ("prob", Guard(2, 1.3, 0.5)), ("logit", None)])
@pytest.mark.parametrize("kept", [[2], [0, 2], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_a_part_of_the_formula_is_the_formula_without_the_others(guard, space, kept):
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(5, 30, 4))
    mixture = mixture_of(
        logits, mean=[1, 2, 0, 1, 2], beta=0.5, energy_clip=3.0, guard=guard, space=space,
        log_prior=np.log(rng.dirichlet(np.ones(4))), top=2,
    )  # fmt: skip
    how, gate = formula_of(mixture), rng.normal(size=(30, 5)).astype(np.float32)
    without = np.full_like(logits, np.nan, np.float32)
    without[kept] = logits[kept]
    p, weights, energies = fuse(how, list(without), gate)
    found = fuse(only(how, kept), list(without[kept]), gate[:, kept])
    for ours, wanted in zip(found, (p, weights[:, kept], energies[:, kept]), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-6)
    assert guarding(how) == (2 if guard else -1)


def test_the_lower_index_wins_a_tie():
    logits = np.zeros((4, 1, 3))
    mixture = mixture_of(logits, top=1)
    weights = fuse(formula_of(mixture), list(np.zeros((4, 1, 3), np.float32)), np.zeros((1, 4), np.float32))[1]
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0, 0]])


def test_what_a_single_energy_counts():
    """The same as in the batch; nothing where a logit is not finite, without a warning."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 20, 4)) * 5
    mixture = mixture_of(logits, mean=[1, 2, 3], std=[0.2, 1, 2], beta=0.7, energy_clip=2.0, energy_temperature=1.5)
    how, values = formula_of(mixture), logits.astype(np.float32)
    whole = counted(how, fuse(how, list(values), np.zeros((20, 3), np.float32))[2])
    one_by_one = [[counted_energy(how, k, values[k, i]) for k in range(3)] for i in range(20)]
    np.testing.assert_allclose(one_by_one, whole, rtol=1e-4, atol=1e-4)
    for strange in (np.nan, np.inf, -np.inf):
        assert np.isnan(counted_energy(how, 0, np.array([1, strange, 2, 3], np.float32)))


@pytest.mark.parametrize(("shape", "kernel"), [((2, 20, 28), (3, 4)), ((1, 8, 8), (1, 1)), ((6,), (1, 1))])
def test_gate_scores_are_those_of_the_specification(shape, kernel):
    rng = np.random.default_rng(1)
    x = rng.random((7, *shape), dtype=np.float32)
    features = gate_features(x, kernel)
    gate = GateWeights(*(rng.normal(size=s) for s in ((16, features.shape[1]), (16,), (3, 16), (3,))))
    mixture = mixture_of(np.zeros((3, 1, 2)), gate=gate)
    wanted = oracle_scores(gate, features) + np.log(1 / 3)
    np.testing.assert_allclose(gate_scores(formula_of(mixture, shape), x), wanted, rtol=1e-4, atol=1e-4)


def test_a_shift_leaves_candidates_without_weight_out():
    mixture = mixture_of(np.zeros((3, 1, 2)), weights=[0.9, 0.1, 0.0], kappa=[1, 1, 1], log_prior=np.log([0.9, 0.1]))
    numbers = gate_tensors(mixture)
    changed = shifted(numbers)
    assert changed["gate.out.bias"].tolist() == [0, 0, np.float32(ZERO_WEIGHT)]
    assert not changed["prior"].any()
    assert not changed["gate.out.weight"].any()
    assert numbers["prior"].any()  # what was given is as it was
