"""What is kept survives, is never mixed between runs, and never shows in what is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from deploy import load as load_bundle
from edge_agent.device.device import Device
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning import evaluation
from edge_agent.steps.training import train as half
from edge_agent.steps.training.train import learn
from fedge.data.problems.calibration import PLAIN
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.models.training import Network, Trainer, compute_mean_loss
from fedge.steps.contract import Declined, Failed, Result, encode_body
from fedge.steps.mixture.install import Install, Installed
from fedge.steps.personal.train_apfl import TrainApfl
from fedge.steps.personal.train_pfedme import TrainPFedMe
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.steps.training.train_dbe import TrainDbe
from fedge.steps.training.train_ditto import TrainDitto
from fedge.steps.training.train_rod import TrainRod
from fedge.system.stopping import StoppedError
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.layout import BASE, HEAD, Codec, Model, Selector, Tensors, from_bytes, overlay_tensors, unflatten
from fedge.wire.messages import BlobRef, Why
from tests.support.orders import (
    INITIAL,
    LAYOUT,
    TASK,
    Blobs,
    D,
    device,
    device_data,
    manifest_of,
    mixed_data,
    order,
    part_of,
    samples,
    worker,
)

SGD = Sgd(steps=6, batch_size=8)
LONGER = Sgd(steps=12)
GOAL = {"mean": np.linspace(0, 1, D, dtype=np.float32)}
KEEPS: dict[str, tuple[type[Train], dict[str, Any]]] = {
    "fedper": (Train, {"personal": HEAD}),
    "fedrep": (Train, {"personal": HEAD, "head_steps": 4}),
    "lg-fedavg": (Train, {"personal": BASE}),
    "ditto": (TrainDitto, {"proximal_lambda": 0.1}),
    "fedrod": (TrainRod, {}),
    "dbe": (TrainDbe, {"global_mean": Blobs().put(GOAL)}),
    "apfl": (TrainApfl, {"alpha": 0.5}),
    "pfedme": (TrainPFedMe, {"inner_steps": 2, "moreau_lambda": 5.0, "outer_rate": 0.1}),
}
APART = {"apfl", "ditto", "fedrod", "pfedme"}
"""Those for which what is sent depends on nothing that was kept."""
every = pytest.mark.parametrize("name", list(KEEPS))


@pytest.fixture
def blobs() -> Blobs:
    blobs = Blobs()
    blobs.put(GOAL)
    return blobs


def personal_of(name: str) -> Selector:
    return KEEPS[name][1].get("personal", ())


def train(name: str, blobs: Blobs, seed: int = 1, **changes: Any) -> Train:
    kind, fields = KEEPS[name]
    personal = personal_of(name)
    values: dict[str, Any] = {
        "starts": (Start(model=blobs.model(seed, personal)),),
        "sgd": SGD,
        "codec": Codec.FLOAT32,
        "initial": blobs.model(0) if personal else None,
    }
    return kind(**(values | fields | changes))


def install(name: str, blobs: Blobs, seed: int = 1) -> Install:
    kind, personal = KEEPS[name][0], personal_of(name)
    initial = blobs.model(0) if personal else None
    model = blobs.model(seed, personal)
    return Install(model=model, method=name, personal=personal, kept_by=kind.STEP, initial=initial)


def update_of(finished: FinishedOrder, personal: Selector = (), codec_: Codec = Codec.FLOAT32) -> Model:
    assert isinstance(finished.result, Trained), finished.result
    return codecs.decode(finished.blobs[finished.result.update.digest], codec_, LAYOUT.without(personal))


def whole_model(data: bytes) -> Model:
    return codecs.decode(data, Codec.FLOAT32, LAYOUT)


def store_of(home: Path) -> dict[str, bytes]:
    """What is kept, by run, name and round."""
    root = home / "kept"
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
    assert set(files) == {"r/personal/2", "r/personal/3"}
    assert files["r/personal/2"] != files["r/personal/3"]


@every
def test_epochs_are_passes_over_the_samples_that_an_update_learns_from(tmp_path: Path, blobs: Blobs, name: str) -> None:
    n = worker(tmp_path).data.n_shared
    passes = train(name, blobs, sgd=Sgd(epochs=3, batch_size=8))
    steps = train(name, blobs, sgd=Sgd(steps=math.ceil(3 * n / 8), batch_size=8))
    one, other = (worker(tmp_path / str(k)).execute(order(a, 1), blobs) for k, a in enumerate((passes, steps)))
    np.testing.assert_array_equal(*(update_of(found, personal_of(name)).params for found in (one, other)))


@every
def test_rounds_build_on_each_other_and_a_round_left_out_changes_nothing(
    tmp_path: Path, blobs: Blobs, name: str
) -> None:
    one, two, alone = (worker(tmp_path / str(i)) for i in range(3))
    for own in (one, two):
        own.execute(order(train(name, blobs, 1), 1), blobs)
    later = order(train(name, blobs, 2), 7)
    found, same, fresh = (own.execute(later, blobs) for own in (one, two, alone))
    assert found == same
    assert store_of(tmp_path / "0") != store_of(tmp_path / "2")  # what was kept in round 1 matters in round 7
    if name not in APART:
        assert found != fresh


@every
def test_another_run_starts_afresh_and_ends_the_older_one(tmp_path: Path, blobs: Blobs, name: str) -> None:
    own, fresh = worker(tmp_path / "a"), worker(tmp_path / "b")
    own.execute(order(train(name, blobs, 1), 1, run="old.one"), blobs)
    assert set(store_of(tmp_path / "a")) == {"old.one/personal/1"}
    new = order(train(name, blobs, 1), 2, run="new")
    assert own.execute(new, blobs) == fresh.execute(new, blobs)
    assert store_of(tmp_path / "a") == store_of(tmp_path / "b")
    assert set(store_of(tmp_path / "a")) == {"new/personal/2"}


@every
def test_only_the_part_that_travels_is_sent(tmp_path: Path, blobs: Blobs, name: str) -> None:
    personal = personal_of(name)
    finished = worker(tmp_path).execute(order(train(name, blobs)), blobs)
    assert isinstance(finished.result, Trained)
    assert set(finished.blobs) == {finished.result.update.digest}
    sent = from_bytes(finished.blobs[finished.result.update.digest])
    assert set(sent) == {info.name for info in LAYOUT.without(personal).tensors}
    assert not personal or set(sent).isdisjoint(info.name for info in LAYOUT.select(personal).tensors)


BALANCED = Sgd(steps=6, batch_size=8, optimizer="adam", label_smoothing=0.1, class_weights="balanced")


@pytest.mark.parametrize("sgd", [SGD, BALANCED], ids=["plain", "balanced"])
@every
def test_what_is_sent_learns_from_no_sensitive_sample(tmp_path: Path, blobs: Blobs, name: str, sgd: Sgd) -> None:
    """Not through what is kept, either: the update of a second round builds on it."""
    if name == "fedrod" and sgd is BALANCED:
        sgd = msgspec.structs.replace(sgd, class_weights=UNSET)  # it refuses them
    data = device_data()
    other = replace(data, y_train=np.where(data.sensitive, (data.y_train + 1) % 3, data.y_train))
    updates = []
    for i, samples_ in enumerate((data, other)):
        own = worker(tmp_path / str(i), samples_)
        own.execute(order(train(name, blobs, 1, sgd=sgd), 1), blobs)
        updates.append(update_of(own.execute(order(train(name, blobs, 2, sgd=sgd), 2), blobs), personal_of(name)))
    np.testing.assert_array_equal(updates[0].params, updates[1].params)
    kept_apart = store_of(tmp_path / "0") == store_of(tmp_path / "1")
    assert kept_apart == (name not in APART - {"pfedme"})  # the others learn from all samples what they keep


@every
def test_the_recipe_reaches_what_is_sent_and_what_is_kept(tmp_path: Path, blobs: Blobs, name: str) -> None:
    recipes = (SGD, *(msgspec.structs.replace(SGD, **each) for each in ({"label_smoothing": 0.2}, {"clip_norm": 0.01})))
    sent, kept = [], []
    for i, sgd in enumerate(recipes):
        own = worker(tmp_path / str(i))
        sent.append(update_of(own.execute(order(train(name, blobs, sgd=sgd)), blobs), personal_of(name)).params)
        kept.append(store_of(tmp_path / str(i)))
    assert not np.array_equal(sent[0], sent[1])
    assert kept[0].keys() == kept[1].keys() != set()
    assert kept[0] != kept[1]
    steps = SGD.steps + KEEPS[name][1].get("head_steps", 0)
    longest = SGD.learning_rate * 0.01 * steps / (1 - SGD.momentum)  # if every step goes the same way
    assert np.linalg.norm(sent[2]) <= longest * (1 + 1e-4)


def probabilities(own: Worker, model: Model) -> np.ndarray:
    """What the device would say of its validation samples with a model."""
    here = own.make_device(order(Train(starts=(Start(model=Blobs().model(0)),), sgd=SGD)), Blobs())
    found = here.network.compute_logits(model, own.data.x_val)
    return np.exp(TASK.problem.calibrate(found, PLAIN, evaluation.fit_own_offset(here, model)).values)


@every
def test_the_bundle_predicts_what_the_device_would(tmp_path: Path, blobs: Blobs, name: str) -> None:
    own = worker(tmp_path)
    own.execute(order(train(name, blobs, 1), 1), blobs)
    result = own.execute(order(install(name, blobs, 2), 2), blobs).result
    assert isinstance(result, Installed), result
    served = whole_model(blobs(blobs.model(2)))
    expected = probabilities(own, own.make_personal_model(served))
    assert np.abs(expected - probabilities(own, served)).max() > 1e-3
    found = load_bundle(tmp_path / "bundles" / "1").predict(own.data.x_val).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert manifest_of(tmp_path, result).max_abs_diff < 1e-5


@every
def test_a_device_that_never_trained_installs_the_shared_model_over_the_initial_one(
    tmp_path: Path, blobs: Blobs, name: str
) -> None:
    own = worker(tmp_path)
    assert isinstance(own.execute(order(install(name, blobs), 9), blobs).result, Installed)
    tensors = unflatten(INITIAL, LAYOUT) | from_bytes(blobs(blobs.model(1, personal_of(name))))
    expected = whole_model(blobs(blobs.put(tensors)))
    assert own.make_personal_model(expected) is expected
    found = load_bundle(tmp_path / "bundles" / "1").predict(own.data.x_val).probabilities
    np.testing.assert_allclose(found, probabilities(own, expected), atol=1e-5)


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_the_initial_model_is_fetched_once(tmp_path: Path, blobs: Blobs, name: str) -> None:
    own, first = worker(tmp_path), blobs.model(0)
    for number in (1, 2, 3):
        own.execute(order(train(name, blobs, number), number), blobs)
    assert blobs.fetched.count(first.digest) == 1
    without = own.execute(order(train(name, blobs, 4, initial=None), 4), blobs)
    assert isinstance(without.result, Trained)


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_without_an_initial_model_personal_layers_begin_as_the_network_makes_them(
    tmp_path: Path, blobs: Blobs, name: str
) -> None:
    told, untold = (
        worker(tmp_path / str(initial is None)).execute(order(train(name, blobs, initial=initial)), blobs)
        for initial in (blobs.model(0), None)
    )
    assert isinstance(untold.result, Trained)
    assert told == untold
    other = worker(tmp_path / "other").execute(order(train(name, blobs, initial=blobs.model(7))), blobs)
    assert other != told


def test_numbers_of_the_report_are_those_of_the_model_in_use(tmp_path: Path, blobs: Blobs) -> None:
    own = worker(tmp_path)
    own.execute(order(train("fedper", blobs, 1), 1), blobs)
    served = whole_model(blobs(blobs.model(2)))
    second = order(train("fedper", blobs, 2), 2)
    look = evaluation.evaluate_model(own.make_device(second, blobs), own.make_personal_model(served))
    result = own.execute(second, blobs).result
    assert isinstance(result, Trained)
    assert (result.loss_before, result.gradient_norm, result.val_score) == (
        look.loss,
        look.gradient_norm,
        look.score,
    )
    assert result.loss_before is not None
    assert result.loss_after is not None
    assert result.loss_after < result.loss_before
    assert result.n_samples == 30


@pytest.mark.parametrize("personal", [(), BASE, ("conv",)])
def test_a_model_that_is_not_what_travels_is_refused_and_nothing_is_kept(
    tmp_path: Path, blobs: Blobs, personal: Selector
) -> None:
    finished = worker(tmp_path).execute(order(train("fedper", blobs, personal=personal)), blobs)
    assert isinstance(finished.result, Failed)
    assert not finished.blobs
    assert store_of(tmp_path) == {}


def test_something_else_that_was_kept_is_not_used(tmp_path: Path, blobs: Blobs) -> None:
    own = worker(tmp_path)
    own.execute(order(train("fedper", blobs), 1), blobs)
    files = store_of(tmp_path)
    finished = own.execute(order(train("fedrod", blobs), 2), blobs)  # the same names and shapes
    assert isinstance(finished.result, Failed)
    assert "step train kept the tensors on this device" in finished.result.reason
    assert isinstance(own.execute(order(train("lg-fedavg", blobs), 2), blobs).result, Failed)
    assert store_of(tmp_path) == files


@every
def test_a_training_that_diverges_sends_and_keeps_nothing(tmp_path: Path, blobs: Blobs, name: str) -> None:
    own = worker(tmp_path)
    own.execute(order(train(name, blobs, 1), 1), blobs)
    files = store_of(tmp_path)
    wild = Sgd(steps=40, learning_rate=100.0, proximal_mu=1.0)  # w - anchor grows a hundredfold with every step
    finished = own.execute(order(train(name, blobs, 2, sgd=wild), 2), blobs)
    assert isinstance(finished.result, Failed), finished.result
    assert store_of(tmp_path) == files


def test_a_personal_model_that_diverges_alone_stays_as_it_was_and_nobody_is_told(tmp_path: Path, blobs: Blobs) -> None:
    """It learns from sensitive samples, too."""
    own = worker(tmp_path)
    own.execute(order(train("ditto", blobs, 1), 1), blobs)
    tame, wild = train("ditto", blobs, 2), train("ditto", blobs, 2, proximal_lambda=1e30)
    kept = own.make_device(order(tame, 2), blobs).load_kept("train_ditto", LAYOUT)
    found = own.execute(order(wild, 2), blobs)
    again = own.make_device(order(tame, 3), blobs).load_kept("train_ditto", LAYOUT)
    assert kept is not None
    assert again is not None
    np.testing.assert_array_equal(kept.model.params, again.model.params)
    assert found == worker(tmp_path / "other").execute(order(tame, 2), blobs)


def test_the_best_of_several_starts_is_that_with_the_own_part(tmp_path: Path, blobs: Blobs) -> None:
    own = worker(tmp_path)
    own.execute(order(train("fedper", blobs, 1), 1), blobs)
    starts = tuple(Start(model=blobs.model(seed, HEAD), cluster=seed) for seed in range(2, 8))
    second = order(train("fedper", blobs, starts=starts), 2)
    here = own.make_device(second, blobs)
    mine = here.load_kept("train", LAYOUT.select(HEAD))
    assert mine is not None
    result = own.execute(second, blobs).result
    assert isinstance(result, Trained)
    losses = {
        s.cluster: evaluation.compute_loss(
            here, whole_model(blobs(blobs.put(from_bytes(blobs(s.model)) | mine.get_tensors()))), own.data.validation
        )
        for s in starts
    }
    assert result.cluster == min(losses, key=losses.__getitem__)


def test_a_device_without_shareable_samples_declines(tmp_path: Path, blobs: Blobs) -> None:
    own = worker(tmp_path, device_data(sensitive=1.0))
    assert isinstance(own.execute(order(train("fedper", blobs)), blobs).result, Declined)
    assert store_of(tmp_path) == {}


def test_a_damaged_store_fails_the_order_and_not_the_device(tmp_path: Path, blobs: Blobs) -> None:
    own = worker(tmp_path)
    own.execute(order(train("fedper", blobs), 1), blobs)
    (tmp_path / "kept" / "r" / "personal" / "1").write_bytes(b"no")
    failed = own.execute(order(train("fedper", blobs), 2), blobs).result
    assert isinstance(failed, Failed)
    assert "cannot be read" in failed.reason
    assert isinstance(own.execute(order(train("fedper", blobs), 2, run="next"), blobs).result, Trained)


def test_a_run_that_has_dots_in_its_name_is_one_folder(tmp_path: Path, blobs: Blobs) -> None:
    worker(tmp_path).execute(order(train("fedrod", blobs), 3, run="a.3.b"), blobs)
    assert set(store_of(tmp_path)) == {"a.3.b/personal/3"}


def test_workers_share_nothing_but_the_store(tmp_path: Path, blobs: Blobs) -> None:
    """A worker that has done other orders between gives the same bytes as one that has just started."""
    busy: Worker = worker(tmp_path / "a")
    for name in KEEPS:
        busy.execute(order(train(name, blobs), 1, run=name), blobs)
    found = busy.execute(order(train("dbe", blobs), 1, run="x"), blobs)
    assert found == worker(tmp_path / "b").execute(order(train("dbe", blobs), 1, run="x"), blobs)
    assert isinstance(found.result, Trained)
    assert isinstance(found.result.update, BlobRef)


# -------------------------------------------------------------------------------------------------- model split


PARTS = Network(TASK).get_slice("base"), Network(TASK).get_slice("head")
ALL_SHARED = device_data(30, sensitive=0.0)


def split(home: Path, sgd: Sgd = SGD, **fields: Any) -> tuple[Model, Tensors]:
    action = Train(starts=(Start(model=Blobs().model(0)),), sgd=sgd, **fields)
    learned = learn(device(home, action, data=ALL_SHARED, seed=3), action, INITIAL)
    assert learned.kept is not None
    return learned.model, unflatten(learned.kept, LAYOUT.select(action.personal))


@pytest.mark.parametrize("personal", [HEAD, BASE, ("1.weight",)])
def test_head_and_base_learn_together_as_in_fedavg_and_the_personal_part_stays(
    tmp_path: Path, personal: Selector
) -> None:
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *ALL_SHARED.shared, SGD, np.random.default_rng(3)).run(SGD.steps)
    trained, kept = split(tmp_path, personal=personal)
    np.testing.assert_array_equal(trained.params, network.dump().params)
    expected = part_of(trained, personal)
    assert set(kept) == set(expected) == {info.name for info in LAYOUT.select(personal).tensors}
    for name, tensor in kept.items():
        np.testing.assert_array_equal(tensor, expected[name])


def test_fedrep_trains_the_head_first_and_then_the_base_on_that_head(tmp_path: Path) -> None:
    """The base's phase sees the head as its own phase left it, and leaves it so."""
    base, head = PARTS
    network = Network(TASK)
    network.load(INITIAL)
    rng = np.random.default_rng(3)
    Trainer(network, *ALL_SHARED.shared, SGD, rng, moves="head").run(7)
    after_head = network.dump().params
    Trainer(network, *ALL_SHARED.shared, SGD, rng, moves="base").run(SGD.steps)
    trained, kept = split(tmp_path, personal=HEAD, head_steps=7)
    np.testing.assert_array_equal(trained.params, network.dump().params)
    np.testing.assert_array_equal(after_head[base], INITIAL.params[base])
    np.testing.assert_array_equal(trained.params[head], after_head[head])
    assert (trained.params[base] != INITIAL.params[base]).any()
    np.testing.assert_array_equal(np.concatenate([t.ravel() for t in kept.values()]), after_head[head])


