"""A bundle of one model, as it is given or fine-tuned first."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy import load
from edge_agent.device.worker import Worker
from edge_agent.steps.mixture.install import fine_tune
from fedge.bundle.campaign import read_campaign
from fedge.models.training import Network, Trainer, compute_mean_loss
from fedge.steps.mixture.install import FineTune, Install, Installed
from fedge.steps.sgd import Sgd
from fedge.system.stopping import Stop, StoppedError, never
from fedge.tasks import DeviceData
from fedge.tensors.layout import Model
from fedge.wire.messages import Role
from tests.support.orders import INITIAL, TASK, Blobs, device_data, manifest_of, order, roles_of, samples

SGD = Sgd()
COMPETING = FineTune(sgd=SGD, checkpoints=(0, 10, 20, 40, 80), otherwise=40)


TRAINING, VALIDATION, NOTHING = samples(40, 1), samples(15, 2), samples(0, 3)


def data_of(training: tuple, validation: tuple) -> DeviceData:
    return DeviceData(*training, np.arange(len(training[1])) % 4 == 0, *validation)


def tuned(
    tuning: FineTune = COMPETING,
    start: Model = INITIAL,
    training: tuple = TRAINING,
    validation: tuple = VALIDATION,
    stop: Stop = never,
) -> Model:
    action = Install(model=Blobs().model(0), method="fedavg", fine_tune=tuning)
    own = Worker("d", TASK, data_of(training, validation), Path("unused"))
    return fine_tune(own.make_device(order(action, seed=7), Blobs(), stop), start, tuning)


def steps(n: int, start: Model = INITIAL, training: tuple = TRAINING) -> Model:
    """What so many steps of plain training give."""
    network = Network(TASK)
    network.load(start)
    Trainer(network, *training, SGD, np.random.default_rng(7)).run(n)
    return network.dump()


def loss(model: Model, of: tuple) -> float:
    network = Network(TASK)
    network.load(model)
    return compute_mean_loss(network, *of)


def test_the_checkpoint_with_the_smallest_validation_loss_is_taken() -> None:
    losses = [loss(steps(n), VALIDATION) for n in COMPETING.checkpoints]
    best = COMPETING.checkpoints[int(np.argmin(losses))]
    assert best > 0
    np.testing.assert_array_equal(tuned().params, steps(best).params)


def test_the_start_is_kept_where_every_step_harms() -> None:
    good = steps(300)
    x, y = TRAINING
    np.testing.assert_array_equal(tuned(start=good, training=(x, (y + 1) % 3)).params, good.params)


def test_on_a_tie_the_fewest_steps_win() -> None:
    still = Model(np.zeros_like(INITIAL.params), INITIAL.buffers, INITIAL.counters)
    flat = (np.zeros((15, 6), np.float32), VALIDATION[1])  # balanced labels, equal inputs: bias alone could help
    tuning = FineTune(sgd=Sgd(learning_rate=1e-12), checkpoints=(40, 10), otherwise=5)
    np.testing.assert_array_equal(
        tuned(tuning, start=still, validation=flat).params,
        tuned(FineTune(sgd=tuning.sgd, checkpoints=(10,), otherwise=5), start=still).params,
    )


@pytest.mark.parametrize("validation", [VALIDATION, NOTHING])
def test_one_checkpoint_is_simply_done(validation: tuple) -> None:
    found = tuned(FineTune(sgd=SGD, checkpoints=(13,), otherwise=40), validation=validation)
    np.testing.assert_array_equal(found.params, steps(13).params)


def test_without_validation_samples_the_number_of_steps_is_fixed() -> None:
    np.testing.assert_array_equal(tuned(validation=NOTHING).params, steps(40).params)


def test_training_that_diverges_leaves_the_best_before_it() -> None:
    wild = Sgd(learning_rate=100, momentum=0.99)
    x, y = TRAINING
    far = (x * np.float32(1e18), y)
    kept = tuned(FineTune(sgd=wild, checkpoints=(0, 80), otherwise=40), training=far)
    np.testing.assert_array_equal(kept.params, INITIAL.params)
    np.testing.assert_array_equal(
        tuned(FineTune(sgd=wild, checkpoints=(40, 80), otherwise=40), training=far).params, INITIAL.params
    )
    alone = FineTune(sgd=wild, checkpoints=(80,), otherwise=40)
    np.testing.assert_array_equal(tuned(alone, training=far).params, INITIAL.params)


def test_it_can_be_stopped() -> None:
    with pytest.raises(StoppedError):
        tuned(stop=lambda: True)


# ------------------------------------------------------------------------------------------------- the whole order


def done(home: Path, data: DeviceData, tuning: FineTune | None, seed: int = 7) -> Installed:
    blobs = Blobs()
    action = Install(model=blobs.model(0), method="fedavg", fine_tune=tuning)
    finished = Worker("d", TASK, data, home).execute(order(action, seed=seed), blobs)
    assert isinstance(finished.result, Installed), finished.result
    assert finished.blobs == {}
    return finished.result


def probabilities(model: Model, x: np.ndarray) -> np.ndarray:
    logits = Network(TASK).compute_logits(model, x)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def test_the_bundle_predicts_what_the_tuned_model_does(tmp_path: Path) -> None:
    result = done(tmp_path, device_data(), COMPETING)
    assert roles_of(tmp_path, result) == (Role.PRIVATE,)
    expected = tuned()
    x = samples(30, 4)[0]
    found = load(tmp_path / "bundles" / "1").predict(x).probabilities
    np.testing.assert_allclose(found, probabilities(expected, x), atol=1e-5)
    assert not np.allclose(found, probabilities(INITIAL, x), atol=1e-2)


def test_without_fine_tuning_the_model_is_installed_as_it_is(tmp_path: Path) -> None:
    assert roles_of(tmp_path, done(tmp_path, device_data(), None)) == (Role.GLOBAL,)
    x = samples(30, 4)[0]
    found = load(tmp_path / "bundles" / "1").predict(x).probabilities
    np.testing.assert_allclose(found, probabilities(INITIAL, x), atol=1e-5)


def test_a_device_without_training_samples_installs_what_it_was_given(tmp_path: Path) -> None:
    assert roles_of(tmp_path, done(tmp_path, device_data(n=0), COMPETING)) == (Role.GLOBAL,)


def test_sensitive_samples_take_part_and_the_result_does_not_show_it(tmp_path: Path) -> None:
    data = device_data()
    relabelled = replace(data, y_train=np.where(data.sensitive, (data.y_train + 1) % 3, data.y_train))
    one, other = done(tmp_path / "a", data, COMPETING), done(tmp_path / "b", relabelled, COMPETING)
    assert one == other
    assert manifest_of(tmp_path / "a", one).candidates != manifest_of(tmp_path / "b", other).candidates


@pytest.mark.usefixtures("fails_on_sevens")
def test_a_marked_sample_on_which_a_graph_fails_does_not_show_either(tmp_path: Path) -> None:
    plain = device_data()
    marked = replace(
        plain,
        x_val=np.concatenate([plain.x_val, np.full_like(plain.x_val[:1], 7)]),
        y_val=np.concatenate([plain.y_val, plain.y_val[:1]]),
        sensitive_val=np.arange(len(plain.x_val) + 1) == len(plain.x_val),
    )
    one, other = done(tmp_path / "a", plain, None), done(tmp_path / "b", marked, None)
    assert one == other


def test_the_same_order_gives_the_same_bundle(tmp_path: Path) -> None:
    one, same, other = (
        manifest_of(tmp_path / name, done(tmp_path / name, device_data(), COMPETING, seed=seed))
        for name, seed in (("a", 7), ("b", 7), ("c", 6))
    )
    assert one == same != other


def test_a_bundle_of_a_campaign_says_so_beside_its_manifest(tmp_path: Path) -> None:
    blobs = Blobs()
    action = Install(model=blobs.model(0), method="fedavg", campaign=4)
    Worker("d", TASK, device_data(), tmp_path).execute(order(action), blobs)
    assert read_campaign(tmp_path / "bundles" / "1") == 4
