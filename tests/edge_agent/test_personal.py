"""What is kept survives, is never mixed between runs, and never shows in what is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edge_agent.personal import newest

from deploy import load as load_bundle
from edge_agent import personal
from edge_agent.mixture import PLAIN, calibrated
from edge_agent.worker import Outcome, Worker
from fedge import codec
from fedge.errors import StoreError
from fedge.messages import BlobRef, Codec, Keep, KeepHead, KeepModel, KeepOffset, KeepPart, Part
from fedge.sgd import Sgd
from fedge.step import Declined, Failed
from fedge.steps.install import Install, Installed
from fedge.steps.mean_features import FeaturesMeasured, MeanFeatures
from fedge.steps.train import Start, Train, Trained
from fedge.tensors import Model, from_bytes, unflatten
from tests.support.orders import INITIAL, LAYOUT, Blobs, D, device_data, order, worker

SGD = Sgd(steps=6, batch_size=8)
GOAL = {"mean": np.linspace(0, 1, D, dtype=np.float32)}
KEEPS: dict[str, tuple[Part, Keep]] = {
    "fedper": (Part.BASE, KeepPart(private=Part.HEAD)),
    "fedrep": (Part.BASE, KeepPart(private=Part.HEAD, head_steps=4)),
    "lg-fedavg": (Part.HEAD, KeepPart(private=Part.BASE)),
    "ditto": (Part.ALL, KeepModel(proximal_lambda=0.1)),
    "fedrod": (Part.ALL, KeepHead()),
    "dbe": (Part.ALL, KeepOffset(global_mean=Blobs().put(GOAL))),
}
every = pytest.mark.parametrize("name", list(KEEPS))


@pytest.fixture
def blobs() -> Blobs:
    blobs = Blobs()
    blobs.put(GOAL)
    return blobs


def train(name: str, blobs: Blobs, seed: int = 1, **changes: object) -> Train:
    part, keep = KEEPS[name]
    values: dict[str, object] = {
        "starts": (Start(model=blobs.model(seed, part)),),
        "sgd": SGD,
        "codec": Codec.FLOAT32,
        "part": part,
        "keep": keep,
        "initial": None if part is Part.ALL else blobs.model(0),
    }
    return Train(**(values | changes))  # type: ignore[arg-type]


def install(name: str, blobs: Blobs, seed: int = 1, release: int = 1) -> Install:
    part, keep = KEEPS[name]
    initial = None if part is Part.ALL else blobs.model(0)
    return Install(
        global_model=blobs.model(seed, part), release=release, method=name, part=part, keep=keep, initial=initial
    )


def update_of(outcome: Outcome, part: Part) -> Model:
    assert isinstance(outcome.result, Trained), outcome.result
    return codec.decode(outcome.blobs[outcome.result.update.digest], Codec.FLOAT32, LAYOUT.part(part))


def store_of(home: Path) -> dict[str, bytes]:
    """Files of the store, by their path in it."""
    root = home / "personal"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@every
def test_an_order_done_again_gives_the_same_bytes_and_leaves_the_same_files(
    tmp_path: Path, blobs: Blobs, name: str
) -> None:
    """As after a kill -9 between the store's write and the report: the second worker finds the first one's files."""
    for number in (1, 2, 3):
        once = worker(tmp_path).execute(order(train(name, blobs, number), number), blobs)
        files = store_of(tmp_path)
        again = worker(tmp_path).execute(order(train(name, blobs, number), number), blobs)
        assert again == once
        assert isinstance(once.result, Trained)
        assert store_of(tmp_path) == files
    assert set(files) == {"r/2", "r/3"}
    assert files["r/2"] != files["r/3"]


@every
def test_epochs_are_passes_over_the_samples_that_an_update_learns_from(tmp_path: Path, blobs: Blobs, name: str) -> None:
    n = worker(tmp_path).data.n_shared
    passes = train(name, blobs, sgd=Sgd(epochs=3, batch_size=8))
    steps = train(name, blobs, sgd=Sgd(steps=math.ceil(3 * n / 8), batch_size=8))
    one, other = (worker(tmp_path / str(k)).execute(order(a, 1), blobs) for k, a in enumerate((passes, steps)))
    part, _ = KEEPS[name]
    np.testing.assert_array_equal(update_of(one, part).params, update_of(other, part).params)


@every
def test_rounds_build_on_each_other_and_a_round_left_out_changes_nothing(
    tmp_path: Path, blobs: Blobs, name: str
) -> None:
    one, two, alone = (worker(tmp_path / str(i)) for i in range(3))
    for device in (one, two):
        device.execute(order(train(name, blobs, 1), 1), blobs)
    later = order(train(name, blobs, 2), 7)
    found, same, fresh = (device.execute(later, blobs) for device in (one, two, alone))
    assert found == same
    assert store_of(tmp_path / "0") != store_of(tmp_path / "2")  # what was kept in round 1 matters in round 7
    if name not in {"ditto", "fedrod"}:
        assert found != fresh


@every
def test_another_run_starts_afresh_and_ends_the_older_one(tmp_path: Path, blobs: Blobs, name: str) -> None:
    device, fresh = worker(tmp_path / "a"), worker(tmp_path / "b")
    device.execute(order(train(name, blobs, 1), 1, run="old.one"), blobs)
    assert set(store_of(tmp_path / "a")) == {"old.one/1"}
    new = order(train(name, blobs, 1), 2, run="new")
    assert device.execute(new, blobs) == fresh.execute(new, blobs)
    assert store_of(tmp_path / "a") == store_of(tmp_path / "b")
    assert set(store_of(tmp_path / "a")) == {"new/2"}


@every
def test_only_the_part_that_travels_is_sent(tmp_path: Path, blobs: Blobs, name: str) -> None:
    part, keep = KEEPS[name]
    outcome = worker(tmp_path).execute(order(train(name, blobs)), blobs)
    assert isinstance(outcome.result, Trained)
    assert set(outcome.blobs) == {outcome.result.update.digest}
    sent = from_bytes(outcome.blobs[outcome.result.update.digest])
    assert set(sent) == {info.name for info in LAYOUT.part(part).tensors}
    if isinstance(keep, KeepPart):
        assert set(sent).isdisjoint(info.name for info in LAYOUT.part(keep.private).tensors)


@every
def test_what_is_sent_learns_from_no_sensitive_sample(tmp_path: Path, blobs: Blobs, name: str) -> None:
    """Not through what is kept, either: the update of a second round builds on it."""
    data = device_data()
    other = replace(data, y_train=np.where(data.sensitive, (data.y_train + 1) % 3, data.y_train))
    updates = []
    for i, own in enumerate((data, other)):
        device = worker(tmp_path / str(i), own)
        device.execute(order(train(name, blobs, 1), 1), blobs)
        updates.append(update_of(device.execute(order(train(name, blobs, 2), 2), blobs), KEEPS[name][0]))
    np.testing.assert_array_equal(updates[0].params, updates[1].params)
    kept_apart = store_of(tmp_path / "0") == store_of(tmp_path / "1")
    assert kept_apart == (name not in {"ditto", "fedrod"})  # these two learn from all samples what they keep


@every
def test_the_bundle_predicts_what_the_device_would(tmp_path: Path, blobs: Blobs, name: str) -> None:
    part, _ = KEEPS[name]
    device = worker(tmp_path)
    device.execute(order(train(name, blobs, 1), 1), blobs)
    result = device.execute(order(install(name, blobs, 2), 2), blobs).result
    assert isinstance(result, Installed), result
    served = codec.decode(blobs(blobs.model(2)), Codec.FLOAT32, LAYOUT)
    logits = device.logits(device.personal(served), device.data.x_val)
    assert np.abs(logits - device.logits(served, device.data.x_val)).max() > 1e-3
    expected = np.exp(calibrated(logits, device.prior, PLAIN))
    found = load_bundle(tmp_path / "bundles" / "1").predict(device.data.x_val).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert part is not Part.ALL or result.max_abs_diff < 1e-5


@every
def test_a_device_that_never_trained_installs_the_shared_model_over_the_initial_one(
    tmp_path: Path, blobs: Blobs, name: str
) -> None:
    part, _ = KEEPS[name]
    device = worker(tmp_path)
    assert isinstance(device.execute(order(install(name, blobs), 9), blobs).result, Installed)
    tensors = unflatten(INITIAL, LAYOUT) | from_bytes(blobs(blobs.model(1, part)))
    expected = codec.decode(blobs(blobs.put(tensors)), Codec.FLOAT32, LAYOUT)
    assert device.personal(expected) is expected
    logits = device.logits(expected, device.data.x_val)
    found = load_bundle(tmp_path / "bundles" / "1").predict(device.data.x_val).probabilities
    np.testing.assert_allclose(found, np.exp(calibrated(logits, device.prior, PLAIN)), atol=1e-5)


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_the_initial_model_is_fetched_once(tmp_path: Path, blobs: Blobs, name: str) -> None:
    device, first = worker(tmp_path), blobs.model(0)
    for number in (1, 2, 3):
        device.execute(order(train(name, blobs, number), number), blobs)
    assert blobs.fetched.count(first.digest) == 1
    without = device.execute(order(train(name, blobs, 4, initial=None), 4), blobs)
    assert isinstance(without.result, Trained)
    newcomer = worker(tmp_path / "new").execute(order(train(name, blobs, 4, initial=None), 4), blobs)
    assert isinstance(newcomer.result, Failed)
    assert "initial" in newcomer.result.reason


def test_numbers_of_the_report_are_those_of_the_model_in_use(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    device.execute(order(train("fedper", blobs, 1), 1), blobs)
    served = codec.decode(blobs(blobs.model(2)), Codec.FLOAT32, LAYOUT)
    look = device.look(device.personal(served))
    result = device.execute(order(train("fedper", blobs, 2), 2), blobs).result
    assert isinstance(result, Trained)
    assert (result.loss_before, result.gradient_norm, result.val_accuracy) == (
        look.loss,
        look.gradient_norm,
        look.accuracy,
    )
    assert result.loss_after < result.loss_before
    assert result.n_samples == 30


@pytest.mark.parametrize(
    "changes",
    [
        {"keep": None},
        {"part": Part.ALL},
        {"keep": KeepHead()},
        {"keep": KeepPart(private=Part.BASE)},
        {"part": Part.HEAD},
    ],
)
def test_an_order_that_contradicts_itself_is_refused_and_keeps_nothing(
    tmp_path: Path, blobs: Blobs, changes: dict[str, object]
) -> None:
    outcome = worker(tmp_path).execute(order(train("fedper", blobs, **changes)), blobs)
    assert isinstance(outcome.result, Failed)
    assert not outcome.blobs
    assert store_of(tmp_path) == {}


def test_something_else_that_was_kept_is_not_used(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    device.execute(order(train("fedper", blobs), 1), blobs)
    files = store_of(tmp_path)
    outcome = device.execute(order(train("fedrod", blobs), 2), blobs)  # the same names and shapes
    assert isinstance(outcome.result, Failed)
    assert "KeepPart" in outcome.result.reason
    assert isinstance(device.execute(order(train("lg-fedavg", blobs), 2), blobs).result, Failed)
    assert store_of(tmp_path) == files


@every
def test_a_training_that_diverges_sends_and_keeps_nothing(tmp_path: Path, blobs: Blobs, name: str) -> None:
    device = worker(tmp_path)
    device.execute(order(train(name, blobs, 1), 1), blobs)
    files = store_of(tmp_path)
    wild = Sgd(steps=40, learning_rate=100.0, proximal_mu=1.0)  # w - anchor grows a hundredfold with every step
    outcome = device.execute(order(train(name, blobs, 2, sgd=wild), 2), blobs)
    assert isinstance(outcome.result, Failed), outcome.result
    assert store_of(tmp_path) == files


def test_a_personal_model_that_diverges_alone_spoils_the_round_but_not_the_store(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    device.execute(order(train("ditto", blobs, 1), 1), blobs)
    files = store_of(tmp_path)
    wild = train("ditto", blobs, 2, keep=KeepModel(proximal_lambda=1e30))
    assert isinstance(device.execute(order(wild, 2), blobs).result, Failed)
    assert store_of(tmp_path) == files


def test_the_best_of_several_starts_is_that_with_the_own_part(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    device.execute(order(train("fedper", blobs, 1), 1), blobs)
    mine = personal.kept(device, KEEPS["fedper"][1], order(train("fedper", blobs), 1))
    assert mine is not None
    starts = tuple(Start(model=blobs.model(seed, Part.BASE), cluster=seed) for seed in range(2, 8))
    result = device.execute(order(train("fedper", blobs, starts=starts), 2), blobs).result
    assert isinstance(result, Trained)
    losses = {
        s.cluster: device.loss(
            codec.decode(blobs(blobs.put(from_bytes(blobs(s.model)) | mine)), Codec.FLOAT32, LAYOUT), device.validation
        )
        for s in starts
    }
    assert result.cluster == min(losses, key=losses.__getitem__)


def test_a_device_without_shareable_samples_declines(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path, device_data(sensitive=1.0))
    assert isinstance(device.execute(order(train("fedper", blobs)), blobs).result, Declined)
    assert isinstance(device.execute(order(MeanFeatures(model=blobs.model(1))), blobs).result, Declined)
    assert store_of(tmp_path) == {}


def test_a_damaged_store_stops_the_device(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    device.execute(order(train("fedper", blobs), 1), blobs)
    (tmp_path / "personal" / "r" / "1").write_bytes(b"no")
    with pytest.raises(StoreError, match="cannot be read"):
        device.execute(order(train("fedper", blobs), 2), blobs)


def test_mean_features_are_those_of_the_samples_that_are_not_sensitive(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    result = device.execute(order(MeanFeatures(model=blobs.model(1))), blobs).result
    assert isinstance(result, FeaturesMeasured)
    x, _ = device.data.shared
    tensors = from_bytes(blobs(blobs.model(1)))
    hidden = np.maximum(x @ tensors["1.weight"].T + tensors["1.bias"], 0)
    assert result.mean == pytest.approx(hidden.mean(axis=0).tolist(), abs=1e-6)
    assert result.n_samples == len(x) == 30


def test_the_newest_file_up_to_a_round(tmp_path: Path, blobs: Blobs) -> None:
    device = worker(tmp_path)
    for number in (2, 9, 10):
        device.execute(order(train("ditto", blobs, number), number), blobs)
    folder = tmp_path / "personal" / "r"
    assert sorted(path.name for path in folder.iterdir()) == ["10", "9"]
    last = newest(folder)
    assert last is not None
    assert newest(folder, 10) == last  # by number, not by name
    assert newest(folder, 9) not in (None, last)
    assert newest(folder, 8) is None
    assert newest(tmp_path / "nowhere") is None


def test_a_run_that_has_dots_in_its_name_is_one_folder(tmp_path: Path, blobs: Blobs) -> None:
    worker(tmp_path).execute(order(train("fedrod", blobs), 3, run="a.3.b"), blobs)
    assert set(store_of(tmp_path)) == {"a.3.b/3"}


def test_workers_share_nothing_but_the_store(tmp_path: Path, blobs: Blobs) -> None:
    """A worker that has done other orders between gives the same bytes as one that has just started."""
    busy: Worker = worker(tmp_path / "a")
    for name in KEEPS:
        busy.execute(order(train(name, blobs), 1, run=name), blobs)
    found = busy.execute(order(train("dbe", blobs), 1, run="x"), blobs)
    assert found == worker(tmp_path / "b").execute(order(train("dbe", blobs), 1, run="x"), blobs)
    assert isinstance(found.result, Trained)
    assert isinstance(found.result.update, BlobRef)


def test_a_write_that_was_cut_off_leaves_nothing_behind_for_long(tmp_path: Path) -> None:
    order_3, what = order(None, 3), personal.Kept(keep=KeepPart(private=Part.HEAD), tensors=b"x")
    folder = personal.folder_of(tmp_path, order_3)
    folder.mkdir(parents=True)
    (folder / ".tmp-torn").write_bytes(b"half")
    personal._write(tmp_path, order_3, what)
    assert [path.name for path in folder.iterdir()] == ["3"]
