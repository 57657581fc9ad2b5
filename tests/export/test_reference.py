"""The formula against the specification's worked numbers, an independent oracle, and the torch that trains its gate."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from edge_agent.gate import _of_probabilities, _selected, features, train_gate
from export import Guard
from export.reference import ZERO_WEIGHT, calibrated, fuse, gate_features, gate_scores, log_weights, reference
from tests.support import oracle
from tests.support.tables import mixture_of


def test_gate_features_are_means_of_complete_windows():
    x = np.arange(2 * 1 * 5 * 4.0).reshape(2, 1, 5, 4)
    np.testing.assert_array_equal(gate_features(x, (2, 2)), [[2.5, 4.5, 10.5, 12.5], [22.5, 24.5, 30.5, 32.5]])
    np.testing.assert_array_equal(gate_features(x, (1, 1)), x.reshape(2, 20))


@pytest.mark.parametrize("space", ["prob", "logit"])
@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_the_specification_sample_by_sample(seed, space):
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
        guard=Guard(m - 1, 1.4, 0.6) if seed % 2 and space == "prob" else None,
        space=space,
        energy_temperature=1.0 + seed % 3,
    )
    p, alpha, _ = reference(mixture, logits, scores)
    manifest = SimpleNamespace(fusion=mixture, candidates=mixture.candidates)
    log_weight = np.where(weights > 0, np.log(np.maximum(weights, 1e-300)), ZERO_WEIGHT)
    for i in range(n):
        expected, shares = oracle.fusion(manifest, logits[:, i], log_weight + scores[i], prior)
        np.testing.assert_allclose(p[i], expected, atol=1e-12)
        np.testing.assert_allclose(alpha[i], shares, atol=1e-12)


def test_the_guard_has_half_of_the_output_where_its_candidate_is_usable():
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([[[0.7, 0.2, 0.1]] * 2, [[0.1, 0.1, 0.8], [0.1, 0.1, np.nan]]]))
    mixture = mixture_of(logits, weights=[1.0, 0.0], guard=Guard(1))
    p, alpha, _ = reference(mixture, logits, np.zeros((2, 2)))
    assert p == pytest.approx(np.array([[0.4, 0.15, 0.45], [0.7, 0.2, 0.1]]))
    assert alpha == pytest.approx(np.array([[1, 0], [1, 0]]))


def test_the_gate_is_trained_through_this_formula():
    """The loss that torch descends, at the gate that it starts from and at the one where it ends."""
    rng = np.random.default_rng(0)
    x, y, logits = rng.normal(size=(30, 4)), rng.integers(0, 3, 30), rng.normal(size=(3, 30, 3)) * 2
    log_q, weights, energies = calibrated(logits, np.zeros(3), Guard(0)), np.array([0.5, 0.3, 0.2]), np.zeros((30, 3))
    log_p, scores = log_q[:, np.arange(30), y].T, np.tile(log_weights(weights), (30, 1))
    gate = train_gate(x, log_p, scores, seed=1, experts=(0, 1, 2), top=2)
    r = gate_scores(gate, features(x))
    fused, _ = fuse(log_q, weights, energies, beta=0.0, gate_scores=r, experts=(0, 1, 2), top=2)
    log_alpha = _selected(torch.from_numpy(scores + r), torch.tensor((0, 1, 2)), 2).log_softmax(dim=1)
    found = _of_probabilities(log_p)(log_alpha.float())
    assert found.numpy() == pytest.approx(fused[np.arange(30), y], abs=1e-5)
