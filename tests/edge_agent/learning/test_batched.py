"""Orders done together against the same orders done by each worker alone."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch import nn

from edge_agent.device.worker import Worker
from edge_agent.learning import batched, frame
from edge_agent.learning.batched import Job, execute_jobs
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.models.training import can_stack
from fedge.steps.contract import Declined, Failed
from fedge.steps.descriptions.profile import Profile
from fedge.steps.descriptions.trial import Trial
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.system.files import compute_digest
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.layout import HEAD, Codec, Model, unflatten
from fedge.wire.messages import BlobRef, Why
from tests.support.orders import order

MLP = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 8})
CNN = TaskSpec(
    name="toy", classes=("a", "b", "c"), input_shape=(1, 8, 8), model="cnn", model_options={"channels": 2, "hidden": 4}
)
SIZES = ((40, 9), (7, 3), (33, 0), (1, 1), (64, 20), (40, 2), (0, 4))
"""Training and validation samples of the devices; a quarter of both are sensitive."""
SGD = Sgd(steps=7, batch_size=16, proximal_mu=0.1)


def dropout(task: TaskSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def batch_norm(task: TaskSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Branching(nn.Module):
    """Decides by the numbers that it sees, which cannot be vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(2 * x)


def branching(task: TaskSpec) -> nn.Module:
    return Branching()


