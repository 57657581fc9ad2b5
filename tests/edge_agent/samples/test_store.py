"""The store of samples: kill -9, several processes, bounds, places, marks, deletion, and what is told of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_agent.samples import Answered, Labelled, SampleStore, store
from edge_agent.samples.database import save_fact
from edge_agent.samples.places import choose_place, compute_digests, compute_rank
from fedge.data.classes import add_classes
from fedge.data.preprocessing import preprocess
from fedge.data.task import TRAIN, Preprocessing, TaskSpec
from fedge.errors import ConfigError, DamagedError

TASK = TaskSpec(
    name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp", preprocessing=Preprocessing(mean=3.0, std=2.0)
)
GREY = TaskSpec(
    name="g",
    classes=("a", "b"),
    input_shape=(1, 4, 4),
    model="mlp",
    preprocessing=Preprocessing(scale=255.0, image_mode="L"),
)
ADDS = """
import sys
from pathlib import Path
import numpy as np
from edge_agent.samples import SampleStore
from tests.edge_agent.samples.test_store import TASK
store, who = SampleStore(Path(sys.argv[1]), TASK), int(sys.argv[2])
for n in range(int(sys.argv[3])):
    number = store.add(np.array([n, who], np.float32), n % 3, origin="python")
    print(n, number, flush=True)  # it is acknowledged
