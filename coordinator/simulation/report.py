"""A comparison for people: the table of the terminal, and one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from coordinator.demo.outcome import megabytes
from coordinator.demo.report import page_style, points, table
from coordinator.simulation import plots
from coordinator.simulation.compare import Comparison, MethodOutcome, Spread
from coordinator.simulation.outcome import Cost, RunOutcome
from coordinator.simulation.settings import Partition, Scenario
from fedge.files import write_atomically

NOTHING: Final = "–"


def write_report(path: Path, comparison: Comparison) -> None:
    """Draw the report.

    Raises:
        StoreError: the file cannot be written.
    """
    write_atomically(path, render(comparison).encode())


def render(comparison: Comparison) -> str:
    """The report as HTML."""
    template = Template(files("coordinator.simulation").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        style=page_style(),
        title=escape(f"fedge compare: {comparison.scenario.task}, {setting_of(comparison.scenario)}"),
        lead=escape(lead(comparison)),
        methods=table(headings(comparison), [row(method) for method in comparison.methods]),
        by_round=plots.by_round(comparison.runs),
        by_bytes=plots.by_bytes(comparison.runs),
        by_seconds=plots.by_seconds(comparison.runs),
        seeds=table(("Method", *map(str, comparison.seeds)), [seed_row(method) for method in comparison.methods]),
        own=table(("Method", "Number", "Mean"), own_rows(comparison)),
    )


def setting_of(scenario: Scenario) -> str:
    """The partition in a few words."""
    how = scenario.partition
    skew = f"α {scenario.alpha:g}"
    words = {
        Partition.DIRICHLET: f"Dirichlet, {skew}",
        Partition.GROUPS: f"{scenario.n_groups} groups by {scenario.groups}, {skew}",
        Partition.SHARDS: f"{scenario.shards} shards, {scenario.iid_share:.0%} dealt evenly",
        Partition.NATURAL: "people",
        Partition.IID: "no skew",
    }
    return words[how]


def lead(comparison: Comparison) -> str:
    """What was done, in a few sentences."""
    scenario = comparison.scenario
    n_devices = len(comparison.runs[0].devices)
    return (
        f"{n_devices} simulated devices, {setting_of(scenario)}; {scenario.rounds} rounds of {work_of(scenario)}, "
        f"participation {scenario.participation:.0%}, {scenario.sensitive:.0%} of the training samples marked "
        f"sensitive; seeds {', '.join(map(str, comparison.seeds))}. Accuracies are of the installed bundles, run by "
        "ONNX Runtime on each device's own test samples, which no choice has seen. "
        f"Cost: rounds, traffic and simulated time until {comparison.target:.1%} mean accuracy was seen."
        f" {milder(comparison.runs)}".rstrip()
    )


def work_of(scenario: Scenario) -> str:
    """What a device does in a round."""
    epochs = scenario.local_epochs
    return f"{scenario.local_steps} steps" if epochs is None else f"{epochs} epoch{'s' * (epochs > 1)}"


def milder(runs: Sequence[RunOutcome]) -> str:
    """By seed how often the partition was drawn and how many samples were moved; empty if neither, or not known."""
    found = {}
    for run in runs:
        if (run.draws or 1) > 1 or run.moved:
            found[run.seed] = f"{run.draws} draws, {run.moved} samples moved"
    if not found:
        return ""
    by_seed = "; ".join(f"seed {seed}: {text}" for seed, text in sorted(found.items()))
    return f"Devices differ less than was asked for, so that each has samples enough: {by_seed}."


def headings(comparison: Comparison) -> tuple[str, ...]:
    """Of the table, on the page and in the terminal."""
    return (
        *("Method", "Accuracy", f"− {comparison.baseline}", "− best other"),
        *("Over devices", "Worst 10 %", "Macro F1", "Global"),
        *(["Newcomers"] if comparison.scenario.newcomers else []),
        *("Traffic", f"Cost of {100 * comparison.target:.1f} %", "s / run"),
    )


def row(method: MethodOutcome) -> tuple[str, ...]:
    """A method's line of the table."""
    return (
        method.method,
        percent(method.accuracy),
        difference(method.to_baseline),
        f"{difference(method.to_best_other)} {method.best_other or ''}".strip(),
        percent(method.std),
        percent(method.worst_decile),
        percent(method.macro_f1),
        NOTHING if method.global_accuracy is None else percent(method.global_accuracy),
        *([] if method.cold_start is None else [percent(method.cold_start)]),
        megabytes(round(method.bytes_up.mean + method.bytes_down.mean)),
        cost(method.cost),
        f"{method.wall_s.mean:.1f}",
    )


def seed_row(method: MethodOutcome) -> tuple[str, ...]:
    """A method's mean accuracy on each seed."""
    return (method.method, *(f"{100 * accuracy:.1f}" for accuracy in method.accuracy.seeds))


