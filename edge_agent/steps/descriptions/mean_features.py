"""Mean of the base's features over D_L."""

from __future__ import annotations

from edge_agent.device.device import Device
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.mean_features import FeaturesMeasured, MeanFeatures
from fedge.wire.messages import Why


def run(device: Device, action: MeanFeatures) -> Result:
    """Return the mean features (D,)."""
    x, _ = device.data.shared
    if not len(x):
        return Declined(why=Why.NO_DATA)
    mean = device.network.compute_features(device.fetch_model(action.model), x).mean(axis=0)
    return FeaturesMeasured(mean=tuple(mean.tolist()), n_samples=len(x))