"""


def x(k: float, more: float = 0.0) -> NDArray[np.float32]:
    return np.array([k, more], np.float32)


def digest(sample: NDArray[np.float32]) -> bytes:
    return compute_digests(preprocess(TASK, sample[np.newaxis]))[0]


def add(samples: SampleStore, sample: NDArray[np.float32], label: int | None = 0, *, sensitive: bool = False) -> int:
    number = samples.add(sample, label, origin="python", sensitive=sensitive)
    assert number is not None
    return number


def limit(home: Path, **settings: object) -> None:
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in settings.items()]
    (home / "samples.toml").write_text("\n".join(["[samples]", *lines]))


def same(a: Labelled, b: Labelled) -> bool:
    names = ("x", "y", "sensitive", "place", "at")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


# ------------------------------------------------------------------------------------------------------- what lasts


@pytest.mark.parametrize("after", [1, 7, 40])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", ADDS, tmp_path, "1", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [next(process.stdout) for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    n = len([line for line in said if line.endswith("\n")])
    with SampleStore(tmp_path) as samples:
        found = samples.read_labelled()
        assert n <= len(found.y) <= n + 1
        assert [(int(a), int(b)) for a, b in found.x] == [(k, 1) for k in range(len(found.y))]
        assert list(found.y) == [k % 3 for k in range(len(found.y))]
        assert samples.n_arrived == samples.data_version == len(found.y)


def test_two_processes_add_at_the_same_time(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", ADDS, tmp_path, who, "30"] for who in "12"]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(120) for process in both] == [0, 0]
    with SampleStore(tmp_path) as samples:
        found = samples.read_labelled()
        assert sorted(map(tuple, found.x.tolist())) == [(k, who) for k in range(30) for who in (1, 2)]
        assert samples.n_arrived == 60


def test_what_is_read_is_what_came_in_order_of_arrival(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        for k in range(5):
            samples.add(x(k), k % 3, origin="mqtt", sensitive=k == 2, at=float(k))
    with SampleStore(tmp_path) as samples:
        found = samples.read_labelled()
    assert found.x.tolist() == [[k, 0] for k in range(5)]
    assert (found.y.tolist(), found.at.tolist()) == ([0, 1, 2, 0, 1], [0, 1, 2, 3, 4])
    assert found.sensitive.tolist() == [False, False, True, False, False]
    assert found.place.tolist() == [choose_place(digest(sample)) for sample in found.x]


def test_a_picture_of_any_form_is_the_same_and_kept_in_bytes(tmp_path: Path) -> None:
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
    with SampleStore(tmp_path, GREY) as samples:
        assert samples.add(pixels, 0, origin="http") == 1
        assert samples.add(pixels[np.newaxis].astype(np.float64), 0, origin="http") is None
        assert samples.add(pixels[..., np.newaxis], 0, origin="mqtt") is None
        found = samples.read_labelled()
        assert (found.x.dtype, found.x.shape) == (np.uint8, (1, 1, 4, 4))
        samples.add(pixels * 0.5, 0, origin="http")
        found = samples.read_labelled()
        assert np.array_equal(found.x[1, 0], pixels * 0.5)
        assert np.array_equal(samples.read_input(2)[0], pixels * 0.5)


def test_a_sample_that_comes_again_counts_once_and_with_another_label_again(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        assert samples.add(x(1), 0, origin="http") == 1
        assert samples.add(x(1), 0, origin="mqtt") is None
        assert samples.add(x(1), 1, origin="mqtt") == 2
        assert samples.n_arrived == samples.data_version == 2


@pytest.mark.parametrize(
    ("sample", "label", "reason"),
    [
        (np.zeros(3, np.float32), 0, "shape"),
        (x(1), 3, "the label 3 is not one of the 3 classes"),
        (x(np.nan), 0, "not a finite number"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(
    tmp_path: Path, sample: NDArray[np.float32], label: int, reason: str
) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        with pytest.raises(ConfigError, match=reason):
            samples.add(sample, label, origin="http")
        assert samples.list_samples() == []


def test_the_task_is_noted_and_another_one_is_named(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as samples, pytest.raises(ConfigError, match="does not know the task yet"):
        add(samples, x(1))
    SampleStore(tmp_path, GREY).close()
    more = TaskSpec(name="t", classes=("a", "b", "c", "d"), input_shape=(2,), model="mlp")
    for task in (TASK, more, TASK):  # GREY had no samples
        with SampleStore(tmp_path, task) as samples:
            samples.add(x(1), 0, origin="http")
    with SampleStore(tmp_path) as samples:
        assert samples.task == more
    other = TaskSpec(name="t", classes=("x", "y"), input_shape=(2,), model="mlp")
    with pytest.raises(ConfigError, match="holds samples of the classes a, b, c, d, and the task has x, y"):
        SampleStore(tmp_path, other)
    with pytest.raises(ConfigError, match=r"holds samples of shape \(2,\), and the task has \(1, 4, 4\)"):
        SampleStore(tmp_path, GREY)


def test_a_task_that_cannot_be_read_is_damage_of_the_file(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples, samples.database.write() as db:
        save_fact(db, "task", "{")
    with pytest.raises(DamagedError, match=r"samples\.db is damaged, move it away to begin anew"):
        SampleStore(tmp_path, TASK)


# ----------------------------------------------------------------------------------------------------------- bounds


def test_of_a_full_class_the_oldest_go_but_for_an_even_choice_of_all(tmp_path: Path) -> None:
    limit(tmp_path, per_class=20, keep_old=0.5)
    came = [x(k) for k in range(200)]
    with SampleStore(tmp_path, TASK) as samples:
        for sample in came:
            add(samples, sample)
        add(samples, x(-1), 1)
        found = samples.read_labelled()
        kept = [int(sample[0]) for sample, label in zip(found.x, found.y, strict=True) if label == 0]
        chosen = sorted(range(200), key=lambda k: compute_rank(digest(came[k])))[:10]
        assert len(kept) == 20
        assert set(chosen) <= set(kept)
        rest = sorted(set(kept) - set(chosen))
        assert rest == sorted(set(range(200)) - set(chosen))[-10:], "the newest of the others"
        assert samples.n_arrived == 201, "it never falls"


def test_beyond_the_bytes_the_fullest_class_gives_way(tmp_path: Path) -> None:
    limit(tmp_path, max_mb=0.0025, keep_old=0.0)  # 12 samples of 208 bytes
    with SampleStore(tmp_path, TASK) as samples:
        for k in range(3):
            add(samples, x(k), 1)
        for k in range(30):
            add(samples, x(100 + k), 0)
        assert {total.label: total.n for total in samples.count_samples()} == {0: 9, 1: 3}
        assert [int(k) for k, _ in samples.read_labelled().x] == [0, 1, 2, *range(121, 130)]


def test_a_sample_larger_than_everything_is_refused(tmp_path: Path) -> None:
    limit(tmp_path, max_mb=0.0001)
    with SampleStore(tmp_path, TASK) as samples, pytest.raises(ConfigError, match="more than max_mb"):
        add(samples, x(1))


def test_inputs_without_a_label_are_kept_only_if_the_owner_says_so(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        assert samples.add(x(1), None, origin="http") is None
    limit(tmp_path, unlabelled=4)
    with SampleStore(tmp_path, TASK) as samples:
        for k in range(9):
            add(samples, x(k), None)
        found = samples.list_samples(labelled=False)
        assert (len(found), samples.n_arrived, samples.data_version) == (4, 0, 0)
        assert len(samples.read_labelled().y) == 0
        samples.set_label(found[0].number, 2)
        assert samples.read_labelled().y.tolist() == [2]
        assert (samples.n_arrived, len(samples.list_samples(labelled=False))) == (1, 3)
        label = add(samples, samples.read_input(found[1].number), 1)
        assert len(samples.list_samples(labelled=False)) == 2, "the label came on another way"
        assert samples.read_sample(label).label == 1


# ------------------------------------------------------------------------------------------------ labels that come


def test_the_label_of_an_earlier_request_makes_a_sample_of_it(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        samples.remember("r1", x(5), Answered(2, 7))
        assert samples.list_samples() == []
        assert samples.add_target("r1", 1)
        assert samples.add_target("r1", 1), "the sender did not hear that it was added"
        assert not samples.add_target("r2", 1)
        assert samples.read_labelled().x.tolist() == [[5, 0]]
        assert samples.count_recent_answers(10) == (0, 1)


def test_the_oldest_requests_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_REMEMBERED_BYTES", 650)
    with SampleStore(tmp_path, TASK) as samples:
        for k in range(5):
            samples.remember(f"r{k}", x(k), Answered(0, 1))
        samples.remember("r4", x(4), Answered(0, 1))
        assert [samples.add_target(f"r{k}", 0) for k in range(5)] == [False, False, True, True, True]


# ----------------------------------------------------------------------------------------------------- the examination


def test_the_newest_that_nothing_trained_on_come_first(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        for k in range(100):
            add(samples, x(k), sensitive=k % 4 == 0)
        found = samples.read_labelled()
        for marked in (False, True):
            own = found.sensitive == marked
            held = [int(k) for (k, _), place in zip(found.x[own], found.place[own], strict=True) if place != TRAIN]
            rest = [int(k) for (k, _), place in zip(found.x[own], found.place[own], strict=True) if place == TRAIN]
            few, many = samples.read_newest(2), samples.read_newest(len(held) + 2)
            assert [int(k) for k, _ in few.x[few.sensitive == marked]] == held[-2:]
            assert [int(k) for k, _ in many.x[many.sensitive == marked]] == sorted([*held, *rest[-2:]])
        everything = samples.read_newest(100)
        assert same(everything, found)


# ------------------------------------------------------------------------------------------- what the owner decides


def test_what_the_owner_deletes_is_gone_and_does_not_come_back(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        number = add(samples, x(12345, 0.125))
        before = samples.data_version, samples.revision
        assert samples.delete([number, 99]) == 1
        assert (samples.n_arrived, samples.data_version > before[0], samples.revision > before[1]) == (1, True, True)
        assert samples.add(x(12345, 0.125), 0, origin="http") is None
        assert samples.add(x(12345, 0.125), 1, origin="http") is None
        assert samples.list_samples() == []
    bytes_there = b"".join(path.read_bytes() for path in (tmp_path / "samples").iterdir())
    assert x(12345, 0.125).tobytes() not in bytes_there


def test_what_the_owner_marks_stays_marked_when_it_comes_again(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        number = add(samples, x(1))
        before = samples.data_version
        assert (samples.mark([number]), samples.mark([number])) == (1, 0)
        assert samples.data_version == before + 1
        assert samples.add(x(1), 1, origin="http") is not None
        assert [sample.sensitive for sample in samples.list_samples()] == [True, True]
        assert samples.n_arrived == 1
        samples.mark([number], sensitive=False)
        assert samples.n_arrived == 2
        assert not samples.read_sample(number).sensitive


def test_rules_mark_what_comes_and_on_demand_what_is_there(tmp_path: Path) -> None:
    with SampleStore(tmp_path, TASK) as samples:
        for k in range(300):
            add(samples, x(k), k % 2)
    limit(tmp_path, sensitive_classes="b")
    with SampleStore(tmp_path, TASK) as samples:
        assert samples.read_sample(add(samples, x(-1), 1)).sensitive
        assert not samples.read_sample(add(samples, x(-1), 0)).sensitive
        assert samples.apply_rules() == 150
        found = samples.read_labelled()
        assert np.array_equal(found.sensitive, found.y == 1)
        samples.set_label(1, 1)
        assert samples.read_sample(1).sensitive, "its right class is sensitive"


def test_totals_are_those_of_the_samples_whatever_happened(tmp_path: Path) -> None:
    limit(tmp_path, per_class=6, unlabelled=3)
    rng = np.random.default_rng(0)
    with SampleStore(tmp_path, TASK) as samples:
        for _ in range(300):
            label = None if rng.integers(4) == 0 else int(rng.integers(3))
            samples.add(x(int(rng.integers(30))), label, origin="python", sensitive=bool(rng.integers(2)))
            one = int(rng.choice([sample.number for sample in samples.list_samples()]))
            match rng.integers(6):
                case 0:
                    samples.set_label(one, int(rng.integers(3)))
                case 1:
                    samples.mark([one], sensitive=bool(rng.integers(2)))
                case 2 if rng.integers(5) == 0:
                    samples.delete([one])
            found = samples.list_samples(limit=1000)
            counted = {(total.label, total.sensitive): (total.n, total.size) for total in samples.count_samples()}
            for key, (n, size) in counted.items():
                own = [sample.size for sample in found if (sample.label, sample.sensitive) == key]
                assert (len(own), sum(own)) == (n, size)
            assert sum(n for n, _ in counted.values()) == len(found)
        assert all(n <= 6 for n, _ in counted.values())


# ---------------------------------------------------------------------------------------------------------- privacy


def test_sensitive_samples_shape_nothing_about_the_others_nor_does_when_they_came(tmp_path: Path) -> None:
    """Equal inputs, full classes and quotas, unlabelled ones and answers: what is told of the others stays equal."""
    rng = np.random.default_rng(3)
    plain = [(int(rng.integers(60)), int(rng.integers(3))) for _ in range(200)]
    told = []
    for marked in range(3):
        home = tmp_path / str(marked)
        home.mkdir()
        limit(home, per_class=10, max_mb=0.005, unlabelled=5)
        others = np.random.default_rng(marked)
        with SampleStore(home, TASK) as samples:
            seen = []
            for k, label in plain:
                for _ in range(int(others.integers(4)) if marked else 0):
                    secret, own = int(others.integers(60)), int(others.integers(3))
                    samples.add(x(secret), own, origin="http", sensitive=True, answered=Answered(0, 1))
                    samples.add(x(secret), None, origin="http", sensitive=True)
                samples.add(x(k), label, origin="http", answered=Answered(1, 1), at=float(k))
                samples.add(x(-k), None, origin="http")
                seen.append((samples.data_version, samples.n_arrived, samples.count_recent_answers(20)))
            found, newest = samples.read_labelled(), samples.read_newest(7)
            assert found.sensitive.any() == bool(marked)
            rows = [
                [getattr(part, name)[~part.sensitive].tolist() for name in ("x", "y", "place", "at")]
                for part in (found, newest)
            ]
            kept = [(s.label, s.place, s.at) for s in samples.list_samples(limit=1000) if not s.sensitive and s.label]
            told.append((seen, rows, kept, samples.count_answers()))
    assert told[0] == told[1] == told[2]


def test_a_class_that_has_joined_in_another_process_is_known_at_once(tmp_path: Path) -> None:
    grown = add_classes(TASK, ("d",))
    with SampleStore(tmp_path, TASK) as served:
        add(served, x(1))
        with pytest.raises(ConfigError, match="--add-class"):
            add(served, x(2), 3)
        SampleStore(tmp_path, grown).close()  # as the agent does
        add(served, x(2), 3)
        assert served.refresh_task() == grown
    with SampleStore(tmp_path, TASK) as again:
        assert again.task == grown
        assert again.read_labelled().y.tolist() == [0, 3]
