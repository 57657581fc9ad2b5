"""A bundle of one model: the end of every method whose devices run one network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from edge_agent import gate, mixture, personal
from edge_agent.mixture import PLAIN, TIE
from edge_agent.outcome import Fetch, Stop, installed
from edge_agent.private_model import Samples
from export import Candidate, GateWeights, Mixture
from fedge.messages import FineTune, Install, Installed, Order, Role
from fedge.models.training import Network, Trainer, mean_loss, never
from fedge.tensors import Model

if TYPE_CHECKING:
    from edge_agent.worker import Worker


def install(worker: Worker, action: Install, fetch: Fetch, order: Order, stop: Stop) -> Installed:
    """Write the bundle of the model that the action describes."""
    data = worker.data
    model, role = personal.served(worker, action, fetch, order), Role.GLOBAL if action.keep is None else Role.PRIVATE
    if action.fine_tune is not None and data.n_train:
        rng = np.random.default_rng(order.seed)
        training = (data.x_train, data.y_train)
        model = fine_tuned(worker.network, model, training, worker.validation, action.fine_tune, rng, stop)
        role = Role.PRIVATE
    return install_alone(worker, model, role, action.release, action.method)


def install_alone(
    worker: Worker, model: Model, role: Role, release: int, method: str, *, guarded: bool = False
) -> Installed:
    """Write the bundle of one model, as it is: a mixture of one."""
    alone = Mixture(
        candidates=(Candidate(role=role, name=role.value, model=model),),
        log_prior=worker.final_prior(),
        beta=0.0,
        gate=GateWeights.untrained(gate.n_features(worker.task.input_shape), 1),
    )
    log_p = mixture.calibrated(worker.logits(model, worker.data.x_val), worker.prior, PLAIN)
    info = worker.write(alone, release, method, worker.metrics(log_p))
    return installed(info, (role,), guarded=guarded)


def fine_tuned(
    network: Network,
    start: Model,
    training: Samples,
    validation: Samples,
    tuning: FineTune,
    rng: np.random.Generator,
    stop: Stop = never,
) -> Model:
    """`start` trained on n >= 1 samples: the checkpoint with the smallest validation loss, the earliest on a tie.

    A single checkpoint is that many steps, whatever validation says; without validation samples `otherwise` is. Where
    training diverges, the best checkpoint before it counts, and `start` if there is none.

    Raises:
        ProtocolError: `not-finite`: a number of steps without competition diverged.
    """
    checkpoints = sorted(set(tuning.checkpoints))
    network.load(start)
    trainer = Trainer(network, *training, tuning.sgd, rng)
    if len(checkpoints) == 1 or not len(validation[1]):
        trainer.run(checkpoints[0] if len(checkpoints) == 1 else tuning.otherwise, stop)
        return network.dump()
    best, smallest = start, math.inf
    for before, after in zip([0, *checkpoints], checkpoints, strict=False):
        trainer.run(after - before, stop)
        loss = mean_loss(network, *validation)
        if loss < smallest - TIE:  # never of a loss that is not a number
            best, smallest = network.dump(), loss
    return best
