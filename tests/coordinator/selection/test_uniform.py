"""Size of the cohort (cfic.md section 5) and uniform draws."""

from collections import Counter

import numpy as np
import pytest

from coordinator.selection import cohort_size, uniform


@pytest.mark.parametrize(
    ("n_clients", "share", "size"),
    [(0, 0.3, 0), (1, 0.01, 1), (5, 0.1, 1), (5, 0.3, 2), (100, 0.3, 30), (6, 0.5, 3), (5, 0.5, 3), (7, 1.0, 7)],
)
def test_the_share_is_rounded_half_up_and_one_client_is_always_asked(n_clients, share, size) -> None:
    assert cohort_size(n_clients, share) == size


def test_rounding_errors_of_the_share_do_not_lose_a_client() -> None:
    assert 45 * 0.7 < 31.5
    assert cohort_size(45, 0.7) == 32


def test_a_draw_is_of_different_clients_in_ascending_order_and_the_same_for_a_seed() -> None:
    ids = [f"d{i:02d}" for i in range(20)]
    drawn = uniform(ids, 7, np.random.default_rng(3))
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 7
    assert uniform(ids, 7, np.random.default_rng(3)) == drawn
    assert uniform(ids, 7, np.random.default_rng(4)) != drawn


def test_more_than_there_are_and_none_at_all() -> None:
    assert uniform(["a", "b"], 5, np.random.default_rng(0)) == ["a", "b"]
    assert uniform([], 5, np.random.default_rng(0)) == []
    assert uniform(["a"], 0, np.random.default_rng(0)) == []


def test_all_clients_are_as_likely() -> None:
    rng = np.random.default_rng(0)
    counts = Counter(i for _ in range(2000) for i in uniform(list("abcde"), 2, rng))
    # 800 expected, standard deviation sqrt(2000 * 0.4 * 0.6) = 22: beyond five of them once in 10^6
    assert all(abs(counts[i] - 800) < 5 * 22 for i in "abcde")