class Moody(Branching):
    """Fails on what one of the devices holds; `p` > 0: also draws."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1000:
            raise RuntimeError("out of paper")
        return self.layer(self.dropout(x))


def moody(task: TaskSpec) -> nn.Module:
    return Moody(0.0)


def moody_and_random(task: TaskSpec) -> nn.Module:
    return Moody(0.5)


@pytest.fixture(autouse=True)
def _own_networks(own_module):
    networks = (dropout, batch_norm, branching, moody, moody_and_random)
    own_module("networks_of_a_user", **{network.__name__: network for network in networks})


def task_of(model: str) -> TaskSpec:
    own = {"mlp": MLP, "cnn": CNN}
    return own.get(model) or TaskSpec(
        name="toy", classes=("a", "b", "c"), input_shape=(6,), model=f"networks_of_a_user:{model}"
    )


def data_of(task: TaskSpec, n: int, m: int) -> DeviceData:
    rng = np.random.default_rng([n, m])
    y = rng.integers(0, 3, n + m)
    x = rng.normal(size=(n + m, *task.input_shape)).astype(np.float32) + y.reshape(-1, *[1] * len(task.input_shape))
    x = x.astype(np.float32)
    return DeviceData(x[:n], y[:n], np.arange(n) % 4 == 3, x[n:], y[n:], np.arange(m) % 4 == 3)


class Federation:
    """Workers with ragged data, and models that orders can name."""

    def __init__(self, task: TaskSpec, home, sizes=SIZES):
        self.task = task
        self.blobs: dict[str, bytes] = {}
        self.workers = [Worker(f"d{k}", task, data_of(task, *size), home / str(k)) for k, size in enumerate(sizes)]

    def model(self, seed, scale=1.0) -> BlobRef:
        layout, model = build.make_initial_model(self.task, seed)
        scaled = Model(model.params * np.float32(scale), model.buffers, model.counters)
        data = codecs.encode(unflatten(scaled, layout), Codec.FLOAT32)
        self.blobs[compute_digest(data)] = data
        return BlobRef(digest=compute_digest(data), size_bytes=len(data))

    def jobs(self, action) -> list[Job]:
        return [self.job(number, action) for number in range(len(self.workers))]

    def job(self, number, action) -> Job:
        asked = order(action, label=f"s.{number}", seed=100 + number, task=self.task)
        return Job(self.workers[number], asked, action, lambda ref: self.blobs[ref.digest])

    def train(self, **changes) -> Train:
        return Train(**{"starts": (Start(model=self.model(1)),), "sgd": SGD, "codec": Codec.FLOAT32} | changes)

    def update(self, outcome) -> np.ndarray:
        layout, _ = build.make_initial_model(self.task, 1)
        return codecs.decode(outcome.blobs[outcome.result.update.digest], outcome.result.update.codec, layout).params


@pytest.fixture
def alone(monkeypatch):
    """The numbers of the orders that a worker carried out by itself."""
    seen: list[str] = []
    real = Worker.execute

    def execute(self, order, fetch, **rest):
        seen.append(self.id)
        return real(self, order, fetch, **rest)

    monkeypatch.setattr(Worker, "execute", execute)
    return seen


RECIPES = {
    "plain": {},
    "nesterov, clipped": {"nesterov": True, "clip_norm": 0.5},
    "smooth": {"label_smoothing": 0.1},
    "adam": {"optimizer": "adam", "learning_rate": 0.01, "clip_norm": 0.5},
    "adamw, balanced": {
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "class_weights": "balanced",
        "label_smoothing": 0.1,
    },
}


@pytest.mark.parametrize("class_means", [UNSET, 2.0])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stack_trains_what_each_worker_trains_whatever_the_sizes(tmp_path, alone, recipe, class_means):
    here = Federation(MLP, tmp_path)
    action = here.train(class_means=class_means, sgd=msgspec.structs.replace(SGD, **RECIPES[recipe]))
    found = execute_jobs(here.jobs(action))
    assert alone == ["d6"]  # it has nothing to train on and says so itself
    for job, outcome in zip(here.jobs(action), found, strict=True):
        own = job.run()
        if job.worker.id == "d6":
            assert outcome == own
            assert isinstance(own.result, Declined)
            continue
        assert (outcome.result.val_score is None) == (job.worker.id == "d2")
        for field in set(Trained.__struct_fields__) - {"update"}:
            expected = getattr(own.result, field)
            assert getattr(outcome.result, field) == (expected and pytest.approx(expected, rel=1e-4, abs=1e-5))
        assert here.update(outcome) == pytest.approx(here.update(own), rel=1e-3, abs=1e-5)
        assert np.abs(here.update(own)).max() > 0.01


def test_what_is_not_asked_for_is_not_measured(tmp_path, alone):
    here = Federation(MLP, tmp_path)
    asked = execute_jobs(here.jobs(here.train()))
    found = execute_jobs([here.job(k, here.train(measure=k % 2 == 0)) for k in range(6)])
    assert alone == ["d6"]
    for k in range(6):
        measured = (found[k].result.loss_before, found[k].result.loss_after, found[k].result.gradient_norm)
        assert (None in measured) == (k % 2 == 1)
        assert found[k].result.val_score == asked[k].result.val_score
        assert here.update(found[k]) == pytest.approx(here.update(asked[k]), rel=1e-3, abs=1e-6)


def test_who_else_is_asked_changes_an_update_by_no_more_than_rounding(tmp_path, monkeypatch):
    here = Federation(MLP, tmp_path)
    whole = execute_jobs(here.jobs(here.train()))
    assert execute_jobs(here.jobs(here.train())) == whole
    with monkeypatch.context() as few:
        few.setattr(frame, "MOST_MODELS", 2)
        halves = execute_jobs(here.jobs(here.train()))
    turned = execute_jobs(here.jobs(here.train())[::-1])[::-1]
    for number in range(6):
        for other in (halves, turned):
            assert here.update(other[number]) == pytest.approx(here.update(whole[number]), rel=1e-3, abs=1e-6)


def test_different_starts_and_trainings_do_not_mix(tmp_path):
    here = Federation(MLP, tmp_path)
    starts = [here.model(seed) for seed in range(4)]
    jobs = [
        here.job(k, here.train(starts=(Start(model=starts[k % 4]),), sgd=Sgd(steps=3 + k % 2, batch_size=8)))
        for k in range(6)
    ]
    for job, outcome in zip(jobs, execute_jobs(jobs), strict=True):
        assert here.update(outcome) == pytest.approx(here.update(job.run()), rel=1e-3, abs=1e-5)


def test_epochs_are_passes_over_each_devices_own_samples(tmp_path, alone):
    here = Federation(MLP, tmp_path)
    found = execute_jobs(here.jobs(here.train(sgd=Sgd(epochs=2, batch_size=8))))
    assert alone == ["d6"]
    for number, job in enumerate(here.jobs(here.train())[:6]):
        n = job.worker.data.n_shared
        steps = math.ceil(2 * n / min(8, n))
        own = here.job(number, here.train(sgd=Sgd(steps=steps, batch_size=8))).run()
        assert here.update(found[number]) == pytest.approx(here.update(own), rel=1e-3, abs=1e-5)


def test_the_best_of_several_starts_is_chosen_by_each(tmp_path):
    here = Federation(MLP, tmp_path)
    action = here.train(starts=tuple(Start(model=here.model(seed), cluster=seed) for seed in range(5)))
    jobs = here.jobs(action)
    chosen = [outcome.result.cluster for outcome in execute_jobs(jobs)[:6]]
    assert chosen == [job.run().result.cluster for job in jobs[:6]]
    assert len(set(chosen)) > 1


def test_one_that_diverges_or_has_no_model_harms_no_other(tmp_path):
    here = Federation(MLP, tmp_path)
    good = execute_jobs(here.jobs(here.train()))
    wild = here.train(starts=(Start(model=here.model(2, scale=1e30)),))
    here.blobs["0" * 64] = b"nonsense"
    broken = here.train(starts=(Start(model=BlobRef(digest="0" * 64, size_bytes=8)),))
    jobs = [here.job(k, wild if k == 0 else broken if k == 2 else here.train()) for k in range(6)]
    found = execute_jobs(jobs)
    assert isinstance(found[0].result, Failed)
    assert "malformed" in found[2].result.reason
    for number in (1, 3, 4, 5):
        assert here.update(found[number]) == pytest.approx(here.update(good[number]), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("measure", [True, False])
def test_one_that_diverges_leaves_the_others_side_by_side(tmp_path, alone, measure):
    here = Federation(MLP, tmp_path)
    wild = here.train(starts=(Start(model=here.model(2, scale=1e30)),), measure=measure)
    jobs = [here.job(k, wild if k == 0 else here.train(measure=measure)) for k in range(6)]
    found = execute_jobs(jobs)
    assert alone == []
    assert found[0] == jobs[0].run()
    assert found[0].result.why is Why.NOT_FINITE
    assert all(isinstance(found[k].result, Trained) for k in range(1, 6))


@pytest.mark.parametrize("model", ["moody", "moody_and_random"])
def test_a_network_that_raises_is_a_failure_of_that_device_alone(tmp_path, caplog, model):
    here, fine = Federation(task_of(model), tmp_path), Federation(task_of(model), tmp_path)
    here.workers[0].data.x_train[0] = 5000.0
    outcomes = execute_jobs(here.jobs(here.train()))
    assert outcomes[0].result == Failed(why=Why.ERROR, reason="RuntimeError: out of paper")
    assert "event=work_failed device=d0" in caplog.text
    assert "Traceback" in caplog.text
    assert outcomes[1:] == execute_jobs(fine.jobs(fine.train())[1:])
    assert here.jobs(here.train())[0].run() == outcomes[0]


def test_a_stack_that_raises_is_a_failure_of_one_device_alone(tmp_path, caplog):
    here, fine = Federation(MLP, tmp_path), Federation(MLP, tmp_path)
    here.workers[0].data.y_train[0] = 9  # a worker that is made with it refuses it
    outcomes = execute_jobs(here.jobs(here.train()))
    assert isinstance(outcomes[0].result, Failed)
    for mine, expected in zip(outcomes[1:6], execute_jobs(fine.jobs(fine.train()))[1:6], strict=True):
        assert here.update(mine) == pytest.approx(fine.update(expected), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("batch_size", [16, 1])
def test_batch_normalisation_learns_from_one_sample_with_the_statistics_that_it_has(tmp_path, batch_size):
    here = Federation(task_of("batch_norm"), tmp_path, ((1, 1), (40, 9)))
    layout, first = build.make_initial_model(here.task, 1)
    sgd = Sgd(steps=7, batch_size=batch_size)
    for outcome, still in zip(execute_jobs(here.jobs(here.train(sgd=sgd))), (True, batch_size == 1), strict=True):
        update = codecs.decode(outcome.blobs[outcome.result.update.digest], Codec.FLOAT32, layout)
        assert np.abs(update.params).max() > 0
        assert (update.buffers == first.buffers).all() == still


@pytest.mark.parametrize("model", ["cnn", "dropout", "batch_norm", "branching"])
def test_networks_that_cannot_or_should_not_be_stacked_are_trained_by_their_workers(tmp_path, alone, model):
    sizes = tuple((n, m) for n, m in SIZES if n != 1)
    here = Federation(task_of(model), tmp_path, sizes)
    jobs = here.jobs(here.train())
    assert not can_stack(here.workers[0].network)
    found = execute_jobs(jobs)
    assert sorted(alone) == [job.worker.id for job in jobs]
    with batched.use_one_thread():
        assert found == [job.run() for job in jobs]  # to the last bit, also from threads
    assert execute_jobs(jobs[::-1]) == found[::-1]


def test_other_orders_and_devices_without_torch_are_among_them(tmp_path):
    here = Federation(MLP, tmp_path)
    first, second = here.model(1), here.model(2)
    jobs = [
        here.job(0, here.train()),
        here.job(1, Profile(extractor=first)),
        here.job(4, Trial(global_model=first, expert=second)),
        here.job(5, here.train()),
        here.job(2, here.train(personal=HEAD)),
    ]
    cold = Worker("x", MLP, DeviceData.from_inputs(np.zeros((3, 6), np.float32)), tmp_path, trains=False)
    jobs.append(replace(jobs[0], worker=cold))
    found = execute_jobs(jobs)
    assert [type(outcome.result).__name__ for outcome in found] == [
        "Trained", "Profiled", "Tried", "Trained", "Failed", "Declined",
    ]  # fmt: skip
    assert found[1] == jobs[1].run()
    assert execute_jobs([]) == []


def test_generators_and_threads_of_the_process_are_left_as_they_were(tmp_path):
    here = Federation(task_of("dropout"), tmp_path)
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    execute_jobs(here.jobs(here.train()))
    execute_jobs(Federation(CNN, tmp_path).jobs(Federation(CNN, tmp_path).train())[:0])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_workers_share_one_network(tmp_path):
    here = Federation(MLP, tmp_path)
    assert len({id(worker.network) for worker in here.workers}) == 1
