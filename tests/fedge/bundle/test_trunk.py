"""The convolutions of FedCoE's gate in numpy (docs/methods/fedcoe.md section 4) against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedge.bundle.trunk import compute_trunk, make_pooling_matrix


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 15, 28)])
def test_features_are_torchs(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    sizes = ((8, shape[0], 3, 3), (8,)), ((16, 8, 3, 3), (16,))
    layers = [tuple(rng.normal(size=size) for size in pair) for pair in sizes]
    x = rng.normal(size=(5, *shape))
    expected = torch.from_numpy(x)
    for weight, bias in layers:
        expected = functional.conv2d(expected, torch.from_numpy(weight), torch.from_numpy(bias), padding=1)
        expected = functional.max_pool2d(functional.relu(expected), 2)
    expected = functional.adaptive_avg_pool2d(expected, 4).flatten(1)
    np.testing.assert_allclose(compute_trunk(x, layers), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 4), (2, 4), (3, 4), (4, 4), (7, 4), (8, 4), (9, 4)])
def test_pooling_is_torchs(n_in: int, n_out: int) -> None:
    x = torch.randn(1, 1, n_in)
    expected = functional.adaptive_avg_pool1d(x, n_out)[0, 0].numpy()
    np.testing.assert_allclose(make_pooling_matrix(n_in, n_out) @ x[0, 0].numpy(), expected, atol=1e-6)
