"""CFIC's label feature: a device's majority class, reported with optional local differential privacy.

Source: Yang et al., "Cluster Federated Learning with Intra-Cluster Correction" (CFIC), CMC 2025, Eq. 2;
specification docs/methods/cfic.md, sections 3 and 10. The reference is the uniform distribution.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from numpy.typing import ArrayLike

from edge_agent.device.device import Device
from edge_agent.privacy.answers import take_noise
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.system.files import read_lasting, write_atomically

NOTHING: Final = -1
"""Feature of a device without samples."""


class StoredAnswer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The one randomised answer that a device has given, and for which task."""

    task_fingerprint: str
    feature: int


def run(device: Device, action: DescribeLabels) -> Result:
    """Return psi of D_L; with `epsilon` one randomised answer, which is kept and repeated for ever.

    The answer uses the device's own random numbers, because with the order's seed the coordinator could tell true
    answers from drawn ones.
    """
    counts, n = device.data.count_shared_classes(device.task.n_classes), device.data.n_shared
    feature = compute_label_feature(counts)
    if action.privacy is not UNSET and n:
        noise = take_noise(device, action.privacy, "training")
        if isinstance(noise, Declined):
            return noise
        feature = int(np.argmax(noise.add_to_counts(counts)))
    if action.epsilon is not None and feature != NOTHING:
        feature = _answer_once(device, feature, action.epsilon)
    return LabelsDescribed(feature=feature, n_samples=n)


def compute_label_feature(counts: ArrayLike) -> int:
    """Return the label i of largest D_i - 1/C, D = counts / their sum; the lowest on a tie.

    Args:
        counts: (C,) whole numbers, C >= 1, each >= 0.

    Returns:
        0..C-1, or -1 if all counts are 0.

    Example:
        >>> compute_label_feature([4, 4, 4, 4, 0])
        0
    """
    return int(np.argmax(counts)) if np.any(counts) else NOTHING


def randomised_response(feature: int, n_classes: int, epsilon: float, rng: np.random.Generator) -> int:
    """Keep the feature with probability e^eps / (e^eps + C - 1), otherwise draw another label uniformly.

    This is eps-local differential privacy (section 10). `feature`: 0..C-1; `epsilon` > 0.
    """
    keep = 1 / (1 + (n_classes - 1) * math.exp(-epsilon))
    if rng.random() < keep:
        return feature
    other = int(rng.integers(n_classes - 1))
    return other + (other >= feature)


def _answer_once(device: Device, feature: int, epsilon: float) -> int:
    path, task = device.home / "labels.json", device.task
    stored = read_lasting(path, msgspec.json.Decoder(StoredAnswer).decode)
    if stored is None or stored.task_fingerprint != task.compute_fingerprint():
        drawn = randomised_response(feature, task.n_classes, epsilon, np.random.default_rng())
        stored = StoredAnswer(task_fingerprint=task.compute_fingerprint(), feature=drawn)
        write_atomically(path, msgspec.json.encode(stored))
    return stored.feature
