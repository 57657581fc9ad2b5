"""Score at work, of samples that were labelled later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.samples import Answered, SampleStore, answers
from edge_agent.samples.answers import AnswerCount
from fedge.data.task import TaskSpec

TASK = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp")
DAY_S = 86400.0


def x(k: int) -> np.ndarray:
    return np.array([k, k / 7], np.float32)


def test_answers_are_counted_by_day_release_and_class(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as store:
        store.add(x(0), 0, origin="http", answered=Answered(0, 7), at=10.0)
        store.add(x(1), 0, origin="http", answered=Answered(2, 7), at=20.0)
        store.add(x(2), 1, origin="http", answered=Answered(1, 8), at=DAY_S + 1)
        store.add(x(3), 2, origin="http", at=DAY_S + 2)
        assert store.count_answers() == [
            AnswerCount(begin=0.0, release=7, label=0, right=1, wrong=1),
            AnswerCount(begin=DAY_S, release=8, label=1, right=1, wrong=0),
        ]
        assert [count.release for count in store.count_answers(since=DAY_S)] == [8]
        assert store.count_recent_answers(2) == (1, 1)
        assert store.count_recent_answers(10, release=8) == (1, 0)


def test_a_sample_that_comes_again_counts_once_for_each_release(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as store:
        for release in (1, 1, 2):
            store.add(x(0), 0, origin="http", answered=Answered(0, release))
        assert store.count_recent_answers(10) == (2, 0)
        assert [total.n for total in store.count_samples()] == [1]


def test_sensitive_answers_count_only_on_the_device(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as store:
        number = store.add(x(0), 0, origin="http", answered=Answered(0, 1))
        store.add(x(1), 0, origin="http", answered=Answered(1, 1), sensitive=True)
        assert store.count_recent_answers(10) == (1, 0)
        assert store.count_recent_answers(10, with_sensitive=True) == (1, 1)
        assert number is not None
        store.mark([number])
        assert (store.count_answers(), store.count_recent_answers(10)) == ([], (0, 0))
        store.delete([number])
        assert store.count_recent_answers(10, with_sensitive=True) == (0, 1)


def test_a_label_that_is_put_right_changes_the_verdict(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as store:
        number = store.add(x(0), 0, origin="http", answered=Answered(1, 1))
        assert number is not None
        store.set_label(number, 1)
        assert store.count_recent_answers(10) == (1, 0)


def test_the_oldest_answers_go_and_sensitive_ones_push_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 5)
    with SampleStore(tmp_path, TASK) as store:
        for k in range(8):
            store.add(x(k), 0, origin="http", answered=Answered(int(k < 4), 1))
            store.add(x(k), 0, origin="http", answered=Answered(0, 1), sensitive=True)
        assert store.count_recent_answers(100) == (4, 1)
        assert store.count_recent_answers(100, with_sensitive=True) == (9, 1)
