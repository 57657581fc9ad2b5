"""The report's plots as SVG that lives inside a page: its colours are the page's own, in the light and in the dark.

Matplotlib draws with placeholder colours, and each placeholder is then replaced by a CSS variable of the page.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from coordinator.demo.outcome import METHODS, Background, Outcome

WIDTH_INCHES = 5.4  # 390 points: text keeps its size on a phone
N_COLOURS = 8
INK, FAINT, SURFACE = "#010203", "#020304", "#030405"
CLUSTERS = tuple(f"#04050{i}" for i in range(N_COLOURS))
BARS = dict(zip(METHODS, (f"#05060{i}" for i in range(len(METHODS))), strict=True))
VARIABLES = (
    {INK: "--ink", FAINT: "--faint", SURFACE: "--surface"}
    | {colour: f"--cluster-{i}" for i, colour in enumerate(CLUSTERS)}
    | {colour: f"--method-{i}" for i, colour in enumerate(BARS.values())}
)
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


def accuracy_by_round(background: Background) -> str:
    """Lines of validation accuracy over the rounds."""
    with figure(2.9) as (axes, svg):
        for name, curve in background.accuracy_by_round.items():
            label = background.method if name == "personalised" else METHODS[name]
            axes.plot([r for r, _ in curve], [a for _, a in curve], label=label, color=BARS[name], linewidth=1.8)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.legend(loc="lower right")
    return svg[0]


def cluster_map(outcome: Outcome, background: Background) -> str:
    """Devices by similarity of their updates: filled with the colour of their first cluster, ringed by true group."""
    assert background.places is not None
    first = {i: int(k) for k, members in reversed(list(outcome.clusters.items())) for i in members}
    rings = group_colours(background.groups, first)
    with figure(3.6) as (axes, svg):
        for device_id, (x, y) in zip(background.ids, background.places, strict=True):
            fill = CLUSTERS[first[device_id] % N_COLOURS] if device_id in first else FAINT
            ring = CLUSTERS[rings[background.groups[device_id]] % N_COLOURS]
            axes.scatter(x, y, s=300, facecolors=SURFACE, edgecolors=ring, linewidths=2, clip_on=False)
            axes.scatter(x, y, s=170, facecolors=fill, edgecolors="none", clip_on=False)
            label = "".join(re.findall(r"\d+$", device_id)) or device_id  # its number: a dot is small
            axes.annotate(label, (x, y), ha="center", va="center", fontsize=7, color=SURFACE, weight="bold")
        axes.set_xticklabels([])
        axes.set_yticklabels([])
        axes.margins(0.15)
        axes.set_aspect("equal", adjustable="datalim")
    return svg[0]


def group_colours(groups: Mapping[str, int], first: Mapping[str, int]) -> dict[int, int]:
    """A number for each true group: that of the cluster most of its devices are in, if no group before it has it."""
    numbers: dict[int, int] = {}
    for group in sorted(set(groups.values())):
        counts = Counter(first[i] for i, own in groups.items() if own == group and i in first)
        wanted = [*(k for k, _ in counts.most_common()), *range(len(counts) + len(numbers) + 1)]
        numbers[group] = next(k for k in wanted if k not in numbers.values())
    return numbers


def selection_counts(selection: Mapping[str, int]) -> str:
    """In how many rounds each device took part."""
    ids = sorted(selection)
    with figure(0.9 + 0.2 * len(ids)) as (axes, svg):
        axes.barh(ids, [selection[i] for i in ids], color=BARS["personalised"], height=0.62)
        axes.set_xlabel("rounds")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    return svg[0]


def device_bars(outcome: Outcome) -> str:
    """Per device one group of bars, one bar for each way to learn."""
    ids = [device.id for device in outcome.devices]
    height = 0.82 / len(METHODS)
    with figure(1.1 + 0.52 * len(ids)) as (axes, svg):
        for j, (name, label) in enumerate(METHODS.items()):
            middle = np.arange(len(ids)) + (j - (len(METHODS) - 1) / 2) * height
            values = [device.accuracy[name] for device in outcome.devices]
            axes.barh(middle, values, height=0.86 * height, color=BARS[name], label=label)
        axes.set_yticks(range(len(ids)), ids)
        axes.invert_yaxis()
        axes.set_xlim(_floor([v for d in outcome.devices for v in d.accuracy.values()]), 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(visible=False, axis="y")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1 + 0.55 / len(ids)), ncols=3, columnspacing=1.2)
    return svg[0]


def _floor(values: Sequence[float]) -> float:
    """Where the axis begins: a tenth below the smallest value, so that differences can be seen."""
    return max(0.0, math.floor(min(values) * 10 - 1) / 10)


@contextmanager
def figure(height_inches: float) -> Iterator[tuple[Axes, list[str]]]:
    """An empty plot; its SVG is in the list when the block ends."""
    svg: list[str] = []
    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", facecolor="none")
        FigureCanvasSVG(drawing)
        yield drawing.add_subplot(), svg
        file = io.StringIO()
        drawing.savefig(file, format="svg", metadata={"Date": None})
    svg.append(_for_a_page(file.getvalue()))


def _for_a_page(svg: str) -> str:
    """SVG file -> SVG element without links, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
    return re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match[0]]})", svg)
