"""The plots of all reports, as SVG inside a page, in the page's light and dark colours.

Matplotlib draws with placeholder colours, which are then replaced by CSS variables of the page. It is imported
where something is drawn, since most runs draw nothing.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedge.data.problems.scores import ACCURACY, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from coordinator.simulation.reports.comparison import Demonstration
    from coordinator.simulation.reports.outcome import Point, RunOutcome

if find_spec("matplotlib") is None:  # said before a run, not when its report is drawn
    raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

WIDTH_INCHES = 5.4  # 390 points: text keeps its size on a phone
N_COLOURS = 8
INK, FAINT, SURFACE = "#010203", "#020304", "#030405"
CLUSTERS = tuple(f"#04050{i}" for i in range(N_COLOURS))
VARIABLES = {INK: "--ink", FAINT: "--faint", SURFACE: "--surface"} | {
    colour: f"--cluster-{i}" for i, colour in enumerate(CLUSTERS)
}
LINES = ("-", "--", ":")
"""Line styles of methods; the next style begins when all colours are used."""
AXES: Final[Mapping[str, Callable[[Point], float]]] = {
    "round": lambda point: point.round,
    "MB up and down": lambda point: (point.bytes_up + point.bytes_down) / 1e6,
    "simulated seconds": lambda point: point.seconds,
}
"""Axes against which the score is drawn: rounds of training, traffic, and the simulated clock."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedge",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw_curves(runs: Sequence[RunOutcome], label: str = "round") -> str:
    """Draw the score against one of `AXES`, as SVG."""
    with open_figure(3.4) as (axes, svg):
        _draw(axes, runs, label, CLUSTERS)
    return svg[0]


def draw_by_round(runs: Sequence[RunOutcome], axes: Any = None) -> Any:
    """Draw the score against rounds on matplotlib axes (default: new ones of pyplot) and return them."""
    if axes is None:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots()
    light = read_light_colours()
    _draw(axes, runs, "round", [light[f"--cluster-{i}"] for i in range(N_COLOURS)])
    return axes


def _draw(axes: Axes, runs: Sequence[RunOutcome], label: str, colours: Sequence[str]) -> None:
    """Draw means over the seeds, point by point, with a shade from the lowest seed to the highest."""
    from matplotlib.ticker import MaxNLocator

    methods = tuple(dict.fromkeys(run.method for run in runs))
    for number, method in enumerate(methods):
        curves = select_common_points([run.curve for run in runs if run.method == method])
        places = np.array([[AXES[label](point) for point in curve] for curve in curves]).mean(axis=0)
        accuracy = np.array([[point.score for point in curve] for curve in curves])
        colour, style = colours[number % N_COLOURS], LINES[number // N_COLOURS % len(LINES)]
        if len(places) > 2:  # a method of one round has no curve
            axes.plot(places, accuracy.mean(axis=0), style, label=method, color=colour, linewidth=1.6)
        name = "" if len(places) > 2 else method
        axes.plot(places[-1], accuracy[:, -1].mean(), "o", label=name, color=colour, markersize=4)  # the bundles
        if len(curves) > 1 and len(places) > 2:
            axes.fill_between(places, accuracy.min(axis=0), accuracy.max(axis=0), color=colour, alpha=0.12, lw=0)
    figure = runs[0].figure
    axes.set_ylim(bottom=(floor := compute_floor([run.score for run in runs], figure)))
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=label == "round"))
    set_axis(axes.yaxis, figure.words, floor)
    axes.legend(loc="lower right", ncols=1 + len(methods) // 7)


def select_common_points(curves: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """Select the points of rounds that every curve has, and each curve's last point, since a method may end early."""
    rounds = set.intersection(*({point.round for point in curve[:-1]} for curve in curves))
    return [[*(point for point in curve[:-1] if point.round in rounds), curve[-1]] for curve in curves]


def draw_validation(by_method: Mapping[str, Mapping[int, float]], figure: Figure = ACCURACY) -> str:
    """Draw the score on validation samples over the rounds; a method without one still takes up its colour."""
    from matplotlib.ticker import MaxNLocator

    with open_figure(2.9) as (axes, svg):
        for colour, (method, curve) in zip(CLUSTERS, by_method.items(), strict=False):
            if curve:
                axes.plot(list(curve), list(curve.values()), label=method, color=colour, linewidth=1.8)
        seen = [accuracy for curve in by_method.values() for accuracy in curve.values()]
        axes.set_ylim(bottom=(floor := compute_floor(seen or [0.0], figure)))
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        set_axis(axes.yaxis, f"validation {figure.words}", floor)
        if any(by_method.values()):
            axes.legend(loc="lower right")
    return svg[0]


def draw_cluster_map(demo: Demonstration) -> str:
    """Draw devices by similarity of their updates, in the colour of the first cluster with a ring of the true group."""
    *_, ours = demo.runs
    groups = {device.id: device.group for device in ours.devices}
    first = {i: int(k) for k, members in reversed(list(ours.clusters.items())) for i in members}
    rings = choose_group_colours(groups, first)
    with open_figure(3.6) as (axes, svg):
        for device_id, (x, y) in demo.places.items():
            fill = CLUSTERS[first[device_id] % N_COLOURS] if device_id in first else FAINT
            ring = CLUSTERS[rings[groups[device_id]] % N_COLOURS]
            axes.scatter(x, y, s=300, facecolors=SURFACE, edgecolors=ring, linewidths=2, clip_on=False)
            axes.scatter(x, y, s=170, facecolors=fill, edgecolors="none", clip_on=False)
            label = "".join(re.findall(r"\d+$", device_id)) or device_id  # its number: a dot is small
            axes.annotate(label, (x, y), ha="center", va="center", fontsize=7, color=SURFACE, weight="bold")
        axes.set_xticklabels([])
        axes.set_yticklabels([])
        axes.margins(0.15)
        axes.set_aspect("equal", adjustable="datalim")
    return svg[0]


def choose_group_colours(groups: Mapping[str, int], first: Mapping[str, int]) -> dict[int, int]:
    """Choose each true group's number, that of the cluster with most of its devices unless an earlier group has it."""
    numbers: dict[int, int] = {}
    for group in sorted(set(groups.values())):
        counts = Counter(first[i] for i, own in groups.items() if own == group and i in first)
        wanted = [*(k for k, _ in counts.most_common()), *range(len(counts) + len(numbers) + 1)]
        numbers[group] = next(k for k in wanted if k not in numbers.values())
    return numbers


def draw_device_bars(runs: Sequence[RunOutcome]) -> str:
    """Draw a group of bars per device, one bar per run."""
    ids = [device.id for device in runs[0].devices]
    height = 0.82 / len(runs)
    with open_figure(1.1 + 0.52 * len(ids)) as (axes, svg):
        for j, run in enumerate(runs):
            middle = np.arange(len(ids)) + (j - (len(runs) - 1) / 2) * height
            values = [device.score.value for device in run.devices]
            axes.barh(middle, values, height=0.86 * height, color=CLUSTERS[j % N_COLOURS], label=run.method)
        axes.set_yticks(range(len(ids)), ids)
        axes.invert_yaxis()
        figure = runs[0].figure
        floor = compute_floor(list_accuracies(runs), figure)
        axes.set_xlim(floor, None if floor is None else 1)
        set_axis(axes.xaxis, f"test {figure.words}", floor)
        axes.grid(visible=False, axis="y")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1 + 0.55 / len(ids)), ncols=3, columnspacing=1.2)
    return svg[0]


