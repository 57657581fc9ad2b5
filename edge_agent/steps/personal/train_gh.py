"""FedGH: a device trains its base and the shared head, and tells the mean features of each of its classes.

Source: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023,
Algorithm 1; baselines.md section 21. The base shapes the means, so it learns from D_L alone.
"""

from __future__ import annotations

import numpy as np
import torch

from edge_agent.device.device import Device
from edge_agent.learning.class_means import compute_class_means
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from fedge.steps.contract import Result
from fedge.steps.personal.train_gh import MEANS, PRESENT, TrainGh, make_means_layout
from fedge.tensors.layers import Layers, cut, paste
from fedge.tensors.layout import Floats, Model, flatten

overlay = paste
"""The function that puts the device's base under the shared head."""


def run(device: Device, action: TrainGh) -> Result:
    """Train base and head, and measure the class means."""
    return train_alone(device, action, lambda start, _: train_model(device, action, start))


def train_model(device: Device, action: TrainGh, start: Model) -> Learned:
    """Train from `start` on D_L, n >= 1; keep the base, and send the class means.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    network, layout = device.network, device.layout
    network.load(start)
    fit(network, [device], Recipe(action.sgd))
    trained = network.dump()
    means, present = measure_class_means(device, trained)
    sent = make_means_layout(layout)
    return Learned(
        trained,
        kept=cut(trained, layout, layout.select(action.personal)),
        sent=Layers(sent, flatten({MEANS: means, PRESENT: present}, sent)),
    )


def measure_class_means(device: Device, model: Model) -> tuple[Floats, Floats]:
    """Return the mean features of each class over D_L, (C, D), 0 without samples, and whether it has any, (C,)."""
    x, y = device.data.shared
    features = torch.from_numpy(device.network.compute_features(model, x))
    means = compute_class_means(features, torch.from_numpy(y), device.task.n_classes).numpy()
    present = ~np.isnan(means).any(axis=1)
    return np.where(present[:, None], means, np.float32(0)), present.astype(np.float32)
