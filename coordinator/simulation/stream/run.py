"""Runs a method over a stream of campaigns, and measures the devices' bundles as the world is then and as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.method import Method, Server
from coordinator.methods.settings import Option
from coordinator.methods.state import State
from coordinator.simulation.evaluation import predict_classes
from coordinator.simulation.federation import Federation, make_fleet, partition_samples
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.run import Watch, examine_network, run_to_end
from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.arrivals import Stream
from coordinator.simulation.stream.happenings import Happening, Happenings, draw_happenings
from coordinator.simulation.stream.replay import Replay
from edge_agent.device.worker import Worker
from fedge.errors import ConfigError, FruitlessError
from fedge.wire.messages import BlobRef


class CampaignOutcome(Struct, frozen=True, kw_only=True):
    """A campaign of a stream. Accuracies are shares, means over the devices of their bundles in ONNX Runtime.

    `accuracy`: on tests as the world is in this campaign; `before`: the same by the bundles of the campaign before,
    None in the first. `frozen`: on the tests of the first campaign. `backward`: accuracy on the tests of the earlier
    campaigns minus what it was then, mean over these campaigns; None in the first. `turned`, `moved`: accuracy of the
    device that is turned, and of those that move; None if there is none. `devices`: accuracy by device.
    `n_samples`: samples in the stores, mean over the devices.
    """

    campaign: int
    accuracy: float
    before: float | None
    frozen: float
    backward: float | None
    turned: float | None
    moved: float | None
    devices: dict[str, float]
    n_samples: float
    bytes_up: int
    bytes_down: int
    experts: int
    lineage: tuple[str, ...] = ()
    wall_s: float = 0.0


class StreamOutcome(Struct, frozen=True, kw_only=True):
    """A method over all campaigns of a stream, on one seed."""

    method: str
    seed: int
    happens: Happenings
    campaigns: tuple[CampaignOutcome, ...]

    @property
    def accuracy(self) -> float:
        """The mean of the campaigns' accuracies."""
        return float(np.mean([campaign.accuracy for campaign in self.campaigns]))


class StreamSettings(Struct, frozen=True, kw_only=True):
    """What a stream is made of. `store`: most samples of a class on a device; `restart`: no campaign goes on."""

    campaigns: int = 10
    happens: tuple[Happening, ...] = ()
    store: int = 100
    restart: bool = False


def simulate_stream(
    scenario: Scenario,
    method: str,
    options: Mapping[str, Option],
    seed: int,
    home: Path,
    watch: Watch,
    label: str,
    how: StreamSettings,
) -> StreamOutcome:
    """Run a method over all campaigns; equal arguments give equal figures, except for times.

    Arguments as of `coordinator.simulation.run.simulate`.

    Raises:
        ConfigError: the data, the partition, the method or its options are not available as requested.
        FruitlessError: a campaign learned nothing, or no device has a bundle.
    """
    head_class = load_method_class(method).HEAD_CLASS
    federation = partition_samples(scenario, seed).with_head_class(head_class, seed)
    if not (problem := federation.task.problem).CLASSED:
        raise ConfigError(
            f"a stream of campaigns has happenings to classes, and is for classification, not for {problem.NAME}: "
            "simulate one campaign (fedge simulate)"
        )
    groups = [(i, share.group) for i, share in federation.shares.items()]
    happens = draw_happenings(how.happens, how.campaigns, groups, federation.task.n_classes, seed=seed)
    examine_network(federation, "", watch)
    life = Life(federation, scenario, Stream(federation, happens, seed=seed), how, seed, home)

    def make(first: int) -> Method[Any]:
        settings = msgspec.structs.replace(scenario.make_method_settings(seed, dict(options)), first=first)
        return make_method(method, settings, Server(federation.task, federation.server_data))

    outcomes = tuple(life.run(make, watch))
    return StreamOutcome(method=label, seed=seed, happens=happens, campaigns=outcomes)


