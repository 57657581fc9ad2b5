"""What is compared before a bundle is written, and what a difference does."""

import numpy as np
import pytest

from export import parity
from fedge import models
from fedge.errors import UpdateRejected
from fedge.task import TaskSpec

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 4})


def test_at_most_256_validation_samples_are_compared_and_random_ones_where_there_are_none() -> None:
    validation = np.arange(300 * 6, dtype=np.float64).reshape(300, 6)
    compared = parity.samples(TASK, validation)
    assert compared.dtype == np.float32
    np.testing.assert_array_equal(compared, validation[:256])
    assert parity.samples(TASK, validation[:0]).shape == (8, 6)


def test_logits_are_those_of_each_model() -> None:
    layout, first = models.initial(TASK, 0)
    _, second = models.initial(TASK, 1)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    together = parity.logits_of(TASK, layout, [first, second], x)
    assert together.shape == (2, 5, 3)
    w1, b1, w2, b2 = (first.params[a:b] for a, b in ((0, 24), (24, 28), (28, 40), (40, 43)))
    by_hand = np.maximum(x @ w1.reshape(4, 6).T + b1, 0) @ w2.reshape(3, 4).T + b2
    np.testing.assert_allclose(together[0], by_hand, atol=1e-5)
    assert not np.allclose(together[0], together[1])


@pytest.mark.parametrize("difference", [0.0, 1e-5, 0.99e-4])
def test_a_small_difference_is_reported(difference: float) -> None:
    wanted = np.array([[0.5, 0.5]])
    assert parity.check(np.add(wanted, [[difference, 0]]), wanted) == pytest.approx(difference, abs=1e-12)


@pytest.mark.parametrize("difference", [1.01e-4, 1.0, np.nan])
def test_a_large_one_or_none_at_all_is_refused(difference: float) -> None:
    wanted = np.array([[0.5, 0.5]])
    with pytest.raises(UpdateRejected, match="no bundle written"):
        parity.check(np.add(wanted, [[difference, 0]]), wanted)
