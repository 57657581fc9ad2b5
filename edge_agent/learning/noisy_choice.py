"""Comparisons of models on a device's validation samples, with noise (docs/privacy.md, *Answers with noise*).

The prior that fedge's losses include comes from noisy label counts of the same samples, not from the training samples,
so that what is told depends on validation samples alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from edge_agent.device.device import Device
from edge_agent.learning.evaluation import WITH_OFFSET
from edge_agent.privacy.answers import Array, take_noise
from fedge.data.problems.calibration import PLAIN
from fedge.steps.contract import Declined
from fedge.steps.noise import Privacy
from fedge.steps.training.train import Start
from fedge.tensors.layout import Model
from fedge.wire.messages import Why

ADVANTAGE: Final = 1.0
"""A sample counts at most so much, in nats, as the L2 norm of its log-likelihoods less their mean over the models."""


def choose_start(device: Device, privacy: Privacy, starts: Sequence[Start], *, with_prior: bool) -> Start:
    """Choose the start with the largest noisy likelihood; the first if the noise is too dear or nothing validates."""
    if len(starts) == 1:
        return starts[0]
    models = [device.fetch_model(start.model) for start in starts]
    found = compare_models(device, privacy, models, with_prior=with_prior)
    return starts[0] if isinstance(found, Declined) else starts[int(np.argmax(found))]


def compare_models(device: Device, privacy: Privacy, models: Sequence[Model], *, with_prior: bool) -> Array | Declined:
    """Return the noisy mean log-likelihoods (K,) of K >= 2 models on V_L, in nats, less their mean over the models.

    `with_prior`: with T = 1, kappa = 1 and the noisy log class shares, if samples have a class each. The comparison is
    then two noisy answers, otherwise one.
    """
    x, y = device.data.shared_validation
    if not len(y):
        return Declined(why=Why.NO_DATA)
    problem, task = device.task.problem, device.task
    how, offset = PLAIN, problem.make_no_offset(task.input_shape)
    if with_prior and problem.CLASSED:
        noise = take_noise(device, privacy, "validation")
        if isinstance(noise, Declined):
            return noise
        counts = np.maximum(noise.add_to_counts(np.bincount(y, minlength=task.n_classes)), 0)
        how, offset = WITH_OFFSET, np.log((counts + 0.5) / (counts + 0.5).sum())
    noise = take_noise(device, privacy, "validation")
    if isinstance(noise, Declined):
        return noise
    said = [problem.calibrate(device.network.predict(model, x, y), how, offset) for model in models]
    likelihoods = np.stack([problem.compute_log_likelihood(each, y) for each in said], axis=1)
    known = np.where(np.isfinite(likelihoods), likelihoods, problem.compute_unknown(y)[:, np.newaxis])
    return noise.compute_sum(known - known.mean(axis=1, keepdims=True), ADVANTAGE) / len(y)
