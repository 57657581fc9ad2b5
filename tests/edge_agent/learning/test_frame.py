"""A step of one's own in the frame: further uploads, something kept, a loss and an optimiser of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from edge_agent.device.device import Device
from edge_agent.device.encoding import send_update
from edge_agent.device.worker import Worker
from edge_agent.learning.frame import Learn, Learned, Recipe, fit, train_alone, train_together
from edge_agent.steps.training import train
from fedge.data.augmentation import with_augment
from fedge.data.task import TaskSpec
from fedge.models.optimizer import Momentum
from fedge.models.training import Network
from fedge.steps.contract import Failed, Result, Reveals
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.layers import Layers, cut
from fedge.tensors.layout import HEAD, Codec, Layout, Model, Selector, from_bytes
from fedge.wire.messages import BlobRef, Why
from tests.support.orders import INITIAL, LAYOUT, Blobs, device_data, order, worker

SGD = Sgd(steps=6, batch_size=8, momentum=0.0)
ALL = device_data(30, sensitive=0.0)
HALF = "tests.half_of_a_step"


class TrainedBoth(Trained, frozen=True, kw_only=True):
    """Two updates."""

    REVEALS: ClassVar = {**Trained.REVEALS, "control": Reveals.UPDATE}
    control: BlobRef


class TrainBoth(Train, frozen=True, kw_only=True):
    """As SCAFFOLD does: a control variate is kept, and its change is sent, too."""

    STEP: ClassVar = "train_both"
    RESULT: ClassVar = TrainedBoth
    DEVICE: ClassVar = HALF

    control: BlobRef

    def uploads(self, result: Trained, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Both."""
        assert isinstance(result, TrainedBoth)
        return {**super().uploads(result, layout), result.control: layout}

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """The device's control variate."""
        return layout


class TrainPlain(Train, frozen=True, kw_only=True):
    """Nothing is kept."""

    STEP: ClassVar = "train_plain"
    DEVICE: ClassVar = HALF


