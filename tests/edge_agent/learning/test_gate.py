from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent.learning import gate
from edge_agent.learning.gate import train_gate
from fedge.bundle.formula import count_gate_features
from tests.support.tables import log_mixture, scores_of


def halves(n=40):
    """Candidate 0 is right where the first input is positive, candidate 1 elsewhere."""
    x = np.random.default_rng(0).normal(size=(n, 4)) * [1, 3, 1, 1] + [0, 100, 0, 0]
    p = np.where((x[:, :1] > 0) == [True, False], 0.9, 0.1)
    return x.astype(np.float32), np.log(p)


def loss(x, log_p, scores, gate):
    r = scores_of(gate, x)
    log_q = np.stack([np.log(np.stack([np.exp(c), 1 - np.exp(c)], axis=1)) for c in log_p.T])
    return -log_mixture(log_q, scores + r)[:, 0].mean()


def test_learns_which_candidate_to_trust_where_and_lowers_its_loss():
    x, log_p = halves()
    scores = np.full(log_p.shape, np.log(0.5))
    copies = x.copy(), log_p.copy(), scores.copy()
    gate = train_gate(x, log_p, scores, seed=1)
    r = scores_of(gate, x)
    assert np.mean((r[:, 0] > r[:, 1]) == (x[:, 0] > 0)) > 0.9
    before = train_gate(x[:9], log_p[:9], scores[:9], seed=1)
    assert loss(x, log_p, scores, gate) < loss(x, log_p, scores, before) - 0.02
    for array, copy in zip((x, log_p, scores), copies, strict=True):
        assert (array == copy).all()


def test_equal_seeds_give_equal_gates():
    x, log_p = halves()
    scores = np.zeros(log_p.shape)
    one, same, other = (train_gate(x, log_p, scores, seed=s).hidden_weight for s in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()


@pytest.mark.parametrize("m", [0, 1, 9])
def test_fewer_than_ten_samples_leave_it_untrained(m):
    x, log_p = halves()
    gate = train_gate(x[:m], log_p[:m], np.zeros((m, 2)), seed=1)
    assert gate.hidden_weight.shape == (16, 4)
    assert not scores_of(gate, x).any()


def test_candidates_that_are_not_finite_are_left_out():
    x, log_p = halves()
    log_p[:5, 0] = np.nan
    log_p[5] = np.nan
    scores = np.zeros(log_p.shape)
    scores[:5, 0] = np.nan
    gate = train_gate(x, log_p, scores, seed=1)
    assert np.isfinite(scores_of(gate, x)).all()
    nothing = train_gate(x, np.full_like(log_p, np.nan), scores, seed=1)
    assert not nothing.out_weight.any()


def test_large_images_are_pooled():
    assert count_gate_features((3, 32, 32)) == 3 * 64
    assert count_gate_features((1, 8, 8)) == 64
    assert count_gate_features((6,)) == 6


def test_the_gate_of_64_inputs_and_four_candidates_is_small():
    """scmoe_pfl.md section 11.1: 64 * 16 + 16 + 16 * 4 + 4 = 1 108 parameters."""
    x = np.random.default_rng(0).normal(size=(20, 1, 8, 8)).astype(np.float32)
    gate = train_gate(x, np.log(np.full((20, 4), 0.5)), np.zeros((20, 4)), seed=0)
    parameters = (gate.hidden_weight, gate.hidden_bias, gate.out_weight, gate.out_bias)
    assert sum(p.size for p in parameters) == 1_108


def test_the_steps_are_those_of_torchs_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    x, log_p = halves()
    found = train_gate(x, log_p, np.zeros(log_p.shape), seed=1)

    def fit(network, inputs, log_p, scores, decay, *_):
        optimiser = torch.optim.Adam(network.parameters(), lr=gate.LEARNING_RATE)
        for _ in range(gate.STEPS):
            penalty = decay * sum(parameter.square().sum() for parameter in network.parameters())
            optimiser.zero_grad()
            (penalty - gate.mix(log_p, scores + network(inputs), gate.TORCH).mean()).backward()
            optimiser.step()

    monkeypatch.setattr(gate, "_fit", fit)
    expected = train_gate(x, log_p, np.zeros(log_p.shape), seed=1)
    np.testing.assert_allclose(found.out_weight, expected.out_weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.hidden_weight, expected.hidden_weight, rtol=1e-4, atol=1e-6)
