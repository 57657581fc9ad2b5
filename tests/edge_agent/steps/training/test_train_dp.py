"""An order to train with noise: what it tells, what it costs, when it is declined, where its randomness comes from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_agent.device.device import Budget
from edge_agent.device.worker import Worker
from edge_agent.privacy.dp_ledger import Ledger
from fedge.data.task import TaskSpec
from fedge.privacy.egress import PRIVACY_LEDGER
from fedge.steps.contract import Declined, Failed
from fedge.steps.descriptions.profile import Profile
from fedge.steps.mixture.install import Install, Installed
from fedge.steps.noise import Privacy
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.steps.training.train_dp import TrainDp, TrainedDp
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.layout import BASE, HEAD, Codec, Selector
from fedge.wire.messages import Why
from tests.support.orders import LAYOUT, TASK, Blobs, device_data, order

PRIVACY = Privacy(clip_norm=1.0, delta=1e-5, participations=4, epsilon=8.0)
NO_NOISE = Privacy(clip_norm=100, delta=1e-5, participations=4, noise_multiplier=1e-8)
ROOT = Path(__file__).parents[4]


def train(blobs: Blobs, privacy: Privacy = PRIVACY, personal: Selector = (), **changes: Any) -> TrainDp:
    return TrainDp(
        starts=(Start(model=blobs.model(1, personal)),),
        sgd=changes.pop("sgd", Sgd(steps=5, batch_size=8)),
        codec=Codec.FLOAT32,
        personal=personal,
        initial=blobs.model(0) if personal else None,
        privacy=privacy,
        **changes,
    )


def worker(
    home: Path, data: DeviceData | None = None, task: TaskSpec = TASK, seed: int | None = 0, **budget: Any
) -> Worker:
    source = {} if seed is None else {"source": lambda _: np.random.default_rng(seed).bytes}
    return Worker("d", task, data or device_data(), home, budget=Budget(**budget), **source)


def update(finished: Any, personal: Selector = ()) -> np.ndarray:
    assert isinstance(finished.result, TrainedDp), finished.result
    return codecs.decode(finished.blobs[finished.result.update.digest], Codec.FLOAT32, LAYOUT.without(personal)).params


def test_it_tells_the_update_and_nothing_else_and_pays_first(tmp_path: Path) -> None:
    blobs = Blobs()
    finished = worker(tmp_path).execute(order(train(blobs)), blobs)
    result = finished.result
    assert result == TrainedDp(update=result.update, n_samples=30)
    (charge,) = Ledger(tmp_path).charges
    assert (charge.order, charge.run, charge.steps) == ("r.1.step.d", "r", 5)
    assert charge.mechanism.sample_rate == 8 / 30
    assert 0 < Ledger(tmp_path).compute_spent(1e-5) < 8


@pytest.mark.parametrize(
    "news", [{}, {"nesterov": True}, {"optimizer": "adam", "learning_rate": 0.01, "label_smoothing": 0.1}]
)
def test_without_noise_in_whole_batches_it_is_the_training_of_the_others(tmp_path: Path, news: dict[str, Any]) -> None:
    given: dict[str, Any] = {"steps": 4, "batch_size": 64, "proximal_mu": 0.1, "weight_decay": 0.01}
    blobs, sgd = Blobs(), Sgd(**given | news)
    found = update(worker(tmp_path / "a").execute(order(train(blobs, NO_NOISE, sgd=sgd)), blobs))
    plain = Train(starts=(Start(model=blobs.model(1)),), sgd=sgd, codec=Codec.FLOAT32, measure=False)
    finished = worker(tmp_path / "b").execute(order(plain), blobs)
    wanted = codecs.decode(finished.blobs[finished.result.update.digest], Codec.FLOAT32, LAYOUT).params
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def test_counts_of_labels_have_no_noise_so_class_weights_are_refused(tmp_path: Path) -> None:
    blobs = Blobs()
    found = worker(tmp_path).execute(order(train(blobs, sgd=Sgd(steps=1, class_weights="balanced"))), blobs).result
    assert isinstance(found, Failed)
    assert "no noise hides these counts" in found.reason
    assert not Ledger(tmp_path).compute_spent(1e-5)


def test_validation_and_sensitive_samples_shape_nothing(tmp_path: Path) -> None:
    blobs, data = Blobs(), device_data()
    marks = data.sensitive
    other = DeviceData(np.where(marks[:, None], 9, data.x_train), data.y_train, marks, data.x_val[:2], data.y_val[:2])
    first, second = (
        worker(tmp_path / name, own).execute(order(train(blobs)), blobs) for name, own in (("a", data), ("b", other))
    )
    np.testing.assert_array_equal(update(first), update(second))
    assert first.result == second.result


def test_its_randomness_is_the_systems_and_not_the_orders(tmp_path: Path) -> None:
    blobs = Blobs()
    asked = order(train(blobs))
    first, second = (update(worker(tmp_path / name, seed=None).execute(asked, blobs)) for name in "ab")
    assert not np.array_equal(first, second), "the same order, twice"
    again, other = (
        update(worker(tmp_path / name).execute(order(train(blobs), seed=s), blobs)) for name, s in (("c", 1), ("d", 2))
    )
    np.testing.assert_array_equal(again, other)


def test_an_order_that_is_done_again_is_charged_again(tmp_path: Path) -> None:
    blobs, own = Blobs(), worker(tmp_path)
    for n in (1, 2):
        assert isinstance(own.execute(order(train(blobs)), blobs).result, TrainedDp)
        assert len(Ledger(tmp_path).charges) == n


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.edge_agent.steps.training.test_train_dp import Blobs, order, train, worker
blobs = Blobs()
worker(Path(sys.argv[1]), seed=None).execute(order(train(blobs)), blobs)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_kill_9_between_training_and_report_is_paid_for(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert len(Ledger(tmp_path).charges) == 1
    before, blobs = Ledger(tmp_path).compute_spent(1e-5), Blobs()
    assert isinstance(worker(tmp_path).execute(order(train(blobs)), blobs).result, TrainedDp)
    assert len(Ledger(tmp_path).charges) == 2
    assert Ledger(tmp_path).compute_spent(1e-5) > before


def test_it_stops_at_what_the_run_promised_also_where_kills_have_cost_some(tmp_path: Path) -> None:
    blobs, own = Blobs(), worker(tmp_path)
    results = [own.execute(order(train(blobs), number), blobs).result for number in (1, 1, 2, 3, 4)]
    assert [isinstance(result, TrainedDp) for result in results] == [True] * 4 + [False]
    assert results[4].why is Why.BUDGET
    assert "promised at most 8" in results[4].reason
    assert isinstance(own.execute(order(train(blobs), run="another"), blobs).result, TrainedDp)
    assert Ledger(tmp_path).compute_spent(1e-5, run="r") <= 8 * (1 + 1e-9)


@pytest.mark.parametrize("how", [{"epsilon": 8.0}, {"noise_multiplier": 1.0}])
def test_a_run_whose_delta_promises_nothing_to_so_many_samples_is_declined(
    tmp_path: Path, how: dict[str, float]
) -> None:
    privacy = Privacy(clip_norm=1.0, delta=1 / 30, participations=4, **how)
    declined = worker(tmp_path).execute(order(train(blobs := Blobs(), privacy)), blobs).result
    assert (declined.why, Ledger(tmp_path).charges) == (Why.BUDGET, [])
    assert declined.reason.startswith(
        "the run's delta 0.0333333 promises nothing to 30 samples: it must be well below 1"
    )
    enough = msgspec.structs.replace(privacy, delta=0.9 / 30)
    assert isinstance(worker(tmp_path).execute(order(train(blobs, enough)), blobs).result, TrainedDp)


def test_it_stops_at_the_owners_budget_whatever_runs_promise(tmp_path: Path) -> None:
    blobs, own = Blobs(), worker(tmp_path, max_epsilon=10.0)
    results = [own.execute(order(train(blobs), run=f"r{n}"), blobs).result for n in range(20)]
    spent = next(n for n, result in enumerate(results) if isinstance(result, Declined))
    assert 1 < spent < 20
    assert all(result == results[spent] for result in results[spent:])
    assert results[spent].why is Why.BUDGET
    assert "the budget of this device is 10" in results[spent].reason
    assert Ledger(tmp_path).compute_spent(1e-5) <= 10


def test_with_a_budget_nothing_is_told_without_noise(tmp_path: Path) -> None:
    blobs, own = Blobs(), worker(tmp_path, max_epsilon=100.0)
    plain = Train(starts=(Start(model=blobs.model(1)),), sgd=Sgd(), codec=Codec.FLOAT32)
    for action, field in ((plain, "update"), (Profile(extractor=blobs.model(1)), "profile")):
        declined = own.execute(order(action), blobs).result
        assert declined.why is Why.BUDGET
        assert f"tells {field}" in declined.reason
    assert isinstance(own.execute(order(Install(model=blobs.model(1), method="m")), blobs).result, Installed)


@pytest.mark.parametrize(("personal", "head_steps"), [(HEAD, 0), (HEAD, 3), (BASE, 0)])
def test_what_stays_learns_with_noise_too_and_is_gone_on_with(
    tmp_path: Path, personal: Selector, head_steps: int
) -> None:
    blobs, own = Blobs(), worker(tmp_path)
    action = train(blobs, personal=personal, head_steps=head_steps)
    sent = update(own.execute(order(action), blobs), personal)
    assert len(sent) == LAYOUT.without(personal).n_params
    assert Ledger(tmp_path).charges[0].steps == 5 + head_steps
    assert isinstance(own.execute(order(action, 2), blobs).result, TrainedDp)
    served = Install(
        model=blobs.model(1, personal), personal=personal, kept_by=TrainDp.STEP, initial=blobs.model(0), method="m"
    )
    assert isinstance(own.execute(order(served, 3), blobs).result, Installed)
    plain = Train(starts=action.starts, sgd=Sgd(), codec=Codec.FLOAT32, personal=personal, initial=action.initial)
    assert isinstance(own.execute(order(plain, 4), blobs).result, Failed), "without noise it is not gone on with"


def test_a_network_with_batch_normalisation_is_refused(tmp_path: Path) -> None:
    task = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(6,), model="tests.support.networks:normed")
    blobs = Blobs(task)
    failed = worker(tmp_path, task=task).execute(order(train(blobs), task=task), blobs).result
    assert isinstance(failed, Failed)
    assert "batch normalisation" in failed.reason
    assert not (tmp_path / PRIVACY_LEDGER).exists()


def test_without_samples_it_declines(tmp_path: Path) -> None:
    blobs, all_marked = Blobs(), device_data(sensitive=1.0)
    assert worker(tmp_path, all_marked).execute(order(train(blobs)), blobs).result == Declined(why=Why.NO_DATA)


def test_with_a_damaged_ledger_no_budget_is_spent(tmp_path: Path) -> None:
    (tmp_path / PRIVACY_LEDGER).write_text("{")
    blobs = Blobs()
    finished = worker(tmp_path).execute(order(train(blobs)), blobs)
    assert isinstance(finished.result, Failed)
    assert "not known any more" in finished.result.reason
    assert not finished.blobs
    assert (tmp_path / PRIVACY_LEDGER).read_text() == "{"


def test_training_that_diverges_is_paid_for(tmp_path: Path) -> None:
    blobs = Blobs()
    action = train(blobs, sgd=Sgd(steps=50, batch_size=8, learning_rate=100, weight_decay=1.0))
    failed = worker(tmp_path).execute(order(action), blobs).result
    assert isinstance(failed, Failed)
    assert failed.why is Why.NOT_FINITE
    assert len(Ledger(tmp_path).charges) == 1


def test_it_needs_opacus_and_says_so(tmp_path: Path, not_installed: Callable[..., None]) -> None:
    not_installed("opacus")
    blobs = Blobs()
    fixed = msgspec.structs.replace(PRIVACY, epsilon=None, noise_multiplier=1.0)
    failed = worker(tmp_path, max_epsilon=3.0).execute(order(train(blobs, fixed)), blobs).result
    assert isinstance(failed, Failed)
    assert "pip install 'fedge[privacy]'" in failed.reason
