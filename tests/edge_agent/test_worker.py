from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from deploy import load
from edge_agent.worker import Worker, remembering
from fedge import codec, models
from fedge.errors import ConfigError
from fedge.messages import BlobRef, Codec, Order, Role
from fedge.models.training import mean_loss
from fedge.sgd import Sgd
from fedge.step import Declined, Failed
from fedge.steps.fit_candidates import CandidatesFitted, FitCandidates
from fedge.steps.fit_energy import EnergyFitted, FitEnergy
from fedge.steps.fit_gate import FitGate
from fedge.steps.fit_weights import Calibration, FitWeights, WeightsFitted
from fedge.steps.install import Install, Installed
from fedge.steps.profile import Profile, Profiled
from fedge.steps.train import Start, Train, Trained
from fedge.steps.trial import Trial, Tried
from fedge.stopping import StoppedError
from fedge.task import TaskSpec
from fedge.tasks import DeviceData
from fedge.tensors import Model, digest_of, unflatten

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 8})
SGD = Sgd(steps=12)
CALIBRATION = {role: Calibration(temperature=1.4, kappa=0.5) for role in Role}
WITHOUT_LOCAL = {Role.PRIVATE: 0.5, Role.GLOBAL: 0.3, Role.EXPERT: 0.2}
WITH_LOCAL = {Role.PRIVATE: 0.4, Role.GLOBAL: 0.2, Role.EXPERT: 0.2, Role.LOCAL: 0.2}


class Blobs:
    """The coordinator's side of `fetch`."""

    def __init__(self):
        self.data = {}

    def model(self, seed, scale=1.0):
        layout, model = models.initial(TASK, seed)
        model = Model(model.params * np.float32(scale), model.buffers, model.counters)
        data = codec.encode(unflatten(model, layout), Codec.FLOAT32)
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data))
        self.data[ref.digest] = data
        return ref

    def __call__(self, ref):
        return self.data[ref.digest]


@pytest.fixture
def blobs():
    return Blobs()


def samples(n, seed):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    return (rng.normal(size=(n, 6)) + 2 * np.eye(6)[y]).astype(np.float32), y.astype(np.int64)


def make_data(n=40, m=15):
    (x, y), (x_val, y_val) = samples(n, 1), samples(m, 2)
    return DeviceData(x, y, np.arange(n) % 4 == 0, x_val, y_val)


def order(action, seed=5):
    return Order(
        id="r.1.step.d",
        device_id="d",
        round=1,
        step="step",
        seed=seed,
        task_fingerprint=TASK.fingerprint(),
        deadline=0.0,
        action=action,
    )


def candidates_order(blobs, experts=2):
    starts = tuple(Start(model=blobs.model(10 + k), cluster=k) for k in range(experts))
    return order(
        FitCandidates(
            global_model=blobs.model(1), experts=starts, initial_model=blobs.model(0), sgd=SGD, local_steps=30
        )
    )


def gate_order(pooled=WITH_LOCAL, release=3, **changes):
    calibration = {role: CALIBRATION[role] for role in pooled}
    action = FitGate(calibration=calibration, pooled=pooled, shrinkage=20.0, beta=0.5, sgd=SGD, release=release)
    return order(msgspec.structs.replace(action, **changes))


def shuffled(labels, chosen, seed=9):
    labels = labels.copy()
    labels[chosen] = np.roll(labels[chosen], 1)
    return labels


# ------------------------------------------------------------------------------------------------- shared rounds


@pytest.mark.parametrize("update_codec", list(Codec))
def test_training_lowers_the_loss_and_the_update_is_the_change(tmp_path, blobs, update_codec):
    worker = Worker("d", TASK, make_data(), tmp_path)
    ref = blobs.model(1)
    outcome = worker.execute(order(Train(starts=(Start(model=ref),), sgd=SGD, codec=update_codec)), blobs)
    result = outcome.result
    assert isinstance(result, Trained)
    assert result.n_samples == 30
    assert result.loss_after < result.loss_before
    assert result.gradient_norm > 0
    assert 0 <= result.val_accuracy <= 1
    layout, start = models.initial(TASK, 1)
    change = codec.decode(outcome.blobs[result.update.digest], update_codec, layout)
    assert result.update.size_bytes == len(outcome.blobs[result.update.digest])
    assert 0 < np.abs(change.params).max() < 2
    network = worker.network
    network.load(Model(start.params + change.params, start.buffers, start.counters))
    assert mean_loss(network, *worker.data.shared) == pytest.approx(result.loss_after, rel=0.02)