class Life:
    """A fleet over all campaigns: its devices' stores, the method's state, and what was measured."""

    def __init__(
        self, federation: Federation, scenario: Scenario, stream: Stream, how: StreamSettings, seed: int, home: Path
    ) -> None:
        self._federation, self._scenario, self._stream, self._how = federation, scenario, stream, how
        self._seed, self._home = seed, home
        self._stores = {i: Replay.make_empty(federation.task) for i in federation.shares}
        self._state: State | None = None
        self._releases: dict[str, Path] = {}
        self._reached: list[list[float]] = []
        """By campaign, the accuracies on the tests of this campaign and of all before."""

    def run(self, make: Callable[[int], Method[Any]], watch: Watch) -> list[CampaignOutcome]:
        """Run all campaigns; `make` makes the method whose campaign begins after a round."""
        fleet = workers = first = None
        outcomes: list[CampaignOutcome] = []
        for campaign in range(1, self._how.campaigns + 1):
            began = time.perf_counter()
            self._receive(campaign)
            before = self._measure(campaign) if outcomes else None
            if fleet is None or workers is None or first is None or self._how.restart:
                home = self._home / str(campaign) if self._how.restart else self._home
                fleet, first, workers = make_fleet(self._federation, self._scenario, self._seed, home)
                self._state = None
            up, down = fleet.bytes_up, fleet.bytes_down
            method, begun = self._begin(make, workers, first)
            state = run_to_end(run_rounds(method, begun, fleet))
            if not state.installed:
                raise FruitlessError(f"campaign {campaign}: no device has a bundle")
            self._state = state
            self._releases |= {i: workers[i].home / "bundles" / str(b.release) for i, b in state.installed.items()}
            own, summary = self._measure(campaign), method.summarise(state)
            outcome = self._make_outcome(
                campaign,
                before,
                own,
                bytes_up=fleet.bytes_up - up,
                bytes_down=fleet.bytes_down - down,
                experts=len(summary["clusters"]) if summary["split"] else 0,
                lineage=tuple(summary.get("lineage", ())),
                wall_s=round(time.perf_counter() - began, 2),
            )
            outcomes.append(outcome)
            watch(describe_campaign(outcome, self._how.campaigns))
        return outcomes

    def _receive(self, campaign: int) -> None:
        for i in self._stores:
            new = self._stream.list_arrivals(i, campaign)
            added = self._stores[i].add(self._federation.task, new.x, new.y, new.sensitive)
            self._stores[i] = added.bound(self._how.store)

    def _begin(
        self, make: Callable[[int], Method[Any]], workers: Mapping[str, Worker], first: BlobRef
    ) -> tuple[Method[Any], State]:
        """Give the workers what their stores have now; return the method and the state with which it begins."""
        changed = []
        for i, worker in workers.items():
            data = self._stores[i].make_data().to_task_types(self._federation.task)
            if data.compute_digest() != worker.data.compute_digest():
                changed.append(i)
                worker.data = data
        if self._state is None:
            method = make(0)
            return method, method.make_first_state(self._federation.layout, first)
        method = make(self._state.round)
        return method, method.begin_campaign(self._state, changed)

    def _measure(self, campaign: int) -> dict[str, list[float]]:
        """Measure each device's bundle on its tests of campaigns 1 to `campaign`."""
        found: dict[str, list[float]] = {}
        for i, bundle in sorted(self._releases.items()):
            tests = [self._stream.list_tests(i, c) for c in range(1, campaign + 1)]
            said = predict_classes(bundle, np.concatenate([test.x for test in tests]))
            ends = np.cumsum([len(test.y) for test in tests])[:-1]
            parts = zip(np.split(said, ends), tests, strict=True)
            found[i] = [float(np.mean(part == test.y)) if len(test.y) else np.nan for part, test in parts]
        return found

    def _make_outcome(
        self, campaign: int, before: Mapping[str, list[float]] | None, after: Mapping[str, list[float]], **known: Any
    ) -> CampaignOutcome:
        now = {i: figures[-1] for i, figures in after.items()}
        means = [float(np.nanmean([figures[c] for figures in after.values()])) for c in range(campaign)]
        self._reached.append(means)
        happens = self._stream.happens
        moved = [now[i] for i in happens.moved or () if i in now]
        gains = [means[c] - self._reached[c][c] for c in range(campaign - 1)]
        return CampaignOutcome(
            campaign=campaign,
            accuracy=means[-1],
            before=None if before is None else float(np.nanmean([figures[-1] for figures in before.values()])),
            frozen=means[0],
            backward=float(np.mean(gains)) if gains else None,
            turned=now.get(happens.turned or ""),
            moved=float(np.mean(moved)) if moved else None,
            devices=now,
            n_samples=float(np.mean([len(store.y) for store in self._stores.values()])),
            **known,
        )


def describe_campaign(outcome: CampaignOutcome, campaigns: int) -> str:
    """Describe a campaign in a line of progress."""
    before = "" if outcome.before is None else f" (before {outcome.before:.3f})"
    turned = "" if outcome.turned is None else f"  turned {outcome.turned:.3f}"
    return (
        f"campaign {outcome.campaign}/{campaigns}  accuracy {outcome.accuracy:.3f}{before}  "
        f"frozen {outcome.frozen:.3f}{turned}  experts {outcome.experts}"
    )
