"""A comparison or a run as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from coordinator.fleet import problems
from coordinator.simulation.reports.outcome import (
    SPENT,
    RunOutcome,
    compute_cost,
    find_without_bundle,
    format_megabytes,
)
from coordinator.simulation.reports.words import (
    NOTHING,
    describe_redraws,
    describe_unequipped,
    find_second,
    format_cost,
    format_difference,
    format_spread,
    get_second,
    has_clock,
    is_tested_globally,
)
from fedge.data.problems.scores import ACCURACY, Figure, get_figure

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Spread


UNPRINTED: Final = frozenset({"auroc"})
"""Figures of classification that reports and files have, but no terminal."""
GLOBAL: Final = "global: the models that devices are served, each on samples from all devices' distributions"


def make_table(comparison: Comparison) -> Table:
    """Make the comparison's table for 80 columns: means, and standard deviations of figures that depend on seeds."""
    found = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # as narrow as it goes: names of variants are long
    found.add_column("method", overflow="fold")
    clock = has_clock(comparison)
    some = ["global"] if is_tested_globally(comparison) else []
    some += ["new"] if comparison.scenario.late_joiners else []
    figure, second = comparison.figure, find_second(comparison)
    beside = [] if second is None else [second.short]
    for heading in (figure.words, "− base", "− best", "worst", *beside, *some, "MB", "r", *(["s"] if clock else [])):
        found.add_column(heading, justify="right", no_wrap=True)
    best = max(method.score.mean for method in comparison.methods)
    for method in comparison.methods:
        found.add_row(
            method.method,
            format_spread(method.score, figure),
            format_difference(method.to_baseline, figure),
            format_difference(method.to_best_other, figure),
            figure.format_cell(method.worst_decile.mean),
            *([] if second is None else [format_mean(get_second(method, second), second)]),
            *([] if method.global_score is None else [figure.format_cell(method.global_score.mean)]),
            *([] if method.cold_start is None else [figure.format_cell(method.cold_start.mean)]),
            f"{(method.bytes_up.mean + method.bytes_down.mean) / 1e6:.1f}",
            NOTHING if method.cost is None else str(method.cost.round),
            *([NOTHING if method.cost is None else f"{method.cost.seconds:.1f}"] if clock else []),
            style="bold" if method.score.mean == best else "",
        )
    return found


def format_mean(spread: Spread | None, figure: Figure) -> str:
    """Format a mean over the seeds."""
    return NOTHING if spread is None else figure.format_cell(spread.mean)


def print_comparison(comparison: Comparison, console: Console, *more: str) -> None:
    """Print the comparison, what its columns mean, and more lines."""
    console.print(
        make_table(comparison), describe_columns(comparison), *more, sep="\n", highlight=False, soft_wrap=True
    )


def describe_columns(comparison: Comparison) -> str:
    """Describe the columns in the terminal."""
    several, figure, second = len(comparison.seeds) > 1, comparison.figure, find_second(comparison)
    lines = [
        f"{figure.words}: mean over the devices of their bundles on own test samples{', percent' * figure.share}"
        f"{', ± over seeds' * several}",
        f"− base: to {comparison.baseline}{', seed by seed' * several}; − best: to the best other method, picked in "
        "hindsight",
        f"worst: lowest tenth of the devices; {describe_second(figure, second)}MB: up and down",
        *([GLOBAL] if is_tested_globally(comparison) else []),
        f"r{', s' * has_clock(comparison)}: rounds{' and simulated seconds' * has_clock(comparison)} until "
        f"{figure.format(comparison.target)} {'were' if figure.share else 'was'} seen; in the "
        "report, too: bytes until then, deviation over the devices",
    ]
    if comparison.scenario.late_joiners:
        lines.append(
            f"new: {figure.words} of the devices that came when training was over; the other figures leave them out"
        )
    for name in sorted({name for method in comparison.methods for name in method.details if name.startswith(SPENT)}):
        most = [f"{m.method} {max(m.details[name].seeds):.2f}" for m in comparison.methods if name in m.details]
        lines.append(f"{name}, the most of a device: {', '.join(most)}")
    lines += [note for note in (describe_unequipped(comparison.runs), describe_redraws(comparison.runs)) if note]
    return "\n".join(lines)


def describe_second(figure: Figure, second: Figure | None) -> str:
    """Describe the column of the second figure, if its heading does not say it."""
    return "" if second is None or figure == ACCURACY else f"{second.short}: mean {second.words} over the devices; "


def list_figures(outcome: RunOutcome, target: float | None) -> list[tuple[str, str]]:
    """List a single run's names and figures for a terminal."""
    overall, figure = NOTHING, outcome.figure
    whole, cell = figure.format, figure.format_cell
    if outcome.global_score is not None:
        whose = "experts and gate" if outcome.experts > 1 else "served models"
        overall = f"{figure.format(outcome.global_score)}  ({whose}, on samples from all devices' distributions)"
    experts = f"{outcome.experts} for all devices, and a gate" if outcome.experts > 1 else "one shared model"
    n_late = sum(device.late_joiner for device in outcome.devices)
    n_measured = len(outcome.devices) - n_late
    lines = [
        (figure.words, f"{whole(outcome.score)}  ± {cell(outcome.std)} over {n_measured} devices"),
        ("worst 10 %", f"{whole(outcome.worst_decile)}  (lowest {whole(outcome.minimum)})"),
        *([] if outcome.macro_f1 is None else [("macro F1", whole(outcome.macro_f1))]),
        *(
            (get_figure(name).words, get_figure(name).format(value))
            for name, value in outcome.metrics.items()
            if outcome.macro_f1 is None or name not in UNPRINTED
        ),
        (f"global {figure.words}", overall),
        ("experts", f"{len(outcome.clusters)} clusters" if outcome.split else experts),
        ("traffic", f"{format_megabytes(outcome.bytes_up)} up, {format_megabytes(outcome.bytes_down)} down"),
        ("simulated time", f"{outcome.seconds:.1f} s"),
        *((name, f"{value:.2f}") for name, value in outcome.details.items()),
        ("bundles", f"{outcome.bundles} of {len(outcome.devices)}, torch − ONNX Runtime <= {outcome.max_abs_diff:.0e}"),
        *(
            [("without one", without)]
            if (without := problems.describe_reasons(find_without_bundle(outcome.devices)))
            else []
        ),
        ("took", f"{outcome.wall_s:.1f} s, of which measuring {outcome.evaluation_s:.1f} s"),
    ]
    if outcome.cold_start is not None:
        place = next(k for k, (name, _) in enumerate(lines) if name == "experts")
        lines.insert(place, ("late joiners", f"{whole(outcome.cold_start)}  over {n_late} devices"))
    if target is not None:
        lines.append((f"until {whole(target)}", format_cost(compute_cost(outcome.curve, target))))
    return lines
