from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_agent.device.worker import Worker
from edge_agent.steps.personal.train_gh import measure_class_means, train_model
from fedge.models.training import Network, Trainer
from fedge.steps.personal.train_gh import MEANS, PRESENT, TrainedGh, TrainGh
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tensors.layout import BASE, Codec, from_bytes
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, D, device, device_data, mixed_data, order, samples

SGD = Sgd(steps=6, batch_size=8)
BLOBS = Blobs()
ACTION = TrainGh(
    starts=(Start(model=BLOBS.model(0, BASE)),),
    sgd=SGD,
    personal=BASE,
    initial=BLOBS.model(0),
    codec=Codec.FLOAT32,
)


def test_it_trains_as_fedavg_keeps_the_base_and_sends_the_class_means_of_what_it_learned() -> None:
    data = device_data(30)
    here = device(Path("unused"), ACTION, data=data, seed=3)
    learned = train_model(here, ACTION, INITIAL)
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *data.shared, SGD, np.random.default_rng(3)).run(SGD.steps)
    expected = network.dump()
    np.testing.assert_array_equal(learned.model.params, expected.params)
    assert learned.kept is not None
    assert learned.sent is not None
    np.testing.assert_array_equal(learned.kept.params, expected.params[: LAYOUT.select(BASE).n_params])
    x, y = data.shared
    features = network.compute_features(expected, x)
    means = np.stack([features[y == c].mean(axis=0) for c in range(3)])
    np.testing.assert_allclose(np.asarray(learned.sent[MEANS], np.float32), means, atol=1e-5)
    np.testing.assert_array_equal(learned.sent[PRESENT], np.ones(3))


def test_a_class_without_samples_has_no_mean() -> None:
    x, y = samples(12, 1)
    data = mixed_data((x[y != 1], y[y != 1]), (x, y))
    means, present = measure_class_means(device(Path("unused"), ACTION, data=data), INITIAL)
    np.testing.assert_array_equal(present, [1, 0, 1])
    assert not means[1].any()
    assert means[0].any()


def test_nothing_else_leaves(tmp_path: Path) -> None:
    done = Worker("d", TASK, device_data(), tmp_path).execute(order(ACTION), BLOBS)
    assert isinstance(done.result, TrainedGh), done.result
    ((digest, data),) = done.blobs.items()
    assert digest == done.result.update.digest
    assert {name: tensor.shape for name, tensor in from_bytes(data).items()} == {MEANS: (3, D), PRESENT: (3,)}