def test_fedrep_without_steps_of_the_base_moves_the_head_alone(tmp_path: Path) -> None:
    base, head = PARTS
    trained, _ = split(tmp_path, Sgd(steps=0), personal=HEAD, head_steps=3)
    np.testing.assert_array_equal(trained.params[base], INITIAL.params[base])
    assert (trained.params[head] != INITIAL.params[head]).all()


def test_what_is_kept_is_none_of_the_networks_own_memory(tmp_path: Path) -> None:
    _, kept = split(tmp_path, personal=HEAD)
    before = {name: tensor.copy() for name, tensor in kept.items()}
    worker(tmp_path).network.load(build.make_initial_model(TASK, 9)[1])
    for name, tensor in kept.items():
        np.testing.assert_array_equal(tensor, before[name])


def test_a_network_that_does_not_end_in_a_linear_layer_cannot_be_split(tmp_path: Path) -> None:
    task = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(6,), model="tests.support.networks:without_head")
    blobs = Blobs(task)
    action = Train(starts=(Start(model=blobs.model(0)),), sgd=SGD, personal=HEAD, initial=blobs.model(0))
    result = Worker("d", task, device_data(), tmp_path).execute(order(action, task=task), blobs).result
    assert isinstance(result, Failed)
    assert "last layer" in result.reason