def test_what_is_not_asked_for_is_not_measured_and_changes_no_byte_of_the_update(tmp_path, blobs):
    worker = Worker("d", TASK, make_data(), tmp_path)
    starts = (Start(model=blobs.model(1)),)
    asked = worker.execute(order(Train(starts=starts, sgd=SGD)), blobs)
    spared = worker.execute(order(Train(starts=starts, sgd=SGD, measure=False)), blobs)
    assert spared.blobs == asked.blobs
    assert spared.result == msgspec.structs.replace(asked.result, loss_before=None, loss_after=None, gradient_norm=None)
    wild = Start(model=blobs.model(1, scale=1e30))
    diverged = worker.execute(order(Train(starts=(wild,), sgd=SGD, measure=False)), blobs).result
    assert isinstance(diverged, Failed)


def test_a_model_is_decoded_once_where_it_is_remembered(tmp_path, blobs, monkeypatch):
    decoded = []
    real = codec.decode
    monkeypatch.setattr(codec, "decode", lambda *args: decoded.append(1) or real(*args))
    worker = Worker("d", TASK, make_data(), tmp_path)
    ref = blobs.model(1)
    with remembering():
        first, second = (worker.model(ref, blobs) for _ in range(2))
        assert len(decoded) == 1
    np.testing.assert_array_equal(first.params, second.params)
    assert worker.model(ref, blobs) is not worker.model(ref, blobs)


def test_labels_of_sensitive_and_validation_samples_change_no_uploaded_byte(tmp_path, blobs):
    data = make_data()
    action = Train(starts=(Start(model=blobs.model(1)),), sgd=SGD)
    other = replace(data, y_train=shuffled(data.y_train, data.sensitive), y_val=shuffled(data.y_val, np.ones(15, bool)))
    assert (other.y_train != data.y_train).any()
    first, second = (Worker("d", TASK, d, tmp_path / "h").execute(order(action), blobs) for d in (data, other))
    assert first.blobs == second.blobs
    assert first.result.loss_after == second.result.loss_after
    profiles = [
        Worker("d", TASK, replace(data, x_train=x), tmp_path).execute(order(Profile(extractor=blobs.model(1))), blobs)
        for x in (data.x_train, np.where(data.sensitive[:, None], np.float32(9), data.x_train))
    ]
    assert profiles[0] == profiles[1]


def test_the_start_with_the_smallest_validation_loss_is_taken_the_first_on_a_tie(tmp_path, blobs):
    worker = Worker("d", TASK, make_data(), tmp_path)
    trained = worker.execute(order(Train(starts=(Start(model=blobs.model(1)),), sgd=SGD, codec=Codec.FLOAT32)), blobs)
    layout, start = models.initial(TASK, 1)
    change = codec.decode(trained.blobs[trained.result.update.digest], Codec.FLOAT32, layout)
    better = codec.encode(
        unflatten(Model(start.params + change.params, start.buffers, start.counters), layout), Codec.FLOAT32
    )
    good = BlobRef(digest=digest_of(better), size_bytes=len(better))
    blobs.data[good.digest] = better
    starts = (
        Start(model=blobs.model(1), cluster=4),
        Start(model=good, cluster=2),
        Start(model=good, cluster=7),
    )
    result = worker.execute(order(Train(starts=starts, sgd=SGD)), blobs).result
    assert result.cluster == 2
    tried = worker.execute(order(Trial(global_model=blobs.model(1), expert=good)), blobs).result
    assert isinstance(tried, Tried)
    assert tried.delta > 0
    assert worker.execute(order(Trial(global_model=good, expert=good)), blobs).result.delta == 0


def test_without_shareable_samples_nothing_is_sent(tmp_path, blobs):
    data = replace(make_data(), sensitive=np.ones(40, bool))
    worker = Worker("d", TASK, data, tmp_path)
    for action in (Train(starts=(Start(model=blobs.model(1)),), sgd=SGD), Profile(extractor=blobs.model(1))):
        outcome = worker.execute(order(action), blobs)
        assert outcome.result == Declined(reason="no shareable samples")
        assert not outcome.blobs


def test_the_profile_is_about_the_hidden_units(tmp_path, blobs):
    result = Worker("d", TASK, make_data(), tmp_path).execute(order(Profile(extractor=blobs.model(1))), blobs).result
    assert isinstance(result, Profiled)
    assert len(result.profile) == 8
    assert result.n_samples == 30
    assert 0 <= result.halves < 0.2


