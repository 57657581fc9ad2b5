from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from edge_agent.steps.personal.train_moon import Contrast, compute_contrast, train_model
from fedge.models import build
from fedge.models import network as models
from fedge.models.training import Network, Trainer
from fedge.steps.personal.train_moon import TrainMoon
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Model
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, device_data

SGD = Sgd(steps=6, batch_size=8)
DATA = device_data(30)
OTHER = build.make_initial_model(TASK, 4)[1]


def learn(last: Model | None, mu: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    action = TrainMoon(starts=(Start(model=Blobs().model(0)),), sgd=SGD, mu=mu, tau=0.5)
    here = device(Path("unused"), action, data=DATA, seed=3)
    learned = train_model(here, action, INITIAL, None if last is None else Layers(LAYOUT, last))
    assert learned.kept is not None
    return learned.model.params, learned.kept.params


def plain() -> np.ndarray:
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *DATA.shared, SGD, np.random.default_rng(3)).run(SGD.steps)
    return network.dump().params


def test_the_contrast_is_that_of_the_paper() -> None:
    rng = torch.Generator().manual_seed(0)
    z, z_global, z_last = (torch.randn(5, 4, generator=rng) for _ in range(3))
    near, far = (torch.exp(functional.cosine_similarity(z, other) / 0.5) for other in (z_global, z_last))
    torch.testing.assert_close(compute_contrast(z, z_global, z_last, 0.5), -torch.log(near / (near + far)).mean())


def test_the_loss_is_that_of_the_problem_and_the_contrast_of_the_features() -> None:
    action = TrainMoon(starts=(Start(model=Blobs().model(0)),), sgd=SGD, mu=0.7, tau=0.5)
    network = Network(TASK)
    moved = build.make_initial_model(TASK, 9)[1]
    x, y = (torch.from_numpy(own) for own in DATA.shared)
    f, f_global, f_last = (
        torch.from_numpy(network.compute_features(model, DATA.shared[0])) for model in (moved, INITIAL, OTHER)
    )
    network.load(moved)
    here = device(Path("unused"), action, data=DATA)
    with Contrast(action, INITIAL, OTHER)(network, [here]) as loss:
        found = loss(network.module, x, y)
    logits = models.compute_features_and_logits(network.module, x, LAYOUT)[1]
    expected = functional.cross_entropy(logits, y) + 0.7 * compute_contrast(f, f_global, f_last, 0.5)
    torch.testing.assert_close(found.double(), expected.double())


def test_it_is_fedavg_without_a_last_model_or_a_weight_and_keeps_what_it_learned() -> None:
    for last, mu in ((None, 1.0), (OTHER, 0.0)):
        learned, kept = learn(last, mu)
        np.testing.assert_allclose(learned, plain(), atol=1e-6)
        np.testing.assert_array_equal(learned, kept)
    assert np.abs(learn(OTHER)[0] - plain()).max() > 1e-4


def test_a_last_model_that_is_the_global_one_changes_nothing() -> None:
    """Both pull equally: the contrast is log 2, whatever the features are."""
    np.testing.assert_allclose(learn(INITIAL)[0], plain(), atol=1e-5)
