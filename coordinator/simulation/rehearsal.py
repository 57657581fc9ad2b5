"""Rehearses a method on a few devices and checks every promise, before anything is started: `fedge check --method`."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from coordinator.fleet.problems import describe_reasons, select_reasons
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import load_method_class
from coordinator.methods.method import Method, Server
from coordinator.methods.promises import HOW, SHARED
from coordinator.methods.settings import MethodSettings, Option
from coordinator.methods.state import State
from coordinator.service.findings import Finding, Samples
from coordinator.service.proof import RecordingFleet, is_ours
from coordinator.simulation import rounds
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, FedgeError
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train
from fedge.system.loading import FAILURES, describe_error
from fedge.system.logs import set_level
from fedge.tensors.layout import Layout

DEVICES: Final = 4
"""Devices in a rehearsal, each with all samples that are given."""
TOO_LONG: Final = 10
"""Rounds after which a rehearsed run of two rounds is given up."""


def rehearse(method: str, options: Mapping[str, Option], task: TaskSpec, layout: Layout, few: Samples) -> list[Finding]:
    """Run a method that is not fedge's own on a few devices, and check every promise; in seconds.

    Args:
        method: the method's name or path.
        options: the method's options.
        task: the task to learn.
        layout: the layout of the network.
        few: model inputs (n, *input_shape) and labels (n,).
    """
    kind = load_method_class(method)
    if is_ours(kind):
        return []
    with tempfile.TemporaryDirectory(prefix="fedge-check-") as folder, set_level("fedge", logging.CRITICAL):
        stage = _Rehearsal(kind, options, task, layout, few, Path(folder))
        try:
            found = asyncio.run(stage.examine_claims())
            asyncio.run(stage.run_whole())
        except FedgeError as error:
            return [Finding(f"{method} would fail in a federation", str(error), stops=True)]
        except FAILURES as error:
            return [Finding(f"{method} fails in a federation of {DEVICES} devices", describe_error(error), stops=True)]
    if deaf := [f"--{name.replace('_', '-')}" for name in sorted(SHARED - kind.HEEDS)]:
        do = "commands that set one are refused; the method names in HEEDS which it heeds"
        found.append(Finding(f"{method} does not heed {', '.join(deaf)}", do))
    return found


class _Rehearsal:
    """A rehearsal of one method with small federations, each in a folder of its own."""

    def __init__(
        self,
        kind: type[Method[Any]],
        options: Mapping[str, Option],
        task: TaskSpec,
        layout: Layout,
        few: Samples,
        folder: Path,
    ) -> None:
        self._kind, self._task, self._layout, self._folder = kind, task, layout, folder
        self._few, self._n = few, 0
        sgd = Sgd(steps=1, batch_size=4)
        self._settings = MethodSettings(rounds=2, sgd=sgd, options=dict(options))

    def _start(self, **changes: Any) -> tuple[Method[Any], SimulatedFleet, State]:
        from edge_agent.device.worker import Worker
        from fedge.models.build import make_initial_model
        from fedge.tasks import DeviceData

        self._n += 1
        (x, y), marks = self._few, np.zeros(len(self._few[1]), np.bool_)
        data = [
            DeviceData(np.roll(x, k, axis=0), np.roll(y, k, axis=0), marks, x, y, converted=True)
            for k in range(DEVICES)
        ]
        homes = [self._folder / f"{self._n}-{k}" for k in range(DEVICES)]
        workers = {f"d{k}": Worker(f"d{k}", self._task, own, homes[k]) for k, own in enumerate(data)}
        fleet = SimulatedFleet(self._task, self._layout, workers, seed=0)
        first = fleet.put_model(make_initial_model(self._task, 0)[1], self._layout)
        made = self._kind(msgspec.structs.replace(self._settings, **changes), Server(self._task, self._few))
        return made, fleet, made.make_first_state(self._layout, first)

    async def run_whole(self) -> None:
        """Run two rounds and the end.

        Raises:
            ConfigError: the run has no end, or leaves no bundle.
        """
        method, fleet, state = self._start()

        def on_round(state: State) -> None:
            if state.round > TOO_LONG:
                raise ConfigError(f"{method.name}: it is not done after {TOO_LONG} rounds, where 2 were planned")

        state = await rounds.run_rounds(method, state, fleet, on_round)
        if not state.installed:
            raise ConfigError(f"no device got a bundle: {describe_reasons(select_reasons(fleet.problems))}")

    async def examine_claims(self) -> list[Finding]:
        """Find the settings that the method claims to heed and does not."""
        heeds, found = self._kind.HEEDS, []
        wrong = {
            "participation": "participation" in heeds and await self._asks_all(),
            "min_reports": "min_reports" in heeds and await self._moves(min_reports=DEVICES + 1),
        }
        for name in (name for name in sorted(SHARED) if wrong.get(name)):
            what = f"the method says that it heeds --{name.replace('_', '-')}, and does not"
            found.append(Finding(what, f"let it {HOW[name]}, or leave {name!r} out of HEEDS", stops=True))
        return found

    async def _asks_all(self) -> bool:
        """Return whether all devices train in the first round although only half of them should."""
        method, fleet, state = self._start(participation=0.5)
        watched = RecordingFleet(fleet, method.name)
        fleet.round = 1
        await method.advance(state, watched)
        return len({i for (_, i), action in watched.asked.items() if isinstance(action, Train)}) == DEVICES

    async def _moves(self, **changes: Any) -> bool:
        """Return whether the model has changed after the first round."""
        method, fleet, state = self._start(**changes)
        fleet.round = 1
        after = await method.advance(state, fleet)
        return method.get_default_model(after) != method.get_default_model(state)