def test_a_model_that_is_unfit_fails_by_name(tmp_path, blobs):
    worker = Worker("d", TASK, make_data(), tmp_path)
    ref = blobs.model(1)
    blobs.data[ref.digest] = b"nonsense"
    outcome = worker.execute(order(Train(starts=(Start(model=ref),), sgd=SGD)), blobs)
    assert isinstance(outcome.result, Failed)
    assert "malformed" in outcome.result.reason
    diverging = Train(starts=(Start(model=blobs.model(2, scale=1e18)),), sgd=Sgd(steps=50, learning_rate=100))
    assert isinstance(worker.execute(order(diverging), blobs).result, Failed)


def test_stop_ends_the_work_between_batches(tmp_path, blobs):
    asked = iter([False, False, True])
    worker = Worker("d", TASK, make_data(), tmp_path)
    action = Train(starts=(Start(model=blobs.model(1)),), sgd=SGD)
    with pytest.raises(StoppedError):
        worker.execute(order(action), blobs, stop=lambda: next(asked))


# ------------------------------------------------------------------------------------------------- the mixture


def test_every_order_done_twice_or_after_a_restart_gives_the_same(tmp_path, blobs):
    actions = [
        order(Train(starts=(Start(model=blobs.model(1)),), sgd=SGD)),
        candidates_order(blobs),
        order(FitWeights(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL, WITH_LOCAL), shrinkage=10.0)),
        order(FitEnergy(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL, WITH_LOCAL), shrinkage=20.0)),
        gate_order(),
    ]
    worker = Worker("d", TASK, make_data(), tmp_path)
    for item in actions:
        first = worker.execute(item, blobs)
        assert not isinstance(first.result, Failed), first.result
        assert worker.execute(item, blobs) == first
        assert Worker("d", TASK, make_data(), tmp_path).execute(item, blobs) == first  # as after kill -9
    assert len(list((tmp_path / "candidates").iterdir())) == 1 + 5  # state, private, global, expert, local, initial


def test_the_whole_personalisation_ends_in_a_bundle_that_predicts(tmp_path, blobs):
    data = make_data()
    worker = Worker("d", TASK, data, tmp_path)
    fitted = worker.execute(candidates_order(blobs), blobs).result
    assert isinstance(fitted, CandidatesFitted)
    assert list(fitted.losses) == list(Role)
    assert fitted.cluster in (0, 1)
    assert fitted.losses[Role.PRIVATE][0] < fitted.losses[Role.GLOBAL][0]
    weighed = worker.execute(
        order(FitWeights(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL, WITH_LOCAL), shrinkage=10.0)), blobs
    ).result
    assert isinstance(weighed, WeightsFitted)
    assert set(weighed.weights[0]) == set(WITHOUT_LOCAL)
    assert all(sum(w.values()) == pytest.approx(1) for w in weighed.weights)
    energy = worker.execute(
        order(FitEnergy(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL, WITH_LOCAL), shrinkage=20.0)), blobs
    ).result
    assert isinstance(energy, EnergyFitted)
    assert len(energy.pooled_losses) == len(energy.beta_losses) == 2
    assert energy.beta_losses[0][0] <= energy.pooled_losses[0] + 1e-9  # own weights fit V_i at least as well
    for release, pooled in {3: WITH_LOCAL, 4: WITHOUT_LOCAL}.items():
        installed = worker.execute(gate_order(pooled, release), blobs).result
        assert isinstance(installed, Installed), installed
        assert set(pooled) <= set(installed.roles)
        assert installed.max_abs_diff < 1e-4
    runtime = load(tmp_path / "bundles" / "4")
    accuracy = np.mean(runtime.predict(data.x_val).class_index == data.y_val)
    assert accuracy > 0.7


def test_the_private_model_may_start_from_the_initial_model_and_take_a_number_of_steps(tmp_path, blobs):
    """As it would learn from the initial model if that were the global one; the final fit then takes as many steps."""
    first = blobs.model(0)
    plain = FitCandidates(global_model=first, initial_model=first, sgd=SGD, local_steps=0)
    shared = FitCandidates(global_model=blobs.model(1), initial_model=first, sgd=SGD, local_steps=0)
    losses, kept = {}, {}
    for name, action in {
        "best": shared,
        "initial": msgspec.structs.replace(shared, private_start="initial"),
        "initial, 7": msgspec.structs.replace(shared, private_start="initial", private_steps=7),
        "plain": plain,
        "plain, 7": msgspec.structs.replace(plain, private_steps=7),
    }.items():
        worker = Worker("d", TASK, make_data(), tmp_path / name)
        losses[name] = worker.execute(order(action), blobs).result.losses[Role.PRIVATE]
        kept[name] = worker._kept()
    assert losses["initial"] == losses["plain"] != losses["best"]
    assert losses["initial, 7"] == losses["plain, 7"] != losses["plain"]
    assert kept["initial, 7"].private_steps == 7
    assert kept["initial, 7"].private_start == kept["plain"].private_start != kept["best"].private_start