@pytest.mark.parametrize("model", ["normed", "noisy"])
def test_normalisation_that_stays_is_neither_sent_nor_replaced(tmp_path: Path, model: str) -> None:
    """FedBN's selector: weights and statistics of the device's own, in training and in the bundle."""
    task = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(6,), model=f"tests.support.networks:{model}")
    blobs, layout = Blobs(task), build.make_initial_model(task, 0)[0]
    norm = ("norm",)
    own = Worker("d", task, device_data(), tmp_path)
    for number in (1, 2):
        action = Train(
            starts=(Start(model=blobs.model(number, norm)),), sgd=SGD, personal=norm, initial=blobs.model(0),
            codec=Codec.FLOAT32,
        )  # fmt: skip
        finished = own.execute(order(action, number, task=task), blobs)
        assert isinstance(finished.result, Trained), finished.result
        (sent,) = finished.blobs.values()
        assert set(from_bytes(sent)) == {info.name for info in layout.without(norm).tensors}
    serve = Install(model=blobs.model(3, norm), method="m", personal=norm, kept_by="train", initial=blobs.model(0))
    result = own.execute(order(serve, 3, task=task), blobs).result
    assert isinstance(result, Installed), result
    served = codecs.decode(blobs(blobs.model(3)), Codec.FLOAT32, layout)
    mine = unflatten(own.make_personal_model(served), layout)
    found = own.make_device(order(serve, 3, task=task), blobs).load_kept("train", layout.select(norm))
    assert found is not None
    kept = found.get_tensors()
    for name, tensor in unflatten(served, layout).items():
        np.testing.assert_array_equal(mine[name], kept.get(name, tensor))
        assert name not in kept or (mine[name] != tensor).any()
    expected = own.network.compute_logits(own.make_personal_model(served), own.data.x_val)
    predicted = load_bundle(tmp_path / "bundles" / "1").predict(own.data.x_val).probabilities
    np.testing.assert_allclose(
        predicted, np.exp(expected - np.logaddexp.reduce(expected, axis=1, keepdims=True)), atol=1e-5
    )


