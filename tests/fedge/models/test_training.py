from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.models import build
from fedge.models import network as models
from fedge.models.training import (
    CHUNK,
    PADDING,
    Network,
    Stack,
    Trainer,
    can_stack,
    compute_loss_and_gradient_norm,
    compute_losses_and_gradient_norms,
    compute_mean_loss,
    compute_mean_losses,
    compute_scores,
    count_flops,
    draw_batches,
    draw_stacked_batches,
    get_shared_network,
    get_torch_device,
    is_small,
    join_samples,
    pad_samples,
    seed_torch,
    to_tensor,
    uses_randomness,
)
from fedge.steps.sgd import Sgd
from fedge.system.hardware import Processor
from fedge.system.stopping import StoppedError
from fedge.tensors.layout import HEAD, Model, unflatten

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(5,), model="mlp", model_options={"hidden": 7})
LAYOUT, START = build.make_initial_model(TASK, 3)
X = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
Y = np.arange(50) % 3


def network():
    net = Network(TASK)
    net.load(START)
    return net


def test_every_pass_sees_every_sample_once_and_all_batches_have_one_size():
    drawn = list(islice(draw_batches(10, 4, np.random.default_rng(0)), 10))
    assert all(len(batch) == 4 for batch in drawn)
    passes = np.concatenate(drawn).reshape(4, 10)
    assert all(sorted(row) == list(range(10)) for row in passes)
    assert len({tuple(row) for row in passes}) > 1
    assert len(next(draw_batches(3, 32, np.random.default_rng(0)))) == 3


@pytest.mark.parametrize(("mu", "decay"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.05), (0.5, 0.05)])
def test_steps_are_those_of_torch_sgd(mu, decay):
    net = network()
    sgd = Sgd(batch_size=8, proximal_mu=mu, weight_decay=decay)
    Trainer(net, X, Y, sgd, np.random.default_rng(1)).run(25)
    module = build.make_network(TASK)
    models.load_model(module, START, LAYOUT)
    start = [p.detach().clone() for p in module.parameters()]
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    for batch in islice(draw_batches(50, 8, np.random.default_rng(1)), 25):
        loss = functional.cross_entropy(module(to_tensor(X[batch])), to_tensor(Y[batch]))
        distance = sum((p - q).square().sum() for p, q in zip(module.parameters(), start, strict=True))
        optimiser.zero_grad()
        (loss + mu / 2 * distance).backward()
        optimiser.step()
    assert net.dump().params == pytest.approx(models.dump_model(module, LAYOUT).params, abs=1e-5)


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


def test_loss_and_gradient_are_those_of_the_mean_whatever_the_chunks():
    n = 2 * CHUNK + 7
    x, y = np.random.default_rng(1).normal(size=(n, 5)).astype(np.float32), np.arange(n) % 3
    net = network()
    loss, norm = compute_loss_and_gradient_norm(net, x, y)
    module = build.make_network(TASK)
    models.load_model(module, START, LAYOUT)
    expected = functional.cross_entropy(module(to_tensor(x)), to_tensor(y))
    expected.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(float(gradient.norm()), rel=1e-4)
    assert compute_mean_loss(net, x, y) == pytest.approx(loss, rel=1e-5)


def test_logits_are_the_models_and_leave_read_only_data_alone():
    x = X.copy()
    x.flags.writeable = False
    module = build.make_network(TASK)
    models.load_model(module, START, LAYOUT)
    assert Network(TASK).compute_logits(START, x) == pytest.approx(module(to_tensor(X)).detach().numpy(), abs=1e-6)


def test_features_are_what_the_head_sees():
    net = network()
    tensors = unflatten(START, LAYOUT)
    weight, bias = (tensors[info.name] for info in LAYOUT.select(HEAD).tensors)
    features = net.compute_features(START, X)
    np.testing.assert_allclose(features @ weight.T + bias, net.compute_logits(START, X), atol=1e-5)
    assert features.shape == (50, weight.shape[1])
    many = CHUNK // len(X) + 1
    np.testing.assert_allclose(
        net.compute_features(START, np.tile(X, (many, 1))), np.tile(features, (many, 1)), atol=1e-6
    )


