from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from edge_agent import sparsity
from edge_agent.sparsity import sparsity_profile
from fedge.divergence import divergence
from fedge.errors import ConfigError
from fedge.models.training import tensor


def relu_of_inputs():
    """Inputs pass unchanged through a linear layer: the profile can be counted by hand."""
    first = nn.Linear(2, 2)
    first.weight.data = tensor(np.eye(2, dtype=np.float32))
    first.bias.data.zero_()
    return nn.Sequential(first, nn.ReLU(), nn.Linear(2, 3))


def test_equals_a_count_by_hand():
    x = np.array([[1, -1], [-1, 0], [2, 3], [-5, -0.0]], np.float32)
    found = sparsity_profile(relu_of_inputs(), x)
    assert found.shares == pytest.approx([0.5, 0.75])
    assert found.halves == pytest.approx(float(divergence([0, 0.5], [1, 1])))
    flipped = x.copy()
    flipped[0, 0] = -1
    assert np.abs(sparsity_profile(relu_of_inputs(), flipped).shares - found.shares).max() == pytest.approx(0.25)


def test_one_sample_has_no_halves():
    assert sparsity_profile(relu_of_inputs(), np.ones((1, 2), np.float32)).halves is None


def test_chunks_change_nothing(monkeypatch):
    x = np.random.default_rng(0).normal(size=(11, 2)).astype(np.float32)
    whole = sparsity_profile(relu_of_inputs(), x)
    monkeypatch.setattr(sparsity, "CHUNK", 4)
    parts = sparsity_profile(relu_of_inputs(), x)
    assert parts.shares == pytest.approx(whole.shares)
    assert parts.halves == pytest.approx(whole.halves)


def test_channels_are_averaged_over_their_positions_at_the_last_relu():
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    module[1].weight.data = tensor(np.array([1, -1], np.float32).reshape(2, 1, 1, 1))
    module[1].bias.data = tensor(np.array([-1.5, 2.5], np.float32))
    x = np.array([1, 2, 3, 0], np.float32).reshape(1, 1, 2, 2)
    assert sparsity_profile(module, x).shares == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.LeakyReLU()])
def test_activations_without_exact_zeros_are_refused(activation):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), activation, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="not exact"):
        sparsity_profile(module, np.ones((2, 2), np.float32))


def test_what_is_no_profile_is_refused():
    with pytest.raises(ConfigError, match="ReLU module"):
        sparsity_profile(nn.Linear(2, 2), np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        sparsity_profile(relu_of_inputs(), np.full((2, 2), np.nan, np.float32))
    with pytest.raises(ConfigError, match="5000 units"):
        sparsity_profile(nn.Sequential(nn.Linear(2, 5000), nn.ReLU()), np.ones((2, 2), np.float32))


def test_the_module_is_left_without_hooks():
    module = relu_of_inputs()
    sparsity_profile(module, np.ones((2, 2), np.float32))
    assert not any(layer._forward_hooks for layer in module.modules())
