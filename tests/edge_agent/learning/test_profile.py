from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from edge_agent.learning import profile as sparsity
from edge_agent.learning.profile import SparsityProfile, compute_epsilon, measure_sparsity, with_noise
from fedge.errors import ConfigError, StoreError
from fedge.models.training import CHUNK, to_tensor
from fedge.steps.divergence import compute_divergence


def relu_of_inputs():
    """Inputs pass unchanged through a linear layer: the profile can be counted by hand."""
    first = nn.Linear(2, 2)
    first.weight.data = to_tensor(np.eye(2, dtype=np.float32))
    first.bias.data.zero_()
    return nn.Sequential(first, nn.ReLU(), nn.Linear(2, 3))


def test_equals_a_count_by_hand():
    x = np.array([[1, -1], [-1, 0], [2, 3], [-5, -0.0]], np.float32)
    found = measure_sparsity(relu_of_inputs(), x)
    assert found.shares == pytest.approx([0.5, 0.75])
    assert found.halves == pytest.approx(float(compute_divergence([0, 0.5], [1, 1])))
    flipped = x.copy()
    flipped[0, 0] = -1
    assert np.abs(measure_sparsity(relu_of_inputs(), flipped).shares - found.shares).max() == pytest.approx(0.25)


def test_one_sample_has_no_halves():
    assert measure_sparsity(relu_of_inputs(), np.ones((1, 2), np.float32)).halves is None


def test_chunks_change_nothing():
    x = np.random.default_rng(0).normal(size=(2 * CHUNK + 11, 2)).astype(np.float32)
    found = measure_sparsity(relu_of_inputs(), x)
    zeros = x <= 0
    assert found.shares == pytest.approx(zeros.mean(axis=0))
    assert found.halves == pytest.approx(float(compute_divergence(zeros[::2].mean(axis=0), zeros[1::2].mean(axis=0))))


def test_channels_are_averaged_over_their_positions_at_the_last_relu():
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    module[1].weight.data = to_tensor(np.array([1, -1], np.float32).reshape(2, 1, 1, 1))
    module[1].bias.data = to_tensor(np.array([-1.5, 2.5], np.float32))
    x = np.array([1, 2, 3, 0], np.float32).reshape(1, 1, 2, 2)
    assert measure_sparsity(module, x).shares == pytest.approx([0.5, 0.25])


def test_a_channel_of_one_position_is_a_unit():
    x = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    flat, image = nn.Linear(3, 4), nn.Conv2d(3, 4, 1)
    image.weight.data, image.bias.data = flat.weight.data[:, :, None, None], flat.bias.data
    units = measure_sparsity(nn.Sequential(flat, nn.ReLU(), nn.Linear(4, 2)), x)
    channels = measure_sparsity(nn.Sequential(image, nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)), x[:, :, None, None])
    assert 0 < units.shares.mean() < 1
    assert channels.shares == pytest.approx(units.shares)
    assert channels.halves == pytest.approx(units.halves)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.LeakyReLU()])
def test_activations_without_exact_zeros_are_refused(activation):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), activation, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="not exact"):
        measure_sparsity(module, np.ones((2, 2), np.float32))


def test_what_is_no_profile_is_refused():
    with pytest.raises(ConfigError, match="ReLU module"):
        measure_sparsity(nn.Linear(2, 2), np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        measure_sparsity(relu_of_inputs(), np.full((2, 2), np.nan, np.float32))
    with pytest.raises(ConfigError, match="5000 units"):
        measure_sparsity(nn.Sequential(nn.Linear(2, 5000), nn.ReLU()), np.ones((2, 2), np.float32))


def test_the_module_is_left_without_hooks():
    module = relu_of_inputs()
    measure_sparsity(module, np.ones((2, 2), np.float32))
    assert not any(layer._forward_hooks for layer in module.modules())


def test_noise_is_drawn_once_and_stays_on_the_device(tmp_path):
    found = SparsityProfile(shares=np.linspace(0, 1, 2000), halves=0.3)
    once = with_noise(found, 50, sigma=0.1, home=tmp_path / "a")
    again = with_noise(found, 50, sigma=0.2, home=tmp_path / "a")
    other = with_noise(found, 50, sigma=0.1, home=tmp_path / "b")
    np.testing.assert_array_equal(once.shares, again.shares)
    assert (once.shares != other.shares).any()
    assert once.halves is None  # they would say without noise what the profile says with it
    assert once.shares.min() >= 0
    assert once.shares.max() <= 1
    inner = slice(400, -400)  # where nothing is clipped
    assert (once.shares - found.shares)[inner].std() == pytest.approx(0.1, rel=0.15)


def test_noise_that_cannot_be_read_is_no_reason_to_draw_anew(tmp_path):
    (tmp_path / sparsity.NOISE_FILE).write_text("torn")
    with pytest.raises(StoreError, match="cannot be read"):
        with_noise(SparsityProfile(shares=np.zeros(3), halves=None), 5, sigma=0.1, home=tmp_path)


def test_the_guarantee_is_claimed_only_where_there_is_one(tmp_path, caplog):
    assert compute_epsilon(2000, 64, 0.05) == pytest.approx(0.39, abs=0.005)
    assert compute_epsilon(30, 64, 0.05) == pytest.approx(25.8, abs=0.05)
    profile = SparsityProfile(shares=np.zeros(64), halves=None)
    with caplog.at_level("INFO"):
        with_noise(profile, 30, sigma=0.05, home=tmp_path)
        assert "eps=" not in caplog.text
        assert "too few" in caplog.text
        with_noise(profile, 2000, sigma=0.05, home=tmp_path)
    assert "eps=0.39" in caplog.text