# ------------------------------------------------------------------------------------------------ the shared model


def plain(blobs: Blobs, **changes: Any) -> Train:
    return Train(**({"starts": (Start(model=blobs.model(1)),), "sgd": LONGER} | changes))


def done(home: Path, action: Train, blobs: Blobs, data: DeviceData | None = None) -> FinishedOrder:
    return worker(home, data).execute(order(action), blobs)


def trained(result: Result) -> Trained:
    assert isinstance(result, Trained), result
    return result


@pytest.mark.parametrize("update_codec", sorted(set(Codec) - {Codec.TOP}))  # which keeps most of the change back
def test_training_lowers_the_loss_and_the_update_is_the_change(
    tmp_path: Path, blobs: Blobs, update_codec: Codec
) -> None:
    finished = done(tmp_path, plain(blobs, codec=update_codec), blobs)
    result = trained(finished.result)
    assert result.n_samples == 30
    assert result.loss_before is not None
    assert result.loss_after is not None
    assert result.gradient_norm is not None
    assert result.val_score is not None
    assert result.loss_after < result.loss_before
    assert result.gradient_norm > 0
    assert 0 <= result.val_score <= 1
    _, start = build.make_initial_model(TASK, 1)
    change = update_of(finished, codec_=update_codec)
    assert result.update.size_bytes == len(finished.blobs[result.update.digest])
    assert 0 < np.abs(change.params).max() < 2
    network = worker(tmp_path).network
    network.load(Model(start.params + change.params, start.buffers, start.counters))
    assert compute_mean_loss(network, *device_data().shared) == pytest.approx(result.loss_after, rel=0.02)