def own_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """What methods tell of themselves, such as the silhouette of their clusters: method, name, mean over the seeds."""
    return [
        (method.method, name, f"{figure.mean:.2f} ±{figure.std:.2f}" if len(figure.seeds) > 1 else f"{figure.mean:.2f}")
        for method in comparison.methods
        for name, figure in method.details.items()
    ] or [(NOTHING,) * 3]


def percent(figure: Spread) -> str:
    """Mean and, over several seeds, standard deviation."""
    spread = f" ±{100 * figure.std:.1f}" if len(figure.seeds) > 1 else ""
    return f"{100 * figure.mean:.1f}{spread}"


def difference(figure: Spread | None) -> str:
    """In percentage points, with sign."""
    if figure is None:
        return NOTHING
    spread = f" ±{100 * figure.std:.1f}" if len(figure.seeds) > 1 else ""
    return f"{points(figure.mean)}{spread}"


def cost(found: Cost | None) -> str:
    """Rounds, bytes and simulated time."""
    if found is None:
        return "not reached"
    return f"{found.round} r, {megabytes(found.bytes)}, {found.seconds:.1f} s"


def table_of(comparison: Comparison) -> Table:
    """The comparison for a terminal of 80 columns: means; standard deviations where seeds decide."""
    found = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # as narrow as it goes: names of variants are long
    found.add_column("method", overflow="fold")
    new = ["new"] if comparison.scenario.newcomers else []
    for heading in ("accuracy", "− base", "− best", "worst", "F1", "global", *new, "MB", "r", "s"):
        found.add_column(heading, justify="right", no_wrap=True)
    best = max(method.accuracy.mean for method in comparison.methods)
    for method in comparison.methods:
        found.add_row(
            method.method,
            percent(method.accuracy),
            difference(method.to_baseline),
            difference(method.to_best_other),
            f"{100 * method.worst_decile.mean:.1f}",
            f"{100 * method.macro_f1.mean:.1f}",
            NOTHING if method.global_accuracy is None else f"{100 * method.global_accuracy.mean:.1f}",
            *([] if method.cold_start is None else [f"{100 * method.cold_start.mean:.1f}"]),
            f"{(method.bytes_up.mean + method.bytes_down.mean) / 1e6:.1f}",
            NOTHING if method.cost is None else str(method.cost.round),
            NOTHING if method.cost is None else f"{method.cost.seconds:.1f}",
            style="bold" if method.accuracy.mean == best else "",
        )
    return found


def legend_of(comparison: Comparison) -> str:
    """What the columns of the terminal's table are."""
    lines = [
        "accuracy: mean over the devices of their bundles on own test samples, percent, ± over seeds",
        f"− base: to {comparison.baseline}, seed by seed; − best: to the best other method, picked in hindsight",
        "worst: lowest tenth of the devices; global: served model on the global test set; MB: up and down",
        f"r, s: rounds and simulated seconds until {100 * comparison.target:.1f} % were seen",
        "in the report, too: deviation over the devices, bytes until then, numbers of the methods' own (silhouette)",
    ]
    if comparison.scenario.newcomers:
        lines.append("new: accuracy of the devices that came when training was over; the other figures leave them out")
    if told := milder(comparison.runs):
        lines.append(told)
    return "\n".join(lines)


def lines_of(outcome: RunOutcome, target: Cost | None, goal: float | None) -> list[tuple[str, str]]:
    """A single run for a terminal: names and figures."""
    experts = f"{len(outcome.clusters)} clusters" if outcome.split else "one shared model"
    n_newcomers = sum(device.newcomer for device in outcome.devices)
    n_measured = len(outcome.devices) - n_newcomers
    lines = [
        ("accuracy", f"{100 * outcome.accuracy:.1f} %  ± {100 * outcome.std:.1f} over {n_measured} devices"),
        ("worst 10 %", f"{100 * outcome.worst_decile:.1f} %  (lowest {100 * outcome.minimum:.1f} %)"),
        ("macro F1", f"{100 * outcome.macro_f1:.1f} %"),
        ("global accuracy", NOTHING if outcome.global_accuracy is None else f"{100 * outcome.global_accuracy:.1f} %"),
        ("experts", experts),
        ("traffic", f"{megabytes(outcome.bytes_up)} up, {megabytes(outcome.bytes_down)} down"),
        ("simulated time", f"{outcome.seconds:.1f} s"),
        *((name, f"{value:.2f}") for name, value in outcome.details.items()),
        ("bundles", f"{outcome.bundles} of {len(outcome.devices)}, torch − ONNX Runtime <= {outcome.max_abs_diff:.0e}"),
        ("took", f"{outcome.wall_s:.1f} s, of which measuring {outcome.evaluation_s:.1f} s"),
    ]
    if outcome.cold_start is not None:
        lines.insert(4, ("newcomers", f"{100 * outcome.cold_start:.1f} %  over {n_newcomers} devices"))
    if goal is not None:
        lines.append((f"until {100 * goal:.1f} %", cost(target)))
    return lines
