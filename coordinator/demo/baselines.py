"""Simpler ways to learn, simulated with the budget of the demo's federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.baselines.local import Local, learn_alone
from coordinator.methods.catalogue import make
from coordinator.methods.method import Method
from coordinator.methods.rounds import steps_alone
from coordinator.methods.settings import DEFAULT, MethodSettings
from coordinator.methods.state import ModelState
from coordinator.simulation.federation import Federation
from coordinator.simulation.interface import one_thread
from coordinator.simulation.reports.outcome import RunOutcome
from coordinator.simulation.run import Watch, run_on
from coordinator.simulation.settings import DemoSettings, Scenario, Setup
from fedge.errors import FruitlessError, failing_as

BASELINES: Final = ("local", "fedavg", "fedavg+ft")


def as_simulated(settings: DemoSettings) -> Scenario:
    """The settings of a simulation with the same data, devices and budget."""
    shared = {name: getattr(settings, name) for name in Setup.__struct_fields__}
    return Scenario(**shared, global_test=0.0, hardware="none")


class Alone(Local):
    """Every device alone, for as many rounds as it trained in the federation."""

    def __init__(self, settings: MethodSettings, trained: Mapping[str, int]) -> None:
        super().__init__(msgspec.structs.replace(settings, protection=DEFAULT.protection))  # nothing is sent
        self._trained = trained

    async def advance(self, state: ModelState, fleet: Fleet) -> ModelState:
        """All devices, once, before any round."""
        assert isinstance(fleet, SimulatedFleet)
        fleet.round, sgd = 0, self.settings.sgd
        steps = {device.id: self._trained[device.id] * steps_alone(device, sgd) for device in fleet.devices()}
        installed = await learn_alone(fleet, state.model, sgd, steps)
        return msgspec.structs.replace(state, round=1, installed=installed)


def baselines(
    settings: DemoSettings, cameras: Federation, summary: Mapping[str, Any], watch: Watch
) -> list[RunOutcome]:
    """Simpler ways to learn with the same budget: every device alone, FedAvg, and FedAvg with fine-tuning."""
    trained = spent(settings, cameras, summary)
    share = sum(trained.values()) / (settings.rounds * len(trained))
    scenario = msgspec.structs.replace(as_simulated(settings), participation=share)
    given = scenario.for_method(settings.seed, {})
    ways = Alone(given, trained), make("fedavg", given), make("fedavg+ft", given)

    def measured(label: str, way: Method[Any]) -> RunOutcome:
        home = settings.folder / "baselines" / label
        with failing_as(FruitlessError, f"the baseline {label}", on=FruitlessError):
            return run_on(cameras, way, scenario, settings.seed, home, label, lambda line: watch(f"{label}  {line}"))

    with one_thread():
        return [measured(label, way) for label, way in zip(BASELINES, ways, strict=True)]


def spent(settings: DemoSettings, cameras: Federation, summary: Mapping[str, Any]) -> dict[str, int]:
    """Rounds of local training of each device; for `local`, which has no rounds, as many as in other methods."""
    if summary["selection"]:
        return dict(summary["selection"])
    return dict.fromkeys(cameras.shares, max(1, round(settings.rounds * settings.participation)))