def test_what_is_not_asked_for_is_not_measured_and_changes_no_byte_of_the_update(tmp_path: Path, blobs: Blobs) -> None:
    asked, spared = (done(tmp_path, plain(blobs, measure=measure), blobs) for measure in (True, False))
    assert spared.blobs == asked.blobs
    assert spared.result == msgspec.structs.replace(
        trained(asked.result), loss_before=None, loss_after=None, gradient_norm=None
    )
    wild = Start(model=blobs.model(1, scale=1e30))
    assert isinstance(done(tmp_path, plain(blobs, starts=(wild,), measure=False), blobs).result, Failed)


def test_labels_of_sensitive_and_validation_samples_change_no_uploaded_byte(tmp_path: Path, blobs: Blobs) -> None:
    data = device_data()
    y_train = data.y_train.copy()
    y_train[data.sensitive] = np.roll(y_train[data.sensitive], 1)
    assert (y_train != data.y_train).any()
    other = replace(data, y_train=y_train, y_val=np.roll(data.y_val, 1))
    first, second = (done(tmp_path, plain(blobs), blobs, own) for own in (data, other))
    assert first.blobs == second.blobs
    assert trained(first.result).loss_after == trained(second.result).loss_after


def test_the_start_with_the_smallest_validation_loss_is_taken_the_first_on_a_tie(tmp_path: Path, blobs: Blobs) -> None:
    _, start = build.make_initial_model(TASK, 1)
    change = update_of(done(tmp_path, plain(blobs, codec=Codec.FLOAT32), blobs))
    good = blobs.put(unflatten(Model(start.params + change.params, start.buffers, start.counters), LAYOUT))
    starts = (Start(model=blobs.model(1), cluster=4), Start(model=good, cluster=2), Start(model=good, cluster=7))
    assert trained(done(tmp_path, plain(blobs, starts=starts), blobs).result).cluster == 2


