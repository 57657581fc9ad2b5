from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edge_agent.device.worker import Worker
from edge_agent.steps.personal.train_gp import train_model
from fedge.models import build
from fedge.models.layers.valve import ValveHead
from fedge.models.network import find_layer
from fedge.models.training import Network, draw_batches
from fedge.steps.personal.train_gp import TrainGp
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tasks import DeviceData
from fedge.tensors.layout import Codec, from_bytes
from tests.support.orders import TASK, Blobs, device_data, mixed_data, order, samples

OWN = ("*.own.head.*", "*.own.vector")
WIDE = TASK.with_head_class("valve")
WIDE_LAYOUT, WIDE_INITIAL = build.make_initial_model(WIDE, 0)
SGD = Sgd(steps=3, batch_size=8, learning_rate=0.1, momentum=0.0)


def action(blobs: Blobs, pull: float = 0.3, decay: float = 0.2) -> TrainGp:
    start = Start(model=blobs.model(0, OWN))
    return TrainGp(
        starts=(start,), sgd=SGD, personal=OWN, initial=blobs.model(0), codec=Codec.FLOAT32, pull=pull, decay=decay
    )


def test_a_round_is_that_of_the_algorithm() -> None:
    """Three steps by torch alone, on a network of its own, with the same batches; mu as weight decay."""
    data, blobs = device_data(30), Blobs(WIDE)
    own = action(blobs)
    here = Worker("d", TASK, data, Path("unused")).make_device(order(own, seed=3), blobs, action=own)
    learned = train_model(here, own, WIDE_INITIAL)

    network = Network(WIDE)
    network.load(WIDE_INITIAL)
    head = find_layer(network.module, ValveHead)
    base = nn.Sequential(*list(network.module.children())[:-1])
    x, y = (torch.from_numpy(part) for part in data.shared)
    frozen = head.embeddings.detach().clone()
    shares = torch.bincount(y, minlength=3) / len(y)
    p, g = shares @ frozen, frozen.mean(dim=0)
    decaying = [head.embeddings, *head.gamma.parameters(), *head.beta.parameters()]
    learns = [*base.parameters(), *head.own.head.parameters(), *decaying]
    for _, batch in zip(range(3), draw_batches(len(y), 8, np.random.default_rng(3)), strict=False):
        f = base(x[batch])
        personal, generic = (torch.relu((head.gamma(c) + 1) * f + head.beta(c)) for c in (p, g))
        cosines = functional.cosine_similarity(generic[:, None], head.embeddings[None], dim=2)
        loss = (
            functional.cross_entropy(head.own.head(personal), y[batch])
            + functional.cross_entropy(cosines, y[batch])
            + 0.3 * torch.norm(generic - frozen[y[batch]], 2)
        )
        for weights, gradient in zip(learns, torch.autograd.grad(loss, learns), strict=True):
            decay = 0.2 * weights.data if any(weights is each for each in decaying) else 0.0
            weights.data -= 0.1 * (gradient + decay)
    expected = network.dump()
    np.testing.assert_allclose(learned.model.params, expected.params, atol=1e-5)
    assert np.abs(expected.params - WIDE_INITIAL.params).max() > 1e-3
    assert find_layer(here.network.module, ValveHead).frozen is None, "the next device begins without it"


def test_the_class_shares_are_those_of_samples_that_are_not_sensitive_and_stay(tmp_path: Path) -> None:
    x, y = samples(12, 1)
    data: DeviceData = mixed_data((x[y != 1], y[y != 1]), (x, y))
    blobs = Blobs(WIDE)
    own = action(blobs)
    worker = Worker("d", TASK, data, tmp_path)
    done = worker.execute(order(own), blobs)
    ((_, update),) = done.blobs.items()
    assert set(from_bytes(update)) == {info.name for info in WIDE_LAYOUT.without(OWN).tensors}
    kept = worker.make_device(order(own, 2), blobs, action=own).load_kept(TrainGp.STEP, WIDE_LAYOUT.select(OWN))
    assert kept is not None
    np.testing.assert_array_equal(kept.model.buffers, [0.5, 0, 0.5])