def test_without_the_gate_the_weights_are_the_same_for_every_sample(tmp_path, blobs):
    data = make_data()
    worker = Worker("d", TASK, data, tmp_path)
    worker.execute(candidates_order(blobs), blobs)
    for release, learns in {3: "validation", 4: "untrained"}.items():
        installed = worker.execute(gate_order(release=release, gate=learns, beta=0.0), blobs).result
        assert isinstance(installed, Installed), installed
        spread = np.ptp(load(tmp_path / "bundles" / str(release)).predict(data.x_val).weights, axis=0).max()
        assert spread > 1e-3 if learns == "validation" else spread < 1e-6


def test_the_prior_while_choosing_does_not_see_the_validation_labels(tmp_path):
    data = make_data()
    other = replace(data, y_val=np.zeros_like(data.y_val))
    first, second = Worker("a", TASK, data, tmp_path), Worker("b", TASK, other, tmp_path)
    assert (first.prior == second.prior).all()
    assert (first.final_prior() != second.final_prior()).any()


def test_orders_that_need_candidates_fail_without_them(tmp_path, blobs):
    worker = Worker("d", TASK, make_data(), tmp_path)
    action = FitWeights(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL,), shrinkage=10.0)
    assert "no candidates" in worker.execute(order(action), blobs).result.reason


@pytest.mark.parametrize(("n", "m"), [(40, 0), (1, 3), (0, 0), (2, 1), (30, 12)])
def test_devices_with_little_data_get_a_mixture_of_what_they_have(tmp_path, blobs, n, m):
    data = make_data(n, m)
    data = replace(data, y_train=np.zeros_like(data.y_train))  # one class only
    worker = Worker("d", TASK, data, tmp_path)
    fitted = worker.execute(candidates_order(blobs, experts=0), blobs).result
    assert isinstance(fitted, CandidatesFitted), fitted
    expected = {Role.GLOBAL} | ({Role.PRIVATE, Role.LOCAL} if n >= 2 else set())
    assert set(fitted.losses) == expected
    assert fitted.n_validation == m
    weighed = worker.execute(
        order(FitWeights(calibration=CALIBRATION, pooled=(WITH_LOCAL,), shrinkage=10.0)), blobs
    ).result
    assert set(weighed.weights[0]) == expected
    if m == 0 and n >= 2:
        assert weighed.weights[0][Role.PRIVATE] == pytest.approx(0.5)  # u spread over those present
    energy = worker.execute(order(FitEnergy(calibration=CALIBRATION, pooled=(WITH_LOCAL,), shrinkage=20.0)), blobs)
    assert isinstance(energy.result, EnergyFitted)
    installed = worker.execute(gate_order(), blobs).result
    assert isinstance(installed, Installed), installed
    assert set(installed.roles) == expected


@pytest.mark.parametrize("field", ["y_train", "y_val"])
def test_a_label_that_the_task_does_not_have_is_refused_at_the_start(tmp_path, field):
    with pytest.raises(ConfigError, match=r"labels from \d to 3 found, but the task has the classes 0..2"):
        Worker("d", TASK, replace(make_data(), **{field: getattr(make_data(), field) + 1}), tmp_path)


def test_a_damaged_mixture_is_guarded_by_the_local_model_that_the_pool_left_out(tmp_path, blobs):
    data = make_data(60, 30)
    worker = Worker("d", TASK, data, tmp_path)
    damaged = blobs.model(1, scale=200.0)
    starts = (Start(model=damaged, cluster=0),)
    worker.execute(
        order(
            FitCandidates(global_model=damaged, experts=starts, initial_model=blobs.model(0), sgd=SGD, local_steps=60)
        ),
        blobs,
    )
    only_shared = {Role.GLOBAL: 1.0}
    installed = worker.execute(gate_order(only_shared), blobs).result
    assert isinstance(installed, Installed), installed
    assert installed.guarded
    assert installed.roles == (Role.GLOBAL, Role.LOCAL)


def test_install_is_the_shared_model_as_it_is(tmp_path, blobs):
    data = make_data()
    worker = Worker("d", TASK, data, tmp_path)
    result = worker.execute(order(Install(global_model=blobs.model(1), release=1, method="fedavg")), blobs).result
    assert isinstance(result, Installed), result
    assert result.roles == (Role.GLOBAL,)
    _, model = models.initial(TASK, 1)
    logits = worker.network.logits(model, data.x_val)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = load(tmp_path / "bundles" / "1").predict(data.x_val)
    assert found.probabilities == pytest.approx(expected, abs=1e-5)