def test_without_shareable_samples_nothing_is_sent(tmp_path: Path, blobs: Blobs) -> None:
    finished = done(tmp_path, plain(blobs), blobs, device_data(sensitive=1.0))
    assert finished.result == Declined(why=Why.NO_DATA)
    assert not finished.blobs


def test_a_model_that_is_unfit_fails_by_name(tmp_path: Path, blobs: Blobs) -> None:
    result = done(tmp_path, plain(blobs, starts=(Start(model=blobs.file(b"nonsense")),)), blobs).result
    assert isinstance(result, Failed)
    assert "malformed" in result.reason
    wild = (Start(model=blobs.model(2, scale=1e18)),)
    diverging = plain(blobs, starts=wild, sgd=Sgd(steps=50, learning_rate=100))
    assert isinstance(done(tmp_path, diverging, blobs).result, Failed)


@pytest.mark.parametrize("name", ["plain", *KEEPS])
def test_stop_ends_the_work_between_batches_and_nothing_is_kept(tmp_path: Path, blobs: Blobs, name: str) -> None:
    asked = iter([False, False, True])
    action = plain(blobs) if name == "plain" else train(name, blobs)
    with pytest.raises(StoppedError):
        worker(tmp_path).execute(order(action), blobs, stop=lambda: next(asked))
    assert store_of(tmp_path) == {}


