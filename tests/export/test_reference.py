"""The oracle against the agent's own formula: two people wrote them from the specification."""

import numpy as np
import pytest

from edge_agent import mixture as agents
from export import Guard
from export.reference import gate_features, reference
from fedge.steps.fit_weights import Calibration
from tests.support.tables import mixture_of


def test_gate_features_are_means_of_complete_windows():
    x = np.arange(2 * 1 * 5 * 4.0).reshape(2, 1, 5, 4)
    np.testing.assert_array_equal(gate_features(x, (2, 2)), [[2.5, 4.5, 10.5, 12.5], [22.5, 24.5, 30.5, 32.5]])
    np.testing.assert_array_equal(gate_features(x, (1, 1)), x.reshape(2, 20))


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_agents_formula(seed):
    rng = np.random.default_rng(seed)
    m, n, n_classes = seed + 1, 20, 4
    logits = rng.normal(size=(m, n, n_classes)) * 3
    logits[rng.random(logits.shape) < 0.05] = np.nan
    logits[:, 0] = np.inf
    scores, prior = rng.normal(size=(n, m)), np.log(rng.dirichlet(np.ones(n_classes)))
    chosen = [Calibration(temperature=float(t), kappa=float(k)) for t, k in rng.uniform(0.5, 2, (m, 2))]
    weights = rng.dirichlet(np.ones(m))
    mean, std = rng.normal(2, 1, m), rng.uniform(0.01, 1, m)
    guard = Guard(m - 1, 1.4, 0.6) if seed % 2 else None

    clean = np.where(np.isfinite(logits), logits, 0)
    log_q = np.stack([agents.calibrated(row, prior, c) for row, c in zip(clean, chosen, strict=True)])
    log_q[~np.isfinite(logits).all(axis=2)] = np.nan
    energies = agents.standardised(agents.raw_energies(clean), mean, std)
    log_p, alpha = agents.fuse(log_q, weights, energies, beta=0.5, gate_scores=scores, experts=range(1, m), top=2)
    expected = np.exp(log_p)
    if guard is not None:
        alternative = np.exp(agents.calibrated(clean[-1], prior, Calibration(temperature=1.4, kappa=0.6)))
        usable = np.isfinite(logits[-1]).all(axis=1)
        expected[usable] = agents.guarded(expected[usable], alternative[usable])

    mixture = mixture_of(
        logits,
        weights=weights.tolist(), temperature=[c.temperature for c in chosen], kappa=[c.kappa for c in chosen],
        mean=mean.tolist(), std=std.tolist(), beta=0.5, energy_clip=3.0, log_prior=prior, guard=guard,
    )  # fmt: skip
    p, found, _ = reference(mixture, logits, scores)
    np.testing.assert_allclose(p, expected, atol=1e-12)
    np.testing.assert_allclose(found, alpha, atol=1e-12)
