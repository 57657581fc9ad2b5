"""A bundle of one model: the end of every method whose devices run one network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_agent import gate, mixture
from edge_agent.outcome import Fetch, Stop, installed
from export import Candidate, GateWeights, Mixture
from fedge.messages import Calibration, Install, Installed, Order, Role

if TYPE_CHECKING:
    from edge_agent.worker import Worker


def install(worker: Worker, action: Install, fetch: Fetch, order: Order, stop: Stop) -> Installed:
    """Write the bundle of the model that the action describes."""
    model = worker.model(action.global_model, fetch)
    alone = Mixture(
        candidates=(Candidate(role=Role.GLOBAL, name=Role.GLOBAL.value, model=model),),
        log_prior=worker.final_prior(),
        beta=0.0,
        gate=GateWeights.untrained(gate.n_features(worker.task.input_shape), 1),
    )
    plain = Calibration(temperature=1.0, kappa=0.0)
    log_p = mixture.calibrated(worker.logits(model, worker.data.x_val), worker.prior, plain)
    info = worker.write(alone, action.release, action.method, worker.metrics(log_p))
    return installed(info, (Role.GLOBAL,), guarded=False)
