from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from deploy import load
from edge_agent.device.worker import Worker
from edge_agent.learning.frame import assemble_model
from edge_agent.steps.personal.train_cp import BANDWIDTHS, compute_mmd, train_model
from fedge.models import build
from fedge.models.layers.policy import PolicyHead
from fedge.models.network import find_layer
from fedge.models.training import Network, draw_batches, seed_torch
from fedge.steps.mixture.install import Install, Installed
from fedge.steps.personal.train_cp import TrainCp
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Trained
from fedge.tensors.layout import Codec, from_bytes
from tests.support.orders import LAYOUT, TASK, Blobs, device_data, manifest_of, order

OWN = ("*.own.head.*", "*.own.vector")
WIDE = TASK.with_head_class("policy")
WIDE_LAYOUT, WIDE_INITIAL = build.make_initial_model(WIDE, 0)
SGD = Sgd(steps=3, batch_size=8, learning_rate=0.1, momentum=0.0)


def action(blobs: Blobs, mmd: float = 0.5, sgd: Sgd = SGD) -> TrainCp:
    start = Start(model=blobs.model(0, OWN))
    return TrainCp(starts=(start,), sgd=sgd, personal=OWN, initial=blobs.model(0), codec=Codec.FLOAT32, mmd=mmd)


def test_the_distance_of_features_is_that_of_the_authors_kernels() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 4, generator=rng) for _ in range(2))

    def kernel(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(float(torch.exp(-0.5 * (a - b).square().sum() / width)) for width in BANDWIDTHS)

    expected = np.mean([[kernel(a, b) + kernel(c, d) - 2 * kernel(a, d) for b, d in zip(x, y, strict=True)]
                        for a, c in zip(x, y, strict=True)])  # fmt: skip
    assert float(compute_mmd(x, y)) == pytest.approx(expected, abs=1e-5)
    assert float(compute_mmd(x, x)) == pytest.approx(0, abs=1e-5)


def test_a_round_is_that_of_the_algorithm() -> None:
    """Three steps by torch alone, on a network of its own, with the same batches and drawn policies."""
    data, blobs = device_data(30), Blobs(WIDE)
    own = action(blobs)
    here = Worker("d", TASK, data, Path("unused")).make_device(order(own, seed=3), blobs, action=own)
    learned = train_model(here, own, WIDE_INITIAL)

    network, fixed = Network(WIDE), Network(WIDE)
    network.load(WIDE_INITIAL)
    fixed.load(WIDE_INITIAL)
    network.module.train()
    head = find_layer(network.module, PolicyHead)
    base, base_fixed = (nn.Sequential(*list(each.module.children())[:-1]) for each in (network, fixed))
    learns = [*base.parameters(), *head.policy.parameters(), *head.own.head.parameters()]
    x, y = (torch.from_numpy(part) for part in data.shared)
    with seed_torch(3):
        for _, batch in zip(range(3), draw_batches(len(y), 8, np.random.default_rng(3)), strict=False):
            f = base(x[batch])
            loss = functional.cross_entropy(head(f), y[batch]) + 0.5 * compute_mmd(f, base_fixed(x[batch]).detach())
            for weights, gradient in zip(learns, torch.autograd.grad(loss, learns), strict=True):
                weights.data -= 0.1 * gradient
    with torch.no_grad():
        head.shared.weight.copy_((head.shared.weight + head.own.head.weight) / 2)
        head.shared.bias.copy_((head.shared.bias + head.own.head.bias) / 2)
        head.own.vector.copy_(head.own.head.weight.sum(dim=0))
    expected = network.dump()
    np.testing.assert_allclose(learned.model.params, expected.params, atol=1e-6)
    np.testing.assert_allclose(learned.model.buffers, expected.buffers, atol=1e-6)
    assert np.abs(expected.params - WIDE_INITIAL.params).max() > 1e-3


def test_a_device_of_the_plain_task_trains_keeps_its_head_and_installs_a_bundle_of_the_other_network(
    tmp_path: Path,
) -> None:
    blobs = Blobs(WIDE)
    worker = Worker("d", TASK, device_data(), tmp_path)
    trained = worker.execute(order(action(blobs, sgd=Sgd(steps=20)), 1), blobs)
    assert isinstance(trained.result, Trained), trained.result
    sent = from_bytes(trained.blobs[trained.result.update.digest])
    assert set(sent) == {info.name for info in WIDE_LAYOUT.without(OWN).tensors}
    final = Install(model=blobs.model(0, OWN), personal=OWN, kept_by=TrainCp.STEP, initial=blobs.model(0), method="m")
    done = worker.execute(order(final, 2), blobs)
    assert isinstance(done.result, Installed), done.result
    task = manifest_of(tmp_path, done.result).task
    assert (task, task.compute_fingerprint()) == (WIDE, TASK.compute_fingerprint())
    assert worker.network.layout == LAYOUT, "other orders have the task's own network"

    here = worker.make_device(order(final, 2), blobs, action=final)
    kept = here.load_kept(TrainCp.STEP, WIDE_LAYOUT.select(OWN))
    assert kept is not None
    model, x = assemble_model(here, final.model, OWN, kept, final.initial), worker.data.x_val
    logits = Network(WIDE).compute_logits(model, x)
    said = load(tmp_path / "bundles" / str(done.result.release)).predict(x).probabilities
    np.testing.assert_allclose(said, functional.softmax(torch.from_numpy(logits), dim=1), atol=1e-5)
    assert np.abs(model.params - WIDE_INITIAL.params).max() > 0.01, "the own head has learned"


def test_what_stays_is_no_head_of_a_layer_with_such_a_name() -> None:
    assert {info.name.split(".", 1)[1] for info in WIDE_LAYOUT.select(OWN).tensors} == {
        "own.head.weight", "own.head.bias", "own.vector",
    }  # fmt: skip
