import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedge.tasks.sampling import count_validation, draw_stratified


@given(
    y=st.lists(st.integers(0, 4), min_size=1, max_size=60), part=st.floats(0, 1), seed=st.integers(0, 2**32)
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_every_class_gets_its_share_give_or_take_one(y: list[int], part: float, seed: int) -> None:
    labels = np.array(y)
    n_drawn = round(part * len(labels))
    drawn = draw_stratified(labels, n_drawn, np.random.default_rng(seed))
    assert len(set(drawn.tolist())) == n_drawn
    assert drawn.tolist() == sorted(drawn.tolist())
    expected = np.bincount(labels) * n_drawn / len(labels)
    assert (np.abs(np.bincount(labels[drawn], minlength=len(expected)) - expected) <= 1 + 1e-9).all()


def test_draws_differ_by_seed_and_within_a_class() -> None:
    labels = np.zeros(50, dtype=np.int64)
    draws = {tuple(draw_stratified(labels, 5, np.random.default_rng(seed)).tolist()) for seed in range(20)}
    assert len(draws) == 20


def test_everybody_is_equally_likely() -> None:
    labels = np.array([0] * 3 + [1] * 7)
    counts = np.zeros(10)
    rng = np.random.default_rng(0)
    for _ in range(4000):
        counts[draw_stratified(labels, 4, rng)] += 1
    # 4000 draws with p = 0.4: standard deviation 31, so 5 of them are passed once in 2e6 per sample
    assert np.abs(counts - 1600).max() < 5 * 31


@pytest.mark.parametrize(
    ("n", "held_out"), [(0, 0), (1, 0), (2, 1), (3, 1), (7, 1), (8, 2), (9, 2), (10, 2), (20, 4), (100, 20)]
)
def test_number_held_out(n: int, held_out: int) -> None:
    assert count_validation(n) == held_out
