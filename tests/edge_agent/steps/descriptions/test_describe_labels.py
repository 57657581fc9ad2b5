"""The label feature: table and laws of cfic.md sections 3 and 11; randomised response of section 10."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.device.worker import Worker
from edge_agent.steps.descriptions.describe_labels import compute_label_feature, randomised_response
from fedge.data.task import TaskSpec
from fedge.steps.contract import Failed
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.tasks import DeviceData
from tests.support.orders import order

CLASSES = tuple("abcdefghij")
TASK = TaskSpec(name="toy", classes=CLASSES, input_shape=(2,), model="mlp")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0, 0, 40, 0, 0, 0, 0, 0, 0), 3),
        ((5, 30, 2, 0, 0, 8, 0, 0, 0, 1), 1),
        ((7,) * 10, 0),
        ((0, 0, 9, 0, 0, 9, 1, 0, 0, 0), 2),
        ((4, 4, 4, 4, 0, 4, 4, 4, 4, 4), 0),
        ((3, 9), 1),
        ((10, 25, 5, 0, 10), 1),
        ((0,) * 10, -1),
        ((5,), 0),
        ((0,), -1),
    ],
)
def test_the_table(counts, expected) -> None:
    assert compute_label_feature(counts) == expected


some_counts = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(some_counts, st.integers(1, 10**12))
def test_it_is_the_first_of_the_largest_counts_whatever_the_scale(counts, factor) -> None:
    expected = counts.index(max(counts)) if any(counts) else -1
    assert compute_label_feature(counts) == compute_label_feature([factor * c for c in counts]) == expected


@given(st.permutations(range(6)), st.lists(st.integers(0, 100), min_size=6, max_size=6, unique=True))
def test_relabelling_carries_through(order, counts) -> None:
    assert compute_label_feature([counts[k] for k in order]) == order.index(compute_label_feature(counts))


def test_large_counts_that_differ_by_one_are_told_apart() -> None:
    assert compute_label_feature([10**15, 10**15 + 1, 10**15]) == 1


def test_randomised_response_has_the_promised_probabilities() -> None:
    rng, epsilon = np.random.default_rng(0), 1.0
    n, keep = 20_000, math.e / (math.e + 9)
    counts = Counter(randomised_response(4, 10, epsilon, rng) for _ in range(n))
    assert set(counts) == set(range(10))
    for label, count in counts.items():
        p = keep if label == 4 else (1 - keep) / 9
        assert abs(count - n * p) < 5 * math.sqrt(n * p * (1 - p))  # ten times beyond: once in 10^5


def test_one_class_has_nothing_to_hide() -> None:
    assert randomised_response(0, 1, 1.0, np.random.default_rng(0)) == 0


# ------------------------------------------------------------------------------------------------- the whole order


def data(labels: list[int], sensitive: list[int] = ()) -> DeviceData:
    y = np.array([*labels, *sensitive], np.int64)
    marks = np.array([False] * len(labels) + [True] * len(sensitive), bool)
    return DeviceData(np.zeros((len(y), 2), np.float32), y, marks, np.zeros((0, 2), np.float32), y[:0])


def told(home, own: DeviceData, action: DescribeLabels, seed: int = 5, task: TaskSpec = TASK) -> LabelsDescribed:
    result = Worker("d", task, own, home).execute(order(action, seed=seed, task=task), lambda _: b"").result
    assert isinstance(result, LabelsDescribed), result
    return result


def test_sensitive_samples_are_not_counted(tmp_path) -> None:
    found = told(tmp_path, data([3, 3, 1], sensitive=[8] * 20), DescribeLabels())
    assert (found.feature, found.n_samples) == (3, 3)


def test_without_samples_there_is_no_feature_and_nothing_is_drawn(tmp_path) -> None:
    found = told(tmp_path, data([], sensitive=[1]), DescribeLabels(epsilon=1.0))
    assert (found.feature, found.n_samples) == (-1, 0)
    assert list(tmp_path.glob("labels*")) == []


def test_a_randomised_answer_is_given_for_ever(tmp_path) -> None:
    first = told(tmp_path, data([3]), DescribeLabels(epsilon=0.01)).feature
    for seed in range(20):
        assert told(tmp_path, data([3]), DescribeLabels(epsilon=0.01), seed=seed).feature == first
    assert told(tmp_path, data([5] * 9), DescribeLabels(epsilon=9.0)).feature == first
    assert told(tmp_path, data([3]), DescribeLabels()).feature == 3


def test_another_task_has_an_answer_of_its_own(tmp_path) -> None:
    told(tmp_path, data([3]), DescribeLabels(epsilon=0.01))
    two = TaskSpec(name="toy", classes=("a", "b"), input_shape=(2,), model="mlp")
    assert told(tmp_path, data([1]), DescribeLabels(epsilon=50.0), task=two).feature == 1


def test_the_orders_seed_does_not_tell_the_answer(tmp_path) -> None:
    answers = {told(tmp_path / str(k), data([3]), DescribeLabels(epsilon=0.01)).feature for k in range(40)}
    assert len(answers) > 1  # all equal by chance: 10^-39


def test_a_spoiled_store_is_not_drawn_anew(tmp_path) -> None:
    told(tmp_path, data([3]), DescribeLabels(epsilon=1.0))
    (tmp_path / "labels.json").write_bytes(b"{")
    worker = Worker("d", TASK, data([3]), tmp_path)
    failed = worker.execute(order(DescribeLabels(epsilon=1.0)), lambda _: b"").result
    assert isinstance(failed, Failed)
    assert "labels.json" in failed.reason
    assert (tmp_path / "labels.json").read_bytes() == b"{"