def set_axis(axis: Axis, what: str, floor: float | None) -> None:
    """Label the axis of a score, which gives the axis' start. Shares have ticks at round percents."""
    if floor is None:
        axis.set_label_text(what)
        return
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{round(100 * share, 6):g}%"))
    axis.set_label_text(f"{what}, from {floor:.0%}" if floor else what)


def list_accuracies(runs: Sequence[RunOutcome]) -> list[float]:
    """List the accuracies in `draw_device_bars`."""
    return [device.score.value for run in runs for device in run.devices]


def compute_floor(values: Sequence[float], figure: Figure = ACCURACY) -> float | None:
    """Choose the start of an axis, a tenth to a fifth below the smallest share, so that differences are visible.

    None if the score is no share: then the axis begins where the values do.
    """
    if not figure.share:
        return None
    return max(0.0, math.floor(min(values) * 10 - 1) / 10)


@contextmanager
def open_figure(height_inches: float) -> Iterator[tuple[Axes, list[str]]]:
    """Open an empty plot; its SVG is in the list when the block ends."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    svg: list[str] = []
    with rc_context(STYLE):
        drawing = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", facecolor="none")
        FigureCanvasSVG(drawing)
        yield drawing.add_subplot(), svg
        file = io.StringIO()
        drawing.savefig(file, format="svg", metadata={"Date": None})
    svg.append(_adapt_to_page(file.getvalue()))


def _adapt_to_page(svg: str) -> str:
    """Make an SVG file an SVG element without links, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
    return re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match[0]]})", svg)


def read_light_colours() -> dict[str, str]:
    """Read the page's variables as colours of its light mode, for use without a page."""
    style = files("coordinator.simulation.reports").joinpath("page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"(--[\w-]+): (#\w+)", style.partition("@media")[0]))


def to_file(svg: str) -> str:
    """Return an SVG element of `open_figure` as a complete file."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return fix_colours(svg).replace("<svg", f"<svg {names}", 1)


def fix_colours(svg: str) -> str:
    """Return an SVG element of `open_figure` in fixed colours, for a notebook."""
    light = read_light_colours()
    return re.sub(r"var\((--[\w-]+)\)", lambda match: light[match[1]], svg)
