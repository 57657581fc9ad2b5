"""The results of a comparison: the figures of its JSON file."""

from __future__ import annotations

from typing import Any, Self

from msgspec import Struct, field
from rich.console import Console

from coordinator.simulation.reports.outcome import (
    ACCURACIES,
    Accuracy,
    Cost,
    RunOutcome,
    Scored,
    decode_figures,
    make_data_frame,
)
from coordinator.simulation.settings import Scenario
from coordinator.watch.accuracy import OF_CLASSES
from fedge.data.problems.scores import ACCURACY, Figure
from fedge.system.moved import alias_members


class Spread(Struct, frozen=True, kw_only=True):
    """The mean and sample standard deviation (n - 1) of a figure over the seeds; `std` is 0 for one seed."""

    mean: float
    std: float
    seeds: tuple[float, ...]


class MethodOutcome(Scored, frozen=True, kw_only=True):
    """The outcome of a method over all seeds. Differences are in `score`, seed by seed.

    `to_baseline`: difference to the baseline. `to_best_other`: difference to the other method with the best mean. The
    choice in hindsight flatters that method. `cost`: mean cost of reaching the target; None unless every seed reached
    it. `cold_start`: score of the late joiners. `details`: the method's own numbers that exist for every seed.
    `metrics`: the further figures that do. Scores and accuracies are as in `RunOutcome`.
    """

    method: str
    score: Spread = field(name="accuracy")
    to_baseline: Spread | None
    best_other: str | None
    to_best_other: Spread | None
    std: Spread
    worst_decile: Spread
    macro_f1: Spread | None = None
    global_score: Spread | None = field(name="global_accuracy")
    bytes_up: Spread
    bytes_down: Spread
    seconds: Spread
    wall_s: Spread
    evaluation_s: Spread
    cost: Cost | None
    cold_start: Spread | None = None
    details: dict[str, Spread] = {}
    metrics: dict[str, Spread] = {}

    accuracy = Accuracy[Spread]("score")
    global_accuracy = Accuracy[Spread | None]("global_score")


@alias_members(rows="to_rows")
class Comparison(Struct, frozen=True, kw_only=True):
    """The results of `fedge compare`, as in its JSON file."""

    scenario: Scenario
    seeds: tuple[int, ...]
    baseline: str
    target: float
    methods: tuple[MethodOutcome, ...]
    runs: tuple[RunOutcome, ...]

    @property
    def figure(self) -> Figure:
        """How people read the score."""
        return self.runs[0].figure

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row per method and seed, for the CSV file and `to_pandas`."""
        figures = (
            *("score", "std", "worst_decile", "macro_f1", "weighted_f1", "global_score", "cold_start"),
            *("rounds", "bytes_up", "bytes_down", "seconds", "wall_s", "bundles"),
        )
        if self.figure == ACCURACY:
            names = {n: ACCURACIES.get(n, n) for n in figures}
        else:
            names = {n: self.figure.name if n == "score" else n for n in figures if n not in OF_CLASSES}
        further = dict.fromkeys(name for run in self.runs for name in run.metrics)
        return [
            {"method": run.method, "seed": run.seed}
            | {said: getattr(run, name) for name, said in names.items()}
            | {name: run.metrics.get(name) for name in further}
            for run in self.runs
        ]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
            ConfigError: pandas is not installed.
        """
        return make_data_frame(self.to_rows())

    def plot(self, axes: Any = None) -> Any:
        """Draw the score by round on matplotlib axes (default: new ones) and return them."""
        from coordinator.simulation.reports.plots import draw_by_round

        return draw_by_round(self.runs, axes)

    @classmethod
    def read(cls, figures: bytes) -> Self:
        """Read a comparison from its JSON file.

        Raises:
            msgspec.DecodeError: the file holds no comparison.
        """
        return decode_figures(figures, cls)

    def __str__(self) -> str:
        """Return what `fedge compare` prints."""
        from coordinator.simulation.reports.terminal import print_comparison

        with (console := Console(no_color=True)).capture() as shown:
            print_comparison(self, console)
        return shown.get().rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from coordinator.simulation.reports.markup import render_table
        from coordinator.simulation.reports.report import format_row, list_headings, render_notebook
        from coordinator.simulation.reports.words import describe_comparison

        return render_notebook(
            describe_comparison(self),
            render_table(list_headings(self), (format_row(each, self) for each in self.methods)),
            self.runs,
        )


class Demonstration(Comparison, frozen=True, kw_only=True):
    """The results of `fedge demo`, as in its JSON file: ways to learn on one seed, the last of them by real processes.

    `learned_by`: the method of the last way. `wall_s`: seconds from start to end. `places`: places of devices in a
    plane, similar updates side by side; empty if the method compares no updates. `boards`: the board that each device
    stands for, and the share of a processor that it got. `choosing`: the method simulated with other choices of who
    trains, by the times that the devices took; empty if nobody was chosen.
    """

    learned_by: str
    broker: str
    wall_s: float
    places: dict[str, tuple[float, float]]
    boards: dict[str, str] = {}
    choosing: tuple[RunOutcome, ...] = ()

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row per device with its data, and its accuracy by each way to learn."""
        *_, ours = self.runs
        return [
            {
                "device": device.id,
                "n_train": device.n_train,
                "n_test": device.score.n,
                "rounds": device.trained,
                "cluster": " ".join(k for k, members in ours.clusters.items() if device.id in members),
                **{run.method: run.devices[number].score.value for run in self.runs},
            }
            for number, device in enumerate(ours.devices)
        ]