class Corrected(Momentum):
    """The gradient is corrected in each step."""

    def __init__(self, sgd: Sgd, correction: Tensor) -> None:
        super().__init__(sgd)
        self._correction = correction

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(self._correction)
        super().step(weights, gradient)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the device half, to be filled by the test."""
    module = ModuleType(HALF)
    monkeypatch.setitem(sys.modules, HALF, module)
    return module


def scaffold(device: Device, action: TrainBoth, start: Model, mine: Layers | None) -> Learned:
    c = device.fetch_model(action.control)
    own = np.zeros_like(c.params) if mine is None else mine.model.params
    device.network.load(start)
    correction = torch.from_numpy(c.params - own)
    fit(device.network, [device], Recipe(action.sgd, optimizer=lambda _: Corrected(action.sgd, correction)))
    trained = device.network.dump()
    steps = action.sgd.count_steps(device.data.n_shared)
    now = own - c.params + (start.params - trained.params) / np.float32(steps * action.sgd.learning_rate)
    change = Model(now - own, trained.buffers, trained.counters)
    sent = send_update(device, change, device.layout, action.codec)
    return Learned(trained, Model(now, trained.buffers, trained.counters), report={"control": sent})


def test_a_step_keeps_and_sends_more_and_moves_by_an_optimiser_of_its_own(tmp_path: Path, half: Any) -> None:
    """Two rounds of SCAFFOLD, against a plain loop (Karimireddy et al., Algorithm 1, option II)."""
    half.run = lambda device, action: train_alone(device, action, lambda w, mine: scaffold(device, action, w, mine))
    half.overlay = lambda model, _kept, _layout: model
    blobs, own = Blobs(), worker(tmp_path, ALL)
    control = Model(np.full_like(INITIAL.params, 0.01), INITIAL.buffers, INITIAL.counters)
    c_i = np.zeros_like(INITIAL.params)
    for number in (1, 2):
        action = TrainBoth(
            starts=(Start(model=blobs.model(number)),),
            sgd=SGD,
            codec=Codec.FLOAT32,
            control=blobs.put(Layers(LAYOUT, control).get_tensors()),
        )
        finished = own.execute(order(action, number), blobs, action=action)
        assert isinstance(finished.result, TrainedBoth), finished.result
        w = blobs.model(number)
        start = codecs.decode(blobs(w), Codec.FLOAT32, LAYOUT)
        y = by_hand(start, control.params - c_i, seed=100 + number)
        after = c_i - control.params + (start.params - y) / np.float32(SGD.steps * SGD.learning_rate)
        assert finished.result.update in action.uploads(finished.result, LAYOUT)
        update, change = (
            codecs.decode(finished.blobs[ref.digest], Codec.FLOAT32, LAYOUT).params
            for ref in (finished.result.update, finished.result.control)
        )
        np.testing.assert_allclose(update, y - start.params, atol=1e-6)
        np.testing.assert_allclose(change, after - c_i, atol=1e-4)
        c_i = after


def by_hand(start: Model, correction: np.ndarray, seed: int) -> np.ndarray:
    """y after the local steps y <- y - eta (g(y) + c - c_i)."""
    network = Network(worker(Path("unused"), ALL).task)
    network.load(start)
    x, y = ALL.shared
    rng = np.random.default_rng(seed)
    waiting = np.zeros(0, np.int64)
    for _ in range(SGD.steps):
        if len(waiting) < SGD.batch_size:
            waiting = np.concatenate([waiting, rng.permutation(len(y))])
        batch, waiting = waiting[: SGD.batch_size], waiting[SGD.batch_size :]
        network.gradient.zero_()
        functional.cross_entropy(network.module(torch.from_numpy(x[batch])), torch.from_numpy(y[batch])).backward()
        network.weights -= SGD.learning_rate * (network.gradient + torch.from_numpy(correction))
    return network.dump().params


def run_with(half: Any, learn: Learn, home: Path) -> Result:
    """The result of a step that keeps nothing by its contract."""
    half.run = lambda device, action: train_alone(device, action, learn)
    blobs = Blobs()
    action = TrainPlain(starts=(Start(model=blobs.model(1)),), sgd=SGD)
    return worker(home, ALL).execute(order(action), blobs, action=action).result


def test_a_step_need_not_keep_anything(tmp_path: Path, half: Any) -> None:
    assert isinstance(run_with(half, lambda start, _: Learned(start), tmp_path), Trained)
    assert not (tmp_path / "kept").exists()


def test_what_the_contract_does_not_name_cannot_be_kept(tmp_path: Path, half: Any) -> None:
    result = run_with(half, lambda start, _: Learned(start, kept=cut(start, LAYOUT, LAYOUT.select(HEAD))), tmp_path)
    assert isinstance(result, Failed)
    assert (result.why, "step train_plain keeps tensors" in result.reason) == (Why.UNFIT, True)


def test_devices_side_by_side_follow_the_recipe_that_each_follows_alone(tmp_path: Path) -> None:
    correction = torch.linspace(-0.1, 0.1, LAYOUT.n_params)

    def recipe_of(action: Train) -> Recipe:
        return Recipe(action.sgd, optimizer=lambda _: Corrected(action.sgd, correction))

    def learn(device: Device, start: Model, _: Layers | None) -> Learned:
        device.network.load(start)
        fit(device.network, [device], recipe_of(action))
        return Learned(device.network.dump())

    blobs = Blobs()
    action = TrainPlain(starts=(Start(model=blobs.model(1)),), sgd=SGD, codec=Codec.FLOAT32)

    def devices() -> list[Device]:
        sizes = (30, 41)
        return [worker(tmp_path / str(n), device_data(n)).make_device(order(action, n), blobs) for n in sizes]

    alone, together = devices(), devices()
    for device in alone:
        train_alone(device, action, partial(learn, device))
    results = train_together(together, [action, action], recipe_of)
    assert all(isinstance(result, Trained) for result in results)
    for one, other in zip(alone, together, strict=True):
        (a,), (b,) = one.blobs.values(), other.blobs.values()
        for name, tensor in from_bytes(a).items():
            np.testing.assert_allclose(from_bytes(b)[name], tensor, atol=1e-6)


def test_changed_samples_are_the_same_alone_and_side_by_side(tmp_path: Path) -> None:
    plain = TaskSpec(name="i", classes=("a", "b", "c"), input_shape=(1, 2, 3), model="mlp", model_options={"hidden": 8})
    blobs = Blobs(plain)
    action = Train(starts=(Start(model=blobs.model(1)),), sgd=SGD, codec=Codec.FLOAT32)

    def make_devices(folder: str, task: TaskSpec) -> list[Device]:
        found = []
        for k, n in enumerate((30, 5, 11)):  # the second one has batches of 5
            x, y = np.random.default_rng(k).normal(size=(n, 1, 2, 3)).astype(np.float32), np.arange(n) % 3
            data = DeviceData(x, y, np.zeros(n, np.bool_), x[:4], y[:4])
            own = Worker(f"d{k}", task, data, tmp_path / folder / str(k))
            found.append(own.make_device(order(action, seed=k, task=task), blobs))
        return found

    task = with_augment(plain, "noise,flip")
    alone, together, again, otherwise = (
        make_devices(*each) for each in (("a", task), ("b", task), ("c", task), ("d", plain))
    )
    for device in (*alone, *again, *otherwise):
        train.run(device, action)
    results = train.many(together, [action] * 3)
    assert all(isinstance(result, Trained) for result in results)
    for one, other in zip(alone, together, strict=True):
        (a,), (b,) = one.blobs.values(), other.blobs.values()
        for name, tensor in from_bytes(a).items():
            np.testing.assert_allclose(from_bytes(b)[name], tensor, atol=1e-6)
    assert [device.blobs for device in alone] == [device.blobs for device in again]
    assert all(one.blobs.keys() != other.blobs.keys() for one, other in zip(alone, otherwise, strict=True))


def test_a_head_that_learns_first_has_a_phase_of_its_own() -> None:
    assert Recipe(Sgd(steps=5)).list_phases(10) == (("all", 5),)
    assert Recipe(Sgd(epochs=2, batch_size=4), head_steps=3).list_phases(10) == (("head", 3), ("base", 5))
