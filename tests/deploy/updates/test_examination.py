import numpy as np
import pytest

from deploy import load
from deploy.inference.engines import EngineOptions
from deploy.updates.examination import Limits, examine_bundle, explain_refusal
from deploy.updates.quality import Measurement
from edge_agent.samples import SampleStore
from fedge.data.preprocessing import preprocess
from fedge.data.validation import FILE, Validation
from fedge.wire.messages import Quality

from ..bundles import GOLDEN, broken_gate, other_gate, poor_gate, sha256, variant

pytestmark = pytest.mark.torch_free


def measured(n_correct, n=100, *, latency=1.0, finite=True):
    correct = np.arange(n) < n_correct
    quality = Quality(n=n, accuracy=float(correct.mean()), latency_ms=latency)
    return Measurement(quality, correct, finite)


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (measured(90), measured(90), ""),
        (measured(90), measured(88), ""),
        (measured(90), measured(80), "accuracy"),
        (measured(9, 10), measured(8, 10), ""),  # one of ten: chance
        (measured(9, 10), measured(5, 10), "accuracy"),
        (measured(50), measured(99), ""),
        (measured(90), measured(90, latency=2.4), ""),  # 1.5 x 1 ms and 1 ms
        (measured(90), measured(90, latency=2.6), "latency"),
        (measured(90), measured(90, finite=False), "not-finite"),
        (None, measured(10), ""),
        (None, measured(10, finite=False), "not-finite"),
    ],
)
def test_verdict(before, now, reason):
    assert explain_refusal(before, now, Limits()).split(":")[0] == reason


def right(n_correct, n=50):
    return np.arange(n) < n_correct


@pytest.mark.parametrize(
    ("validation", "newest", "reason"),
    [
        ((90, 90), (50, 30), "accuracy: the running bundle is more accurate on this device's newest samples"),
        ((90, 99), (50, 30), "accuracy: the running bundle is more accurate on this device's newest samples"),
        ((90, 60), (30, 50), ""),  # the camera was turned: what it sees now decides
        ((90, 60), (30, 30), "accuracy: the running bundle is more accurate on this device's samples"),
        ((90, 60), (30, 31), "accuracy: the running bundle is more accurate on this device's samples"),
        ((90, 90), (30, 29), ""),
    ],
)
def test_the_newest_samples_decide_if_they_favour_one(validation, newest, reason):
    before, now = (measured(n) for n in validation)
    assert explain_refusal(before, now, Limits(), tuple(map(right, newest))) == reason


def test_the_reason_that_is_told_names_no_figure():
    for now in (measured(40), measured(90, latency=9.0)):
        assert not any(letter.isdigit() for letter in explain_refusal(measured(90), now, Limits()))


def test_an_absolute_limit_counts_also_for_the_first_bundle():
    assert explain_refusal(None, measured(90, latency=6.0), Limits(latency_ms=5.0)).startswith("latency")
    assert explain_refusal(None, measured(90, latency=4.0), Limits(latency_ms=5.0)) == ""


def test_without_labels_accuracy_is_no_reason():
    def unlabelled(measured):
        return Measurement(measured.quality, None, finite=True)

    assert explain_refusal(unlabelled(measured(90)), unlabelled(measured(10)), Limits()) == ""


# ------------------------------------------------------------------------------------- in a process of its own


@pytest.fixture
def home(tmp_path):
    runtime = load(GOLDEN)
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        samples = np.tile(arrays["x"], (10, *[1] * (arrays["x"].ndim - 1)))
    y = runtime.predict(samples).class_index
    Validation(preprocess(runtime.task, runtime.add_batch_axis(samples)), y).save(tmp_path)
    return tmp_path


LENIENT = Limits(latency_ratio=100.0, latency_slack_ms=1000.0)  # what is asserted here is not the time


def test_a_bundle_that_is_as_good_may_answer(home):
    found = examine_bundle(GOLDEN, variant(home / "new", release=2, gate=other_gate), home, LENIENT)

    assert found.reason == ""
    assert found.before.accuracy == found.now.accuracy == 1.0


@pytest.mark.parametrize(("gate", "reason"), [(poor_gate, "accuracy"), (broken_gate, "not-finite")])
def test_one_that_is_worse_may_not(home, gate, reason):
    found = examine_bundle(GOLDEN, variant(home / "new", release=2, gate=gate), home, LENIENT)

    assert found.reason.split(":")[0] == reason


