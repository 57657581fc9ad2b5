"""The report's curves: accuracy against rounds, bytes and simulated seconds, a line for each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from coordinator.demo.plots import CLUSTERS, N_COLOURS, figure
from coordinator.simulation.outcome import Point, RunOutcome

STYLES = ("-", "--", ":")
"""Of the lines, from one round through the colours to the next."""


def by_round(runs: Sequence[RunOutcome]) -> str:
    """Accuracy against rounds of training."""
    return _curves(runs, "round", lambda point: point.round)


def by_bytes(runs: Sequence[RunOutcome]) -> str:
    """Accuracy against megabytes up and down together."""
    return _curves(runs, "MB up and down", lambda point: (point.bytes_up + point.bytes_down) / 1e6)


def by_seconds(runs: Sequence[RunOutcome]) -> str:
    """Accuracy against the simulated clock."""
    return _curves(runs, "simulated seconds", lambda point: point.seconds)


def _curves(runs: Sequence[RunOutcome], label: str, x: Callable[[Point], float]) -> str:
    """Means over the seeds, point by point; the shade reaches from the lowest seed to the highest."""
    methods = tuple(dict.fromkeys(run.method for run in runs))
    with figure(3.4) as (axes, svg):
        for number, method in enumerate(methods):
            curves = common_points([run.curve for run in runs if run.method == method])
            places = np.array([[x(point) for point in curve] for curve in curves]).mean(axis=0)
            accuracy = np.array([[point.accuracy for point in curve] for curve in curves])
            colour, style = CLUSTERS[number % N_COLOURS], STYLES[number // N_COLOURS % len(STYLES)]
            if len(places) > 2:  # a method of one round has no curve
                axes.plot(places, accuracy.mean(axis=0), style, label=method, color=colour, linewidth=1.6)
            name = "" if len(places) > 2 else method
            axes.plot(places[-1], accuracy[:, -1].mean(), "o", label=name, color=colour, markersize=4)  # the bundles
            if len(curves) > 1 and len(places) > 2:
                axes.fill_between(places, accuracy.min(axis=0), accuracy.max(axis=0), color=colour, alpha=0.12, lw=0)
        axes.set_ylim(bottom=floor_of([run.accuracy for run in runs]))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=label == "round"))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.legend(loc="lower right", ncols=1 + len(methods) // 7)
    return svg[0]


def common_points(curves: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """The points of those rounds in which every curve has one, and each curve's last: a method may end early."""
    rounds = set.intersection(*({point.round for point in curve[:-1]} for curve in curves))
    return [[*(point for point in curve[:-1] if point.round in rounds), curve[-1]] for curve in curves]


def floor_of(final: Sequence[float]) -> float:
    """Where the axis begins: a tenth to a fifth below the lowest end, for all curves begin at guessing."""
    return max(0.0, math.floor(min(final) * 10 - 1) / 10)
