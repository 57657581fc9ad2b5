"""The source beside the store: places at the first sight and for ever, marks and deletions, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_agent.samples import SampleStore
from edge_agent.samples.places import choose_place, compute_digests
from edge_agent.samples.sources import (
    Placed,
    count_shared,
    has_seen,
    identify_source,
    place_source,
    read_further,
    read_unlabelled,
)
from fedge.data.preprocessing import preprocess
from fedge.data.task import TEST, TRAIN, VALIDATION, Preprocessing, TaskSpec

TASK = TaskSpec(
    name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp", preprocessing=Preprocessing(mean=3.0, std=2.0)
)


def raw(numbers: list[int]) -> NDArray[np.float32]:
    return np.array([[k, 0] for k in numbers], np.float32)


def inputs(numbers: list[int], task: TaskSpec = TASK) -> NDArray[np.float32]:
    return preprocess(task, raw(numbers))


def drawn(n: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).choice(3, n).astype(np.int64)


@dataclass
class Source:
    """A source of samples, which are numbers."""

    store: SampleStore
    is_given: bool = False
    seen: int = 0

    def place(
        self,
        numbers: list[int],
        split: NDArray[np.int64],
        marked: set[int] = frozenset(),
        label: int = 0,  # type: ignore[assignment]
    ) -> Placed:
        self.seen += 1
        y, marks = np.full(len(numbers), label), np.array([k in marked for k in numbers], np.bool_)
        x = inputs(numbers)
        return place_source(self.store, x, y, marks, split, is_given=self.is_given, seen=str(self.seen))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(SampleStore(tmp_path, TASK))


def by_digest(numbers: list[int]) -> list[int]:
    return [choose_place(digest) for digest in compute_digests(inputs(numbers))]


def test_at_first_sight_the_split_holds_and_stays_whatever_comes(source: Source) -> None:
    split = drawn(30)
    assert source.place([*range(30)], split).place.tolist() == split.tolist()
    more = [*range(30, 60), *range(29, -1, -1)]
    found = source.place(more, drawn(60, seed=1)).place.tolist()
    assert found[30:] == split.tolist()[::-1], "in another order, with another draw"
    assert found[:30] == by_digest([*range(30, 60)]), "later ones go by their digest"


def test_a_source_that_says_where_its_samples_belong_says_it_once_for_each(source: Source) -> None:
    source.is_given = True
    assert source.place([1, 2], np.array([TEST, TRAIN])).place.tolist() == [TEST, TRAIN]
    assert source.place([1, 2, 3], np.array([TRAIN, TEST, VALIDATION])).place.tolist() == [TEST, TRAIN, VALIDATION]


def test_equal_samples_of_a_source_keep_their_places_each(source: Source) -> None:
    split = np.array([TRAIN, VALIDATION, TEST])
    assert source.place([7, 7, 7], split).place.tolist() == split.tolist()
    assert source.place([7, 7, 7, 7], drawn(4)).place.tolist() == [*split.tolist(), TEST], "another is held out as well"


def test_a_sample_has_one_place_in_source_and_store(source: Source) -> None:
    held = [k for k, place in enumerate(by_digest([*range(100)])) if place != TRAIN]
    early, late = held[:2]
    source.store.add(raw([early])[0], 0, origin="http")
    source.is_given = True
    source.place([early, late, 500], np.array([TRAIN, TRAIN, TEST]))
    source.store.add(raw([500])[0], 1, origin="http")
    found = source.store.read_labelled()
    place = dict(zip(found.x[:, 0].tolist(), found.place.tolist(), strict=True))
    assert place == {early: by_digest([early])[0], 500: TEST}
    assert source.place([early], np.array([TRAIN])).place.tolist() == [by_digest([early])[0]]


def test_a_mark_that_comes_or_goes_moves_nothing(source: Source) -> None:
    split = np.array([TEST, VALIDATION, TRAIN])
    source.place([1, 2, 3], split)
    assert source.place([1, 2, 3], split, {1, 2, 3}).place.tolist() == split.tolist()
    assert source.place([1, 2, 3], drawn(3), {3}).place.tolist() == split.tolist()


def test_what_the_owner_decides_on_a_sample_holds_in_the_source(source: Source) -> None:
    store = source.store
    numbers = [store.add(raw([k])[0], 0, origin="http") for k in (1, 2, 3)]
    store.mark([numbers[0] or 0])
    store.delete([numbers[1] or 0])
    found = source.place([1, 2, 3, 4], drawn(4))
    assert found.sensitive.tolist() == [True, False, False, False]
    assert found.kept.tolist() == [True, False, True, True]


def test_what_source_and_store_have_both_counts_once(source: Source) -> None:
    store = source.store
    source.place([1, 2, 3], np.array([TRAIN, TRAIN, VALIDATION]), {2})
    assert count_shared(store) == 1
    for k in (1, 2, 500, 501):
        store.add(raw([k])[0], 0, origin="http", sensitive=k in {2, 501})
    further = read_further(store)
    assert further.x[:, 0].tolist() == [500, 501]
    assert count_shared(store) == 1 + int(((further.place == TRAIN) & ~further.sensitive).sum())
    source.place([3], np.array([VALIDATION]))
    assert read_further(store).x[:, 0].tolist() == [1, 2, 500, 501], "the source has lost them"


def test_versions_rise_with_what_is_not_sensitive_alone(source: Source) -> None:
    store = source.store
    told = []
    for numbers, marked in (
        ([1, 2], {9}),
        ([1, 2], {9}),
        ([1, 9, 2], {9}),
        ([8, 1, 9, 2, 9], {8, 9}),
        ([1, 2, 3], {9}),
        ([1, 2], {9}),
        ([1, 2], {2}),
    ):
        source.place(numbers, np.zeros(len(numbers), np.int64), set(marked))
        told.append((store.data_version, store.n_arrived))
    assert told == [(1, 2), (1, 2), (1, 2), (1, 2), (2, 3), (3, 3), (4, 3)]
    source.place([1, 2], np.zeros(2, np.int64), {2}, label=1)
    assert (store.data_version, store.n_arrived) == (5, 3), "another label"


def test_samples_without_labels_do_not_count_as_labelled_ones_that_came(source: Source) -> None:
    none = np.zeros(0, np.int64)
    place_source(
        source.store, inputs([1, 2]), none, np.zeros(2, np.bool_), np.zeros(2, np.int64), is_given=False, seen=""
    )
    assert (source.store.data_version, source.store.n_arrived) == (1, 0)


def test_other_inputs_are_other_samples(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as store:
        Source(store).place([1, 2, 3], drawn(3))
    other = TaskSpec(name="t", classes=TASK.classes, input_shape=(2,), model="mlp")
    with SampleStore(tmp_path, other) as store:
        split = drawn(3, seed=5)
        found = place_source(
            store,
            inputs([1, 2, 3], other),
            np.zeros(3, np.int64),
            np.zeros(3, np.bool_),
            split,
            is_given=False,
            seen="s",
        )
        assert found.place.tolist() == split.tolist()


def test_a_change_of_the_files_or_a_decision_is_seen(tmp_path: Path, source: Source) -> None:
    store, folder = source.store, tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_text("1")
    seen = identify_source(store, folder)
    number = store.add(raw([1])[0], 0, origin="http")
    assert identify_source(store, folder) == seen
    (folder / "b").write_text("1")
    assert identify_source(store, folder) != seen
    seen = identify_source(store, folder)
    store.mark([number or 0])
    assert identify_source(store, folder) != seen
    x, y, marks = inputs([1]), np.zeros(1, np.int64), np.zeros(1, np.bool_)
    assert not has_seen(store, folder)
    place_source(store, x, y, marks, y, is_given=False, seen=identify_source(store, folder))
    assert has_seen(store, folder)


def test_inputs_without_a_label_are_those_of_now_that_would_not_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "samples.toml").write_text("[samples]\nunlabelled = 100\n")
    numbers = [*range(20)]
    with SampleStore(tmp_path, TASK) as store:
        assert read_unlabelled(store).shape == (0, 2)
        store.add(raw([50])[0], 1, origin="http")
        added = [store.add(raw([k])[0], None, origin="serve") or 0 for k in numbers]
        kept = [k for k, place in zip(numbers, by_digest(numbers), strict=True) if place == TRAIN]
        assert read_unlabelled(store)[:, 0].tolist() == kept
        store.save_present(added[10], 0)
        assert read_unlabelled(store)[:, 0].tolist() == [k for k in kept if k >= 10]
