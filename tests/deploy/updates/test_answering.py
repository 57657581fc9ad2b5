"""Switching fails no request; a bundle on trial that fails or is slow is given up by itself."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest

from deploy.inference.engines import EngineOptions
from deploy.updates.answering import LATENCY_WINDOW, MAX_FAILED, ActiveBundle
from deploy.updates.drift import MIN_FITTING, WINDOW, Alarm
from deploy.updates.examination import Limits
from deploy.updates.slots import MAX_STARTS, Slots
from fedge.bundle.manifest import read_bundle
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.errors import ConfigError, StoreError, UpdateRejected
from fedge.wire.messages import DriftKind, Outliers

from ..bundles import CLASSES, GOLDEN, digest, other_gate, poor_gate, source, variant
from ..faults import no_room

pytestmark = pytest.mark.torch_free

LIMITS = Limits(probation_predictions=20, probation_s=1e9)


@pytest.fixture
def x():
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        return arrays["x"][:1]


@pytest.fixture
def slots(tmp_path):
    slots = Slots(tmp_path / "home")
    put(slots, variant(tmp_path / "1", release=1))
    slots.confirm()
    return slots


def put(slots, folder):
    slots.stage(*source(folder))
    slots.switch()


def second(slots, tmp_path):
    put(slots, variant(tmp_path / "2", release=2, gate=other_gate))


def release(answering):
    return answering.runtime.manifest.release


def test_without_a_bundle_it_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="fedge install"):
        ActiveBundle(Slots(tmp_path / "home"), LIMITS)


def test_a_bundle_proves_itself_by_its_work(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)
    answering.swap()
    answering.settle()
    assert slots.state.trial is not None

    for _ in range(LIMITS.probation_predictions):
        answering.answer(x)
    answering.settle()

    assert slots.state.trial is None
    assert slots.good == slots.running
    assert release(answering) == 2


def test_time_alone_is_proof_for_a_device_that_is_rarely_asked(slots, tmp_path):
    answering = ActiveBundle(slots, Limits(probation_s=0))
    second(slots, tmp_path)
    answering.swap()

    answering.settle()

    assert slots.state.trial is None


class Failing:
    """A runtime whose graph fails, as one does that meets samples which nobody tried."""

    def __init__(self, runtime):
        self._runtime = runtime

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def predict(self, x):
        raise RuntimeError("bad node")


def test_failures_on_trial_bring_the_good_one_back(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)
    answering.swap()
    answering._runtime = Failing(answering._runtime)

    for _ in range(MAX_FAILED + 1):
        with pytest.raises(RuntimeError):
            answering.answer(x)

    assert release(answering) == 1
    assert answering.answer(x)[1].class_index.shape == (1,)
    assert answering.n_failed == MAX_FAILED + 1
    assert "4 predictions in a row" in next(iter(slots.state.refused.values()))


def test_one_that_is_slow_at_work_is_given_up(slots, tmp_path, x):
    answering = ActiveBundle(slots, Limits(probation_predictions=10**6, latency_ms=0))
    second(slots, tmp_path)
    answering.swap()

    for _ in range(LATENCY_WINDOW):
        answering.answer(x)

    assert release(answering) == 1
    assert "latency" in next(iter(slots.state.refused.values()))


def test_one_that_cannot_be_loaded_leaves_the_other_answering(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)
    (slots.running / "skeleton.onnx").unlink()

    with pytest.raises(UpdateRejected):
        answering.swap()

    assert release(answering) == 1
    assert slots.running == slots.good
    answering.answer(x)


def test_at_start_a_trial_that_cannot_be_loaded_gives_way_to_the_good_one(slots, tmp_path):
    second(slots, tmp_path)
    (slots.running / "skeleton.onnx").unlink()

    assert release(ActiveBundle(slots, LIMITS)) == 1
    assert slots.state.trial is None


def test_at_start_a_confirmed_bundle_that_is_damaged_gives_way_to_the_one_before(slots, tmp_path):
    second(slots, tmp_path)
    slots.confirm()
    (slots.running / "skeleton.onnx").unlink()

    assert release(ActiveBundle(slots, LIMITS)) == 1
    assert release(ActiveBundle(Slots(tmp_path / "home"), LIMITS)) == 1


def test_with_both_bundles_damaged_it_says_so(slots, tmp_path):
    second(slots, tmp_path)
    slots.confirm()
    (slots.running / "skeleton.onnx").unlink()
    (slots.staged / "skeleton.onnx").unlink()
    before = slots.state

    with pytest.raises(UpdateRejected):
        ActiveBundle(slots, LIMITS)

    assert slots.state == before


def test_an_abort_goes_nowhere_when_the_good_bundle_is_damaged(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)
    answering.swap()
    (slots.good / "skeleton.onnx").unlink()

    answering.revert("aborted")

    assert release(answering) == 2
    answering.answer(x)


@pytest.fixture
def unreadable(monkeypatch):
    """Within it the disk cannot read a bundle."""

    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    @contextlib.contextmanager
    def disk():
        with monkeypatch.context() as patched:
            patched.setattr("deploy.updates.answering.load_update", fails)
            yield

    return disk


def test_one_that_the_disk_cannot_read_leaves_the_other_answering(slots, tmp_path, unreadable):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)

    with unreadable(), pytest.raises(UpdateRejected, match="Input/output"):
        answering.swap()

    assert slots.state.trial is None
    assert slots.running == slots.good


def test_one_that_cannot_be_loaded_while_the_disk_is_full_is_taken_back_later(slots, tmp_path):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)
    (slots.running / "skeleton.onnx").unlink()

    with no_room():
        for step in (answering.swap, answering.settle):
            with pytest.raises(StoreError):
                step()
        assert release(answering) == 1
    answering.settle()

    assert slots.state.trial is None
    assert slots.running == slots.good
    assert digest(tmp_path / "2") not in slots.state.refused  # it is this disk that lost a file


def test_when_the_good_one_cannot_be_loaded_at_once_it_is_tried_again(slots, tmp_path, x, unreadable):
    answering = ActiveBundle(slots, Limits(probation_s=1e9))
    second(slots, tmp_path)
    answering.swap()
    with unreadable():
        answering.revert("aborted")
        answering.settle()
        assert release(answering) == 2
        assert answering.no_way_back

    answering.settle()

    assert release(answering) == 1
    assert not answering.no_way_back


def test_what_the_old_bundle_does_until_the_switch_says_nothing_of_the_new_one(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    answering._runtime = Failing(answering._runtime)
    second(slots, tmp_path)

    for _ in range(MAX_FAILED + 1):
        with pytest.raises(RuntimeError):
            answering.answer(x)
    answering.settle()

    assert slots.state.trial is not None
    assert not slots.state.refused


def test_predictions_go_on_while_the_disk_takes_its_time(slots, tmp_path, x, forced):
    answering = ActiveBundle(slots, Limits(probation_s=0))
    second(slots, tmp_path)
    answering.swap()
    writing, written = threading.Event(), threading.Event()

    def slowly():
        writing.set()
        assert written.wait(30)

    forced.before = slowly
    with ThreadPoolExecutor(2) as pool:
        settled = pool.submit(answering.settle)
        try:
            assert writing.wait(30)
            pool.submit(answering.answer, x).result(timeout=300)
        finally:
            written.set()
        settled.result()

    assert slots.state.trial is None


def test_processes_that_die_while_they_load_it_bring_the_good_one_back(slots, tmp_path):
    second(slots, tmp_path)
    for _ in range(MAX_STARTS):
        Slots(tmp_path / "home").boot()  # and dies

    assert release(ActiveBundle(Slots(tmp_path / "home"), LIMITS)) == 1


def test_a_confirmed_bundle_can_be_taken_back(slots, tmp_path, x):
    answering = ActiveBundle(slots, Limits(probation_s=0))
    second(slots, tmp_path)
    answering.swap()
    answering.settle()

    answering.revert("the rollout was aborted")

    assert release(answering) == 1
    assert Slots(tmp_path / "home").state.trial is None
    assert release(ActiveBundle(Slots(tmp_path / "home"), LIMITS)) == 1


def test_an_abort_and_a_complaint_at_once_go_back_but_once(slots, tmp_path, x, monkeypatch):
    answering = ActiveBundle(slots, LIMITS)
    second(slots, tmp_path)
    answering.swap()
    asked, both, written, save = threading.Event(), threading.Barrier(2), threading.Event(), slots._save

    class Observed(Failing):
        def predict(self, x):
            asked.set()
            return super().predict(x)

    def read_together(folder):
        found = read_bundle(folder)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        if threading.current_thread() is threading.main_thread():
            written.wait(1)  # by the other one
        return found

    def saved(state, **how):
        save(state, **how)
        written.set()

    answering._runtime = Observed(answering._runtime)
    for _ in range(MAX_FAILED):
        with pytest.raises(RuntimeError):
            answering.answer(x)
    asked.clear()
    monkeypatch.setattr("deploy.updates.slots.read_bundle", read_together)
    monkeypatch.setattr(slots, "_save", saved)
    with ThreadPoolExecutor(1) as pool:
        complaining = pool.submit(answering.answer, x)
        assert asked.wait(30)
        answering.revert("aborted")
        with pytest.raises(RuntimeError):
            complaining.result()

    assert release(answering) == 1
    assert (slots.running, slots.state.trial) == (slots.good, None)
    assert slots.running.name == "slot-a"
    assert set(slots.state.refused) == {digest(tmp_path / "2")}


def test_with_nothing_to_go_back_to_it_goes_on(slots, x):
    answering = ActiveBundle(slots, LIMITS)

    answering.revert("aborted")

    assert release(answering) == 1
    answering.answer(x)


def test_outliers_are_counted_by_bundle(slots, tmp_path, x):
    names = ("free_energy_mean", "free_energy_std", "gate_entropy_mean", "gate_entropy_std", "outlier_above")
    usual = {"n": 10, **dict.fromkeys(names, 1e9)}
    strange = usual | {"outlier_above": -1e9}
    for release, changes, told in (
        (4, {"reference": strange}, Outliers(seen=2, flagged=2)),
        (5, {"reference": usual}, Outliers(seen=2, flagged=0)),
        (6, {}, None),
    ):
        put(slots, variant(tmp_path / str(release), release=release, **changes))
        slots.confirm()
        answering = ActiveBundle(slots, Limits())
        answering.answer(np.concatenate([x, x]))
        assert answering.outliers == told, release


def test_a_sample_of_the_wrong_shape_is_the_callers_fault(slots):
    answering = ActiveBundle(slots, LIMITS)

    with pytest.raises(ConfigError):
        answering.answer(np.zeros((1, 999)))

    assert answering.n_failed == 0


@pytest.mark.statistical
def test_thirty_thousand_predictions_with_switches_in_between(slots, tmp_path, x):
    """RSS flat, no failed request, no file left over (24 hours in small; half of it under emulation)."""
    answering = ActiveBundle(slots, Limits(probation_predictions=50))
    emulated = "QEMU_CPU" in os.environ  # tests/emulation
    process, n_threads, per_thread = psutil.Process(), 2, 5_000 if emulated else 10_000
    stop = threading.Event()

    def ask():
        return sum(len(answering.answer(x)[1].class_index) for _ in range(per_thread) if not stop.is_set())

    def switch():
        number = 1
        while not stop.is_set():
            number += 1
            folder = variant(tmp_path / f"{number}", release=number, gate=other_gate if number % 2 else None)
            put(slots, folder)
            answering.swap()
            while slots.state.trial is not None and not stop.wait(0.002):
                answering.settle()
        return number

    with ThreadPoolExecutor(n_threads + 1) as pool:
        switching = pool.submit(switch)
        try:
            warm = ask()
            before = process.memory_info().rss
            asked = [pool.submit(ask) for _ in range(n_threads)]
            answered = sum(future.result() for future in asked)
        finally:
            stop.set()  # a trial ends by predictions: after a failure the pool would wait for the switches for ever
        n_switches = switching.result()
        after = process.memory_info().rss

    assert warm + answered == answering.n_predictions == (n_threads + 1) * per_thread
    assert answering.n_failed == 0
    assert n_switches > 5
    assert emulated or after - before < 6 * 2**20  # QEMU's own memory grows
    assert not [*(tmp_path / "home").glob("parts/*")]
    assert sorted(p.name for p in (tmp_path / "home").glob("slot*")) == ["slot-a", "slot-b", "slots.json"]


@pytest.fixture
def many():
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        return arrays["x"]


def told(answering, x, as_before, n):
    """n labelled samples; the labels are what the bundle before, or the running one, says of them."""
    for i in range(n):
        sample = x[i % len(x)][np.newaxis]
        answering.add_feedback(sample, as_before.predict(sample).class_index)


@pytest.mark.parametrize("on_trial", [True, False])
def test_labelled_samples_that_the_bundle_before_alone_gets_right_bring_it_back(slots, tmp_path, many, on_trial):
    answering = ActiveBundle(slots, Limits(probation_s=1e9 if on_trial else 0))
    old = answering.runtime
    worse = variant(tmp_path / "2", release=2, gate=poor_gate)
    put(slots, worse)
    answering.swap()
    if not on_trial:
        answering.settle()
    assert (slots.state.trial is not None) is on_trial

    told(answering, many, old, 40)
    assert answering.worse_reason.startswith("accuracy: ")
    assert release(answering) == 2  # whoever changes the slots acts
    answering.settle()

    assert (release(answering), answering.worse_reason) == (1, "")
    assert slots.state.running == slots.state.good
    assert slots.state.refused[digest(worse)].startswith("accuracy: ")
    told(answering, many, old, 40)  # nothing is left to compare it with
    answering.settle()
    assert release(answering) == 1


def test_labelled_samples_that_speak_for_the_new_bundle_change_nothing(slots, tmp_path, many):
    answering = ActiveBundle(slots, Limits(probation_s=1e9))
    put(slots, variant(tmp_path / "2", release=2, gate=poor_gate))
    answering.swap()

    told(answering, many, answering.runtime, 40)
    answering.settle()

    assert (release(answering), answering.worse_reason) == (2, "")


def test_a_bundle_before_that_fails_on_a_labelled_sample_is_wrong_about_it(slots, tmp_path, many):
    answering = ActiveBundle(slots, Limits(probation_s=1e9))
    second(slots, tmp_path)
    answering.swap()
    told(answering, many, answering.runtime, 1)
    answering._rival = Failing(answering._rival)

    told(answering, many, answering.runtime, 40)

    assert answering.worse_reason == ""
    assert (answering._paired.n, answering._paired.lost, answering._paired.won) == (41, 0, 40)


def test_a_process_that_begins_in_a_trial_compares_as_well(slots, tmp_path, many):
    old = ActiveBundle(slots, LIMITS).runtime
    put(slots, variant(tmp_path / "2", release=2, gate=poor_gate))
    answering = ActiveBundle(slots, LIMITS)

    told(answering, many, old, 40)
    answering.settle()

    assert release(answering) == 1


def test_it_goes_back_to_no_other_bundle_than_the_one_it_was_compared_with(slots, tmp_path, many):
    answering = ActiveBundle(slots, Limits(probation_s=0))
    old = answering.runtime
    put(slots, variant(tmp_path / "2", release=2, gate=poor_gate))
    answering.swap()
    answering.settle()
    told(answering, many, old, 40)
    slots.stage(*source(variant(tmp_path / "3", release=3)))  # nobody has examined this one

    answering.settle()

    assert (release(answering), answering.worse_reason) == (2, "")


def test_labels_that_are_no_classes_are_refused(slots, many):
    answering = ActiveBundle(slots, LIMITS)
    for y in (np.array([10]), np.array([-1]), np.array([1, 2])):
        with pytest.raises(ConfigError, match="class number"):
            answering.add_feedback(many[:1], y)


@pytest.mark.parametrize("engine", ["int8", "lazy"])
def test_a_bundle_that_lacks_the_engines_graph_runs_fused(slots, tmp_path, many, engine, caplog):
    answering = ActiveBundle(slots, Limits(probation_s=0), EngineOptions(engine=engine))
    second(slots, tmp_path)
    answering.swap()
    answering.settle()

    assert (release(answering), answering.runtime.engine) == (2, "fused")
    assert slots.state.refused == {}
    assert caplog.text.count(f"event=engine_missing bundle={answering.runtime.digest} engine={engine}") == 1
    answering.answer(many)


# ------------------------------------------------------------------------------------------------------------ drift

TIGHT = {
    "n": 1000, "free_energy_mean": 0.0, "free_energy_std": 1e-3, "gate_entropy_mean": 0.0,
    "gate_entropy_std": 1.0, "outlier_above": 1e-3,
}  # fmt: skip
"""A reference that no sample fits."""
WIDE = TIGHT | {"free_energy_std": 1e6, "gate_entropy_std": 1e6}
"""A reference that every sample fits."""


def ask(answering, x, n):
    for _ in range(n // 50):
        answering.answer(np.tile(x, (50, *[1] * (x.ndim - 1))))


def keep(home, answering, x, n, y=None):
    """Validation samples, n times the same."""
    inputs = preprocess(answering.runtime.task, x)
    Validation(np.repeat(inputs, n, axis=0), y).save(home)


def tell(answering, prediction, y):
    """Tell the true classes of what was answered."""
    answering.record_labels(answering.runtime.digest, prediction.class_index == y, prediction.probabilities.max(axis=1))


@pytest.mark.parametrize("way", ["swap", "revert"])
def test_no_switch_puts_an_alarm_out_but_a_window_of_answers_that_fit(way, tmp_path, x):
    slots = Slots(tmp_path / "home")
    put(slots, variant(tmp_path / "1", release=1, reference=WIDE if way == "revert" else TIGHT))
    slots.confirm()
    answering = ActiveBundle(slots, LIMITS)
    if way == "revert":
        put(slots, variant(tmp_path / "2", release=2, gate=other_gate, reference=TIGHT))
        answering.swap()
    ask(answering, x, 2 * WINDOW)
    raised = Alarm(DriftKind.INPUTS, release(answering))
    assert answering.alarm == raised

    if way == "swap":
        put(slots, variant(tmp_path / "2", release=2, gate=other_gate, reference=WIDE))
        answering.swap()
    else:
        answering.revert("labelled samples said so")

    assert release(answering) != raised.release
    ask(answering, x, WINDOW - 50)
    assert answering.alarm == raised
    ask(answering, x, 50)
    assert answering.alarm is None


def test_what_is_usual_at_home_is_learnt_once_for_each_bundle_and_when_the_file_comes(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    home = tmp_path / "home"
    answering.learn_home(home)
    assert answering._drift.home is None
    (home / "validation.npz").write_bytes(b"nothing")
    answering.learn_home(home)
    assert answering._drift.home is None

    keep(home, answering, x, 30)
    answering.learn_home(home)
    known = answering._drift.home
    assert known.n == 30
    answering.learn_home(home)
    assert answering._drift.home is known

    second(slots, tmp_path)
    answering.swap()
    assert answering._drift.home is None
    answering.learn_home(home)
    assert answering._drift.home.n == 30


def test_labels_of_answers_contradict_or_clear(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS)
    _, prediction = answering.answer(x)
    keep(tmp_path / "home", answering, x, 60, np.repeat(prediction.class_index, 60))
    answering.learn_home(tmp_path / "home")
    wrong = (prediction.class_index + 1) % CLASSES

    for _ in range(12):
        tell(answering, prediction, wrong)
    assert answering.drift_kind is DriftKind.LABELS

    for _ in range(20 * MIN_FITTING):
        tell(answering, prediction, prediction.class_index)
    assert answering.drift_kind is None


def test_the_prior_follows_the_shares_only_if_asked_and_only_while_shares_drift(tmp_path, x):
    slots = Slots(tmp_path / "home")
    put(slots, variant(tmp_path / "1", release=1, reference=WIDE))
    slots.confirm()
    plain, adapting = (ActiveBundle(slots, LIMITS, adapts_prior=adapts) for adapts in (False, True))
    keep(tmp_path / "home", plain, x, 60)
    n_classes = plain.runtime.task.n_classes
    for answering in (plain, adapting):
        answering.learn_home(tmp_path / "home")
        usual = answering._drift.home = replace(answering._drift.home, energies=None)  # all of its samples are the same
        ask(answering, x, WINDOW)
        _, answer = answering.answer(x)
        assert (answering.alarm, answer.adapted) == (None, False)
        answering._drift.home = replace(usual, n=1000, shares=np.eye(n_classes)[0] * 0.9 + 0.1 / n_classes)
        assert answering.drift_kind is DriftKind.SHARES

    assert np.array_equal(plain.answer(x)[1].probabilities, answer.probabilities)
    _, adapted = adapting.answer(x)
    assert adapted.adapted
    assert adapted.probabilities.sum() == pytest.approx(1)
    assert adapted.probabilities.max() > answer.probabilities.max()
    assert adapted.class_name == (plain.runtime.task.classes[int(adapted.class_index[0])],)

    adapting._drift.home = usual
    assert not adapting.answer(x)[1].adapted


def test_a_bundle_that_runs_only_fused_keeps_its_weights(slots, tmp_path, x):
    """As from an older fedge: the prior can follow the shares, but nothing the inputs."""
    answering = ActiveBundle(slots, LIMITS, adapts_prior=True)
    assert answering.runtime.engine == "fused"
    keep(tmp_path / "home", answering, x, 60)
    answering.learn_home(tmp_path / "home")
    answering.raise_alarm(Alarm(DriftKind.INPUTS, 1))
    assert not answering.answer(x)[1].adapted


def test_few_samples_at_home_tell_too_little_of_the_shares_to_follow_others(slots, tmp_path, x):
    answering = ActiveBundle(slots, LIMITS, adapts_prior=True)
    for n, follows in ((49, False), (50, True)):
        answering._drift.home = None
        keep(tmp_path / "home", answering, x, n)
        answering.learn_home(tmp_path / "home")
        assert (answering._classes is not None) is follows
