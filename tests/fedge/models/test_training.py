from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedge import models
from fedge.messages import Sgd
from fedge.models.training import Network, StoppedError, Trainer, batches, loss_and_gradient_norm, mean_loss, tensor
from fedge.task import TaskSpec

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(5,), model="mlp", model_options={"hidden": 7})
LAYOUT, START = models.initial(TASK, 3)
X = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
Y = np.arange(50) % 3


def network():
    net = Network(TASK)
    net.load(START)
    return net


def test_every_pass_sees_every_sample_once_and_all_batches_have_one_size():
    drawn = list(islice(batches(10, 4, np.random.default_rng(0)), 10))
    assert all(len(batch) == 4 for batch in drawn)
    passes = np.concatenate(drawn).reshape(4, 10)
    assert all(sorted(row) == list(range(10)) for row in passes)
    assert len({tuple(row) for row in passes}) > 1
    assert len(next(batches(3, 32, np.random.default_rng(0)))) == 3


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_steps_are_those_of_torch_sgd(mu):
    net = network()
    sgd = Sgd(batch_size=8, proximal_mu=mu)
    Trainer(net, X, Y, sgd, np.random.default_rng(1)).run(25)
    module = models.build(TASK)
    models.load(module, START, LAYOUT)
    start = [p.detach().clone() for p in module.parameters()]
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for batch in islice(batches(50, 8, np.random.default_rng(1)), 25):
        loss = functional.cross_entropy(module(tensor(X[batch])), tensor(Y[batch]))
        distance = sum((p - q).square().sum() for p, q in zip(module.parameters(), start, strict=True))
        optimiser.zero_grad()
        (loss + mu / 2 * distance).backward()
        optimiser.step()
    assert net.dump().params == pytest.approx(models.dump(module, LAYOUT).params, abs=1e-5)


def test_the_worked_proximal_step():
    net = network()
    net.weights[:3] = torch.tensor([1.0, 2, -1])
    trainer = Trainer(net, X, Y, Sgd(learning_rate=0.1, momentum=0.0, proximal_mu=0.5), np.random.default_rng(0))
    trainer._anchor[:3] = torch.tensor([0.0, 2, 1])
    net.gradient.zero_()
    net.gradient[:3] = torch.tensor([0.5, -0.5, 0])
    trainer._step()
    assert net.weights[:3].tolist() == pytest.approx([0.9, 2.05, -0.9])


def test_a_run_goes_on_where_the_last_one_ended_and_a_new_one_begins_afresh():
    whole, parts, afresh = network(), network(), network()
    Trainer(whole, X, Y, Sgd(), np.random.default_rng(2)).run(20)
    trainer = Trainer(parts, X, Y, Sgd(), np.random.default_rng(2))
    trainer.run(5)
    trainer.run(15)
    rng = np.random.default_rng(2)
    Trainer(afresh, X, Y, Sgd(), rng).run(5)
    Trainer(afresh, X, Y, Sgd(), rng).run(15)
    assert (whole.dump().params == parts.dump().params).all()
    assert (whole.dump().params != afresh.dump().params).any()


def test_loss_and_gradient_are_those_of_the_mean_whatever_the_chunks(monkeypatch):
    net = network()
    loss, norm = loss_and_gradient_norm(net, X, Y)
    module = models.build(TASK)
    models.load(module, START, LAYOUT)
    expected = functional.cross_entropy(module(tensor(X)), tensor(Y))
    expected.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(float(gradient.norm()), rel=1e-4)
    monkeypatch.setattr("fedge.models.training.CHUNK", 7)
    assert loss_and_gradient_norm(net, X, Y) == pytest.approx((loss, norm), rel=1e-5)
    assert mean_loss(net, X, Y) == pytest.approx(loss, rel=1e-5)


def test_logits_are_the_models_and_leave_read_only_data_alone():
    x = X.copy()
    x.flags.writeable = False
    module = models.build(TASK)
    models.load(module, START, LAYOUT)
    assert Network(TASK).logits(START, x) == pytest.approx(module(tensor(X)).detach().numpy(), abs=1e-6)


def test_stop_is_asked_before_every_step():
    net = network()
    answers = iter([False, False, True])
    with pytest.raises(StoppedError):
        Trainer(net, X, Y, Sgd(), np.random.default_rng(0)).run(10, lambda: next(answers))
    assert next(answers, None) is None