# --------------------------------------------------------------------------------------------------- own class means


def test_own_class_means_hold_features_back(tmp_path: Path, blobs: Blobs) -> None:
    """The stronger, the nearer to where the start has them; gently, the update is nearly the one without."""
    own, start = worker(tmp_path), build.make_initial_model(TASK, 1)[1]
    x, y = own.data.shared
    network = Network(TASK)
    before = network.compute_features(start, x)
    centres = np.stack([before[y == c].mean(axis=0) for c in range(3)])[y]

    def distance(**changes: Any) -> float:
        update = update_of(own.execute(order(plain(blobs, codec=Codec.FLOAT32, **changes)), blobs))
        after = Model(start.params + update.params, start.buffers, start.counters)
        return float(np.square(network.compute_features(after, x) - centres).mean())

    without, little, much = distance(), distance(class_means=1e-6), distance(class_means=1.0)
    assert little == pytest.approx(without, rel=1e-4)
    assert much < 0.9 * without


def test_class_means_of_one_sample_each_change_no_first_step(tmp_path: Path, blobs: Blobs) -> None:
    """Each feature is its class's mean still: the pull begins with the second step."""
    data = mixed_data(samples(3, 1), samples(8, 2))
    for steps in (1, 2):
        found = [
            update_of(worker(tmp_path, data).execute(order(plain(blobs, codec=Codec.FLOAT32, **changes)), blobs)).params
            for changes in ({"sgd": Sgd(steps=steps)}, {"sgd": Sgd(steps=steps), "class_means": 1.0})
        ]
        assert np.allclose(*found, atol=1e-6) == (steps == 1)


