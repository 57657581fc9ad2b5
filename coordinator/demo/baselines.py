"""Simpler ways to learn, simulated with the budget of the demo's federation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.baselines.local import Local, train_alone
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Method
from coordinator.methods.rounds import count_steps_alone
from coordinator.methods.settings import DEFAULT, MethodSettings, Option
from coordinator.methods.state import ModelState
from coordinator.simulation.federation import Federation
from coordinator.simulation.interface import use_one_thread
from coordinator.simulation.reports.outcome import RunOutcome
from coordinator.simulation.run import Watch, run_on
from coordinator.simulation.settings import DemoSettings, Scenario, Setup
from coordinator.store.records import Event
from coordinator.watch.options import open_store
from fedge.errors import FruitlessError, raise_as

BASELINES: Final = ("local", "fedavg", "fedavg+ft")
MOST_EVENTS: Final = 1_000_000


def make_demo_scenario(settings: DemoSettings) -> Scenario:
    """Make the settings of a simulation with the same data, devices and budget."""
    shared = {name: getattr(settings, name) for name in Setup.__struct_fields__}
    return Scenario(**shared, global_test=0.0, hardware="none")


class LocalBaseline(Local):
    """The method `local`, but each device trains for as many rounds as it trained in the federation."""

    def __init__(self, settings: MethodSettings, trained: Mapping[str, int]) -> None:
        super().__init__(msgspec.structs.replace(settings, protection=DEFAULT.protection))  # nothing is sent
        self._trained = trained

    async def advance(self, state: ModelState, fleet: Fleet) -> ModelState:
        """Train all devices alone, once, before any round."""
        assert isinstance(fleet, SimulatedFleet)
        fleet.round, sgd = 0, self.settings.sgd
        steps = {device.id: self._trained[device.id] * count_steps_alone(device, sgd) for device in fleet.get_devices()}
        installed = await train_alone(fleet, state.model, sgd, steps)
        return msgspec.structs.replace(state, round=1, installed=installed)


def run_baselines(
    settings: DemoSettings, cameras: Federation, summary: Mapping[str, Any], watch: Watch
) -> list[RunOutcome]:
    """Run simpler ways to learn with the same budget: every device alone, FedAvg with and without fine-tuning."""
    trained = count_rounds(settings, cameras, summary)
    share = sum(trained.values()) / (settings.rounds * len(trained))
    scenario = msgspec.structs.replace(make_demo_scenario(settings), participation=share)
    given = scenario.make_method_settings(settings.seed, {})
    ways = LocalBaseline(given, trained), make_method("fedavg", given), make_method("fedavg+ft", given)

    def run_one(label: str, way: Method[Any]) -> RunOutcome:
        home = settings.folder / "baselines" / label
        with raise_as(FruitlessError, f"the baseline {label}", on=FruitlessError):
            return run_on(cameras, way, scenario, settings.seed, home, label, lambda line: watch(f"{label}  {line}"))

    with use_one_thread():
        return [run_one(label, way) for label, way in zip(BASELINES, ways, strict=True)]


def run_choosing(
    settings: DemoSettings,
    cameras: Federation,
    boards: Mapping[str, Hardware],
    options: Mapping[str, Option],
    watch: Watch,
) -> list[RunOutcome]:
    """Simulate the demo's method as it was, with devices drawn by lot, and with all devices in every round.

    By the simulated clock each order takes a device the median time of its orders to train in the federation.
    """
    took = defaultdict[str, list[float]](list)
    for event in read_events(settings, "answer"):
        if event.fields["label"] == "train" and event.round >= min(2, settings.rounds):  # in the first, they load torch
            took[event.device].append(event.fields["seconds"])
    usual = float(np.median([each for times in took.values() for each in times]))
    hardware = {
        i: Hardware(board.name, latency_s=float(np.median(took[i])) if i in took else usual)
        for i, board in boards.items()
    }
    slowed = dataclasses.replace(cameras, hardware=hardware)
    scenario = msgspec.structs.replace(make_demo_scenario(settings), evaluate_every=1)
    everybody = msgspec.structs.replace(scenario, participation=1.0)
    lot = {**options, "selection": "uniform"}

    def run_one(label: str, given: Scenario, own: Mapping[str, Option]) -> RunOutcome:
        method = make_method(settings.method, given.make_method_settings(settings.seed, dict(own)))
        watch(f"{settings.method}, {label}, simulated by the times that devices took")
        return run_on(slowed, method, given, settings.seed, settings.folder / "choosing" / label, label)

    with use_one_thread():
        return [
            run_one(f"chosen by {settings.method}", scenario, options),
            run_one("drawn by lot", scenario, lot),
            run_one("all devices", everybody, options),
        ]


def read_events(settings: DemoSettings, name: str) -> list[Event]:
    """Read the events of this name that the coordinator recorded."""
    with contextlib.closing(open_store(settings.folder / "coordinator", None)) as store:
        return store.get_events(names=(name,), limit=MOST_EVENTS)


def count_rounds(settings: DemoSettings, cameras: Federation, summary: Mapping[str, Any]) -> dict[str, int]:
    """Return each device's rounds of local training; if the method is `local`, as many as in other methods."""
    if summary["selection"]:
        return dict(summary["selection"])
    return dict.fromkeys(cameras.shares, max(1, round(settings.rounds * settings.participation)))
