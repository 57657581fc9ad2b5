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
    format_cost,
    format_difference,
    format_percent,
    has_clock,
    is_tested_globally,
)

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison


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
    for heading in ("accuracy", "− base", "− best", "worst", "F1", *some, "MB", "r", *(["s"] if clock else [])):
        found.add_column(heading, justify="right", no_wrap=True)
    best = max(method.accuracy.mean for method in comparison.methods)
    for method in comparison.methods:
        found.add_row(
            method.method,
            format_percent(method.accuracy),
            format_difference(method.to_baseline),
            format_difference(method.to_best_other),
            f"{100 * method.worst_decile.mean:.1f}",
            f"{100 * method.macro_f1.mean:.1f}",
            *([] if method.global_accuracy is None else [f"{100 * method.global_accuracy.mean:.1f}"]),
            *([] if method.cold_start is None else [f"{100 * method.cold_start.mean:.1f}"]),
            f"{(method.bytes_up.mean + method.bytes_down.mean) / 1e6:.1f}",
            NOTHING if method.cost is None else str(method.cost.round),
            *([NOTHING if method.cost is None else f"{method.cost.seconds:.1f}"] if clock else []),
            style="bold" if method.accuracy.mean == best else "",
        )
    return found


def print_comparison(comparison: Comparison, console: Console, *more: str) -> None:
    """Print the comparison, what its columns mean, and more lines."""
    console.print(
        make_table(comparison), describe_columns(comparison), *more, sep="\n", highlight=False, soft_wrap=True
    )


def describe_columns(comparison: Comparison) -> str:
    """Describe the columns in the terminal."""
    several = len(comparison.seeds) > 1
    lines = [
        f"accuracy: mean over the devices of their bundles on own test samples, percent{', ± over seeds' * several}",
        f"− base: to {comparison.baseline}{', seed by seed' * several}; − best: to the best other method, picked in "
        "hindsight",
        "worst: lowest tenth of the devices; MB: up and down",
        *([GLOBAL] if is_tested_globally(comparison) else []),
        f"r{', s' * has_clock(comparison)}: rounds{' and simulated seconds' * has_clock(comparison)} until "
        f"{100 * comparison.target:.1f} % were seen; in the report, too: bytes until then, deviation over the devices",
    ]
    if comparison.scenario.late_joiners:
        lines.append("new: accuracy of the devices that came when training was over; the other figures leave them out")
    for name in sorted({name for method in comparison.methods for name in method.details if name.startswith(SPENT)}):
        most = [f"{m.method} {max(m.details[name].seeds):.2f}" for m in comparison.methods if name in m.details]
        lines.append(f"{name}, the most of a device: {', '.join(most)}")
    lines += [note for note in (describe_unequipped(comparison.runs), describe_redraws(comparison.runs)) if note]
    return "\n".join(lines)


def list_figures(outcome: RunOutcome, target: float | None) -> list[tuple[str, str]]:
    """List a single run's names and figures for a terminal."""
    overall = NOTHING
    if outcome.global_accuracy is not None:
        overall = f"{100 * outcome.global_accuracy:.1f} %  (served models, on samples from all devices' distributions)"
    experts = f"{len(outcome.clusters)} clusters" if outcome.split else "one shared model"
    n_late = sum(device.late_joiner for device in outcome.devices)
    n_measured = len(outcome.devices) - n_late
    lines = [
        ("accuracy", f"{100 * outcome.accuracy:.1f} %  ± {100 * outcome.std:.1f} over {n_measured} devices"),
        ("worst 10 %", f"{100 * outcome.worst_decile:.1f} %  (lowest {100 * outcome.minimum:.1f} %)"),
        *([] if outcome.macro_f1 is None else [("macro F1", f"{100 * outcome.macro_f1:.1f} %")]),
        *(
            (name, f"{value:.4g}")
            for name, value in outcome.metrics.items()
            if outcome.macro_f1 is None or name not in UNPRINTED
        ),
        ("global accuracy", overall),
        ("experts", experts),
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
        lines.insert(4, ("late joiners", f"{100 * outcome.cold_start:.1f} %  over {n_late} devices"))
    if target is not None:
        lines.append((f"until {100 * target:.1f} %", format_cost(compute_cost(outcome.curve, target))))
    return lines
