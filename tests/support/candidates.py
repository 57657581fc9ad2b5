"""Orders of the steps that end in fedge's mixture, and devices that have done some of them."""

from pathlib import Path
from typing import Any

from edge_agent.device.worker import Worker
from fedge.data.problems.calibration import Calibration
from fedge.steps.contract import Action, Result, load_installed_steps
from fedge.steps.mixture.fit_candidates import FitCandidates
from fedge.steps.mixture.fit_energy import FitEnergy
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.fit_weights import FitWeights
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tasks import DeviceData
from fedge.wire.messages import Role
from tests.support.orders import Blobs, order, worker

SGD = Sgd(steps=12)
CALIBRATION = {role: Calibration(temperature=1.4, kappa=0.5) for role in Role}
WITHOUT_LOCAL = {Role.PRIVATE: 0.5, Role.GLOBAL: 0.3, Role.EXPERT: 0.2}
WITH_LOCAL = {Role.PRIVATE: 0.4, Role.GLOBAL: 0.2, Role.EXPERT: 0.2, Role.LOCAL: 0.2}
FIT_WEIGHTS = FitWeights(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL, WITH_LOCAL), shrinkage=10.0)
FIT_ENERGY = FitEnergy(calibration=CALIBRATION, pooled=(WITHOUT_LOCAL, WITH_LOCAL), shrinkage=20.0)


def fit_candidates(blobs: Blobs, experts: int = 2, **changes: Any) -> FitCandidates:
    fields: dict[str, Any] = {
        "global_model": blobs.model(1),
        "experts": tuple(Start(model=blobs.model(10 + k), cluster=k) for k in range(experts)),
        "initial_model": blobs.model(0),
        "sgd": SGD,
        "local_steps": 30,
    }
    return FitCandidates(**(fields | changes))


def fit_gate(pooled: dict[Role, float] | None = None, **changes: Any) -> FitGate:
    pooled = WITH_LOCAL if pooled is None else pooled
    calibration = {role: CALIBRATION[role] for role in pooled}
    fields: dict[str, Any] = {"shrinkage": 20.0, "beta": 0.5, "sgd": SGD}
    return FitGate(**({"calibration": calibration, "pooled": pooled} | fields | changes))


class Mixing:
    """A device, and the blobs that its orders name. Each order is of a label of its own."""

    def __init__(self, home: Path, data: DeviceData | None = None, **candidates: Any) -> None:
        self.home = home
        self.blobs = Blobs()
        self.worker: Worker = worker(home, data)
        self.fit = fit_candidates(self.blobs, **candidates)

    def does(self, action: Action, label: str = "", **fields: Any) -> Result:
        asked = order(action, label=label or action.STEP, **fields)
        own = None if action.STEP in load_installed_steps() else action  # a benchmark's: as in a simulated fleet
        return self.worker.execute(asked, self.blobs, action=own).result

    def fitted(self) -> "Mixing":
        """With candidates."""
        self.does(self.fit)
        return self