def collect(home, labels_of, n=40):
    """Samples that came later, half of them marked; labelled as the bundle says."""
    runtime = load(labels_of)
    rng = np.random.default_rng(3)
    with SampleStore(home, runtime.task) as store:
        for i in range(8 * n):
            x = rng.normal(size=runtime.task.input_shape).astype(np.float32)
            store.add(x, int(runtime.predict(x).class_index[0]), origin="python", sensitive=i % 2 == 1)


def test_what_came_last_decides_and_gives_the_figures(home):
    worse = variant(home / "new", release=2, gate=poor_gate)
    assert examine_bundle(GOLDEN, worse, home, LENIENT).reason.startswith("accuracy: ")
    collect(home, worse)
    found = examine_bundle(GOLDEN, worse, home, LENIENT)
    assert found.reason == ""
    assert found.now.accuracy == 1.0
    assert found.before.accuracy < 1.0
    assert found.now.n == found.before.n
    assert 0 < found.now.n < 200  # unmarked, and held out

    back = examine_bundle(worse, GOLDEN, home, LENIENT)
    assert back.reason == "accuracy: the running bundle is more accurate on this device's newest samples"


def test_a_store_that_cannot_be_read_holds_nothing_up(home, caplog):
    (home / "samples").mkdir()
    (home / "samples" / "samples.db").write_bytes(b"junk" * 1000)
    found = examine_bundle(GOLDEN, variant(home / "new", release=2, gate=other_gate), home, LENIENT)
    assert found.reason == ""
    assert "event=no_validation" in caplog.text


@pytest.mark.parametrize("damage", ["junk", "other task", "not finite"])
def test_samples_that_are_damaged_count_as_none(home, damage, caplog):
    file = home / FILE
    if damage == "junk":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        with np.load(file) as arrays:
            x = arrays["x"][:, 1:] if damage == "other task" else np.full_like(arrays["x"], np.nan)
        Validation(x, None).save(home)

    found = examine_bundle(GOLDEN, variant(home / "new", release=2, gate=other_gate), home, LENIENT)

    assert found.reason == ""
    assert found.now.n == 0
    assert "event=no_validation" in caplog.text
    assert FILE in caplog.text


def test_one_that_cannot_be_run_is_refused_with_the_reason(home):
    folder = variant(home / "new", release=2)
    (folder / "skeleton.onnx").write_bytes(b"junk")

    assert examine_bundle(GOLDEN, folder, home, LENIENT).reason.startswith("smoke-test: ")


def test_it_is_run_by_the_engine_that_is_to_answer(home):
    empty = b"\x08\x08"  # ONNX, version 8, and no graph
    folder = variant(home / "new", release=2, int8={"digest": sha256(empty), "size_bytes": len(empty)})
    (folder / "int8.onnx").write_bytes(empty)

    assert examine_bundle(GOLDEN, folder, home, LENIENT).reason == ""
    assert examine_bundle(GOLDEN, folder, home, LENIENT, EngineOptions(engine="int8")).reason.startswith("smoke-test: ")


def test_a_script_of_the_user_that_is_called_as_we_are_is_none_of_its_business(home, monkeypatch):
    (home / "deploy.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(home)

    assert examine_bundle(GOLDEN, variant(home / "new", release=2), home, LENIENT).reason == ""


def test_one_that_brings_the_process_down_is_refused(home, python_at):
    killer = home / "python"
    killer.write_text("#!/bin/sh\nkill -SEGV $$\n")
    killer.chmod(0o755)
    python_at(killer)

    found = examine_bundle(GOLDEN, variant(home / "new", release=2), home, LENIENT)

    assert "signal 11" in found.reason


def test_a_running_bundle_that_is_broken_is_no_yardstick(home):
    old = variant(home / "old", release=1)
    next(old.glob("*.safetensors")).write_bytes(b"rotten")

    found = examine_bundle(old, variant(home / "new", release=2), home, LENIENT)

    assert found.reason == ""
    assert found.before is None


def test_what_makes_no_sense_is_a_reason_too(home, python_at):
    python_at("/bin/echo")
    assert examine_bundle(None, GOLDEN, home, Limits()).reason.startswith("smoke-test")