def test_the_present_weights_are_those_of_a_dump_without_a_copy():
    task = msgspec.structs.replace(TASK, model="tests.support.networks:normed", model_options={})
    net = Network(task)
    _, start = build.make_initial_model(task, 3)
    net.load(start)
    Trainer(net, X, Y, Sgd(), np.random.default_rng(0)).run(3)
    trained, present = net.dump(), net.present()
    expected = models.dump_model(net.module, net.layout)
    for found in (trained, present):
        for name in ("params", "buffers", "counters"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
            assert getattr(found, name).dtype == getattr(expected, name).dtype
    assert trained.counters.tolist() == [3]
    net.load(start)
    np.testing.assert_array_equal(present.params, start.params)
    np.testing.assert_array_equal(trained.params, expected.params)


def test_weights_that_are_not_finite_are_not_dumped():
    net = network()
    net.load(Model(np.full_like(START.params, np.inf), START.buffers, START.counters))
    assert np.isinf(net.present().params).all()
    with pytest.raises(ProtocolError, match="not-finite"):
        net.dump()


def test_stop_is_asked_before_every_step():
    net = network()
    answers = iter([False, False, True])
    with pytest.raises(StoppedError):
        Trainer(net, X, Y, Sgd(), np.random.default_rng(0)).run(10, lambda: next(answers))
    assert next(answers, None) is None


# ------------------------------------------------------------------------------------------------------ side by side

SIZES = (50, 3, 17, 20)


def stacked():
    ragged = [(X[:n], Y[:n]) for n in SIZES]
    starts = [build.make_initial_model(TASK, seed)[1] for seed in range(4)]
    return ragged, starts, Stack(network(), starts)


@pytest.mark.parametrize(("mu", "decay"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.05)])
def test_a_stack_takes_the_steps_of_its_models(mu, decay):
    sgd = Sgd(batch_size=16, proximal_mu=mu, weight_decay=decay)
    _, starts, stack = stacked()
    sizes = (50, 3, 20, 1)
    drawn = draw_stacked_batches(sizes, 16, [np.random.default_rng(k) for k in range(4)])
    Trainer(stack, *join_samples([(X[:n], Y[:n]) for n in sizes]), sgd, drawn).run(12)
    for k, (n, start, own) in enumerate(zip(sizes, starts, stack.present(), strict=True)):
        net = network()
        net.load(start)
        Trainer(net, X[:n], Y[:n], sgd, np.random.default_rng(k)).run(12)
        assert own.params == pytest.approx(net.dump().params, abs=2e-6)
        assert len(own.buffers) == len(own.counters) == 0


def test_batches_side_by_side_are_those_of_each_client_filled_up_with_the_sample_that_counts_not():
    drawn = draw_stacked_batches((5, 2), 3, [np.random.default_rng(k) for k in range(2)])
    alone = [draw_batches(n, 3, np.random.default_rng(k)) for k, n in enumerate((5, 2))]
    for _ in range(4):
        first, second = next(drawn)
        assert first.tolist() == next(alone[0]).tolist()
        assert second.tolist() == [*(next(alone[1]) + 5), 7]
    x, y = join_samples([(X[:5], Y[:5]), (X[:2], Y[:2])])
    assert (y[7], len(x), len(y)) == (PADDING, 8, 8)
    np.testing.assert_array_equal(x[5:7], X[:2])
    assert next(draw_stacked_batches((2, 1), 8, [np.random.default_rng(0)] * 2)).shape == (2, 2)


def test_looks_at_ragged_samples_are_those_of_each_model():
    ragged, starts, stack = stacked()
    losses, norms = compute_losses_and_gradient_norms(stack, *pad_samples(ragged))
    means, right = compute_mean_losses(stack, *pad_samples(ragged)), compute_scores(stack, *pad_samples(ragged))
    for k, ((x, y), start) in enumerate(zip(ragged, starts, strict=True)):
        net = network()
        net.load(start)
        assert (losses[k], norms[k]) == pytest.approx(compute_loss_and_gradient_norm(net, x, y), rel=1e-4)
        assert means[k] == pytest.approx(losses[k])
        assert right[k] == (net.compute_logits(start, x).argmax(axis=1) == y).mean()


def test_a_model_without_samples_has_no_accuracy():
    _, _, stack = stacked()
    some = pad_samples([(X[:0], Y[:0]), (X[:4], Y[:4]), (X[:0], Y[:0]), (X[:1], Y[:1])])
    assert [score is None for score in compute_scores(stack, *some)] == [True, False, True, False]
    assert compute_scores(stack, *pad_samples([(X[:0], Y[:0])] * 4)) == [None] * 4


def test_parts_are_not_trained_side_by_side():
    _, _, stack = stacked()
    with pytest.raises(ValueError, match="can train only all weights"):
        Trainer(stack, X, Y, Sgd(), draw_stacked_batches((50,), 8, [np.random.default_rng(0)]), moves="head")


def test_only_small_linear_networks_are_stacked():
    assert can_stack(network())
    assert is_small(network())
    large = Network(msgspec.structs.replace(TASK, model_options={"hidden": 2**13}))
    convolutions = Network(msgspec.structs.replace(TASK, model="cnn", input_shape=(1, 8, 8), model_options={}))
    for net in (large, convolutions):
        assert not is_small(net)
        assert not can_stack(net)
        assert not uses_randomness(net)


def test_one_network_for_each_task_and_thread():
    first = get_shared_network(TASK, TASK.compute_fingerprint())
    assert get_shared_network(TASK, TASK.compute_fingerprint()) is first
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(get_shared_network, TASK, TASK.compute_fingerprint()).result() is not first
    for number in range(5):
        other = msgspec.structs.replace(TASK, model_options={"hidden": 8 + number})
        get_shared_network(other, other.compute_fingerprint())
    assert get_shared_network(TASK, TASK.compute_fingerprint()) is not first  # few are kept


def test_operations_of_a_forward_pass():
    assert count_flops(network()) == 2 * (5 * 7 + 7 * 3)


def test_networks_are_on_the_cpu_unless_asked_for_elsewhere() -> None:
    assert Network(TASK).processor == get_torch_device(Processor.CPU) == torch.device("cpu")
    assert get_shared_network(TASK, TASK.compute_fingerprint()) is get_shared_network(
        TASK, TASK.compute_fingerprint(), get_torch_device(Processor.CPU)
    )


def test_a_seed_holds_inside_and_disturbs_nobody() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with seed_torch(7):
        one = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with seed_torch(7):
        assert torch.equal(torch.rand(3), one)
    with seed_torch(8):
        assert not torch.equal(torch.rand(3), one)