def test_without_class_means_an_order_has_the_bytes_of_one_that_does_not_know_them(blobs: Blobs) -> None:
    """And who does not know them reads an order with them as one without."""
    unset = {"class_means", "weights", "campaign"}
    names = [name for name in Train.__struct_fields__ if name not in unset]
    old = msgspec.defstruct("Old", [(name, Any) for name in names], kw_only=True)
    action = plain(blobs)
    fields = msgspec.msgpack.decode(encode_body(action))
    assert list(fields) == names
    known = msgspec.msgpack.decode(encode_body(msgspec.structs.replace(action, class_means=0.1)), type=old)
    assert msgspec.msgpack.encode(known) == encode_body(action)


def test_a_step_of_version_0_1_keeps_tensors_by_name_in_the_old_frame(
    tmp_path: Path, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn_by_name(start: Model, mine: Tensors | None) -> tuple[Model, Tensors]:
        seen.append(mine)
        return start, part_of(start, HEAD)

    def run(device: Device, action: Train) -> Result:
        with pytest.warns(FutureWarning, match=r"edge_agent\.steps\.train_alone"):
            return half.train(device, action, learn_by_name)

    seen: list[Tensors | None] = []
    monkeypatch.setattr(half, "run", run)
    monkeypatch.setattr(half, "overlay", overlay_tensors)
    own = worker(tmp_path)
    for number in (1, 2):
        assert isinstance(own.execute(order(train("fedper", blobs, number), number), blobs).result, Trained)
    first, second = seen
    assert first is None
    assert second is not None
    for name, tensor in part_of(INITIAL, HEAD).items():
        np.testing.assert_array_equal(second[name], tensor)
