"""A student in place of the mixture that a step made, if the device's owner asks for it (docs/methods/student.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from edge_agent.samples import SampleStore
from edge_agent.samples.sources import read_unlabelled
from fedge.data.preprocessing import preprocess, turn_images

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_agent.device.device import Device
    from export import Mixture, Pool

log = logging.getLogger("fedge.agent")

_STREAM: Final = 83
"""Stream of the order's random numbers."""


def replace_mixture(
    device: Device, made: Mixture | Pool, metrics: Mapping[str, float]
) -> tuple[Mixture | Pool, Mapping[str, float]]:
    """Return the student of a mixture and the figures with those of the comparison, or the mixture if it stays.

    Raises:
        StoppedError: the device is to stop.
        StoreError: the inputs without a label cannot be read.
    """
    from export import Pool
    from export.student import make_student

    if reason := explain_refusal(device, made):
        log.info("event=no_student reason=%r", reason)
        return made, metrics
    assert not isinstance(made, Pool)
    x = np.concatenate([device.data.x_train, load_unlabelled(device)])
    found = make_student(device.network, made, x, device.data.validation, device.make_rng(_STREAM), device.stop)
    log.info(
        "event=%s n=%d unlabelled=%d validation=%d loss=%.3f mixture_loss=%.3f right=%d mixture_right=%d",
        *("student_installed" if found.is_good else "mixture_kept", len(x), len(x) - device.data.n_train),
        *(found.n, found.loss, found.mixture_loss, found.right, found.mixture_right),
    )
    known = {"student_loss": found.loss, "mixture_loss": found.mixture_loss} if np.isfinite(found.loss) else {}
    return found.mixture if found.is_good else made, {**metrics, **known}


def explain_refusal(device: Device, made: Mixture | Pool) -> str:
    """Return why there can be no student, or ""."""
    from export import Pool

    if not device.task.problem.APART:
        return f"a student is for classification, not for {device.task.problem.NAME}"
    if isinstance(made, Pool):
        return "a pool of modules has no whole models to begin from"
    if len(made.candidates) == 1:
        return "the bundle is of one network already"
    if not device.data.n_train or not len(device.data.y_val):
        return "there are no samples to learn from and to compare on"
    return ""


def load_unlabelled(device: Device) -> NDArray[np.float32]:
    """Load the inputs without a label that the owner has the device keep (docs/samples.md), turned as its samples are.

    The shape is (n, *input_shape); n is 0 if there is no store.
    """
    if not (device.home / "samples").exists():
        return np.zeros((0, *device.task.input_shape), np.float32)
    with SampleStore(device.home, device.task) as store:
        return turn_images(preprocess(device.task, read_unlabelled(store)), device.data.quarters)
