"""Models that never leave the device: private, local, final fit on all labelled data (fedge.md sections 6 and 10)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_agent.device.device import Device
from edge_agent.learning.mixture import BASE_CHECKPOINT, TIE, choose_steps
from fedge.data.problems.calibration import PLAIN
from fedge.errors import ProtocolError
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model

CHECKPOINTS: Final = (20, 40, 80, 160)
"""Steps after which the private model is evaluated; 40 are taken unless validation clearly asks for another number."""

log = logging.getLogger("fedge.agent")

Samples = tuple[NDArray[np.float32], NDArray[Any]]
T = TypeVar("T")


def fit_private(
    device: Device,
    start: Model,
    training: Samples,
    validation: Samples,
    sgd: Sgd,
    stream: int = 0,
    *,
    steps: int | None = None,
) -> tuple[Model, int]:
    """Fine-tune `start` on all training samples (n >= 1); return the checkpoint and its number of steps.

    Training stops early after two checkpoints in a row that are worse than the best before them; without validation
    samples it stops after 40 steps. `steps`: if given, exactly this number, without validation. `stream`: stream of the
    order's random numbers.
    """
    if steps is None and not len(validation[1]):
        steps = CHECKPOINTS[BASE_CHECKPOINT]
    if steps is not None:
        return fit_model(device, start, training, sgd, steps, stream), steps
    network = device.network
    network.load(start)
    trainer = Trainer(network, *training, sgd, device.make_rng(stream))
    kept: list[Model] = []
    log_likelihoods: list[float] = []
    for before, after in zip((0, *CHECKPOINTS), CHECKPOINTS, strict=False):
        trainer.run(after - before, device.stop)
        kept.append(network.dump())
        log_likelihoods.append(compute_log_likelihood(network, kept[-1], validation))
        if _overfits(log_likelihoods):
            break
    chosen = choose_steps(log_likelihoods)
    return kept[chosen], CHECKPOINTS[chosen]


def compute_log_likelihood(network: Network, model: Model, samples: Samples) -> float:
    """Compute the log-likelihood of n >= 1 samples, in nats, without offset and temperature."""
    problem = network.task.problem
    return problem.sum_likelihood(problem.calibrate(network.predict(model, *samples), PLAIN, np.zeros(())), samples[1])


def fit_model(device: Device, start: Model, training: Samples, sgd: Sgd, steps: int, *stream: int) -> Model:
    """Train `start` on n >= 1 samples for `steps` steps, for the local model and the fits with validation samples."""
    device.network.load(start)
    Trainer(device.network, *training, sgd, device.make_rng(*stream)).run(steps, device.stop)
    return device.network.dump()


def run_or_revert(work: Callable[[], T], before: T) -> T:
    """Return the work's result, or `before` if training diverged, which is not reported."""
    try:
        return work()
    except ProtocolError as error:
        if error.name != "not-finite":
            raise
        log.warning("event=diverged reason=%r", str(error))
        return before


def average_models(models: Sequence[Model]) -> Model:
    """Average parameters and buffers, counters by maximum (section 10; scmoe_pfl.md section 14)."""
    return Model(
        params=np.stack([m.params for m in models]).mean(axis=0, dtype=np.float64).astype(np.float32),
        buffers=np.stack([m.buffers for m in models]).mean(axis=0, dtype=np.float64).astype(np.float32),
        counters=np.max([m.counters for m in models], axis=0),
    )


def _overfits(log_likelihoods: list[float]) -> bool:
    """Return whether the last two values are worse than the best one before them."""
    if len(log_likelihoods) < 3:
        return False
    best = max(log_likelihoods[:-2])
    return all(value < best - TIE for value in log_likelihoods[-2:])
