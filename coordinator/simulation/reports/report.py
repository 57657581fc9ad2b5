"""The reports of demos, runs and comparisons: one self-contained HTML file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.methods.options import write_json
from coordinator.simulation.reports import plots
from coordinator.simulation.reports.markup import columns, page, rows_of, section, table, tiles
from coordinator.simulation.reports.outcome import RunOutcome, as_csv, megabytes
from coordinator.simulation.reports.terminal import lines_of
from coordinator.simulation.reports.words import (
    NOTHING,
    axis,
    cost,
    demo_lead,
    difference,
    lead,
    percent,
    points,
    run_lead,
    setting_of,
    tested_globally,
)
from coordinator.simulation.settings import Scenario
from fedge.system.files import write_atomically

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Demonstration, MethodOutcome

FILES: Final = ("report.html", "figures.json", "figures.csv", "accuracy.svg")


# --------------------------------------------------------------------------------------------------------- the pages


class Report(NamedTuple):
    """The results of a demo, run, comparison or federation: a page, its figures, rows of them, and a plot (SVG)."""

    page: str
    outcome: Struct | dict[str, Any]
    rows: Sequence[Mapping[str, Any]]
    plot: str


def write_results(folder: Path | None, report: Report, json_file: Path | None = None) -> None:
    """Write `FILES` into the folder, and the figures as `--json` asks.

    Raises:
        StoreError: a file cannot be written.
    """
    figures = msgspec.json.format(msgspec.json.encode(report.outcome, enc_hook=str), indent=1)
    if folder is not None:
        texts = report.page, figures.decode(), as_csv(report.rows), plots.as_file(report.plot)
        for name, text in zip(FILES, texts, strict=True):
            write_atomically(folder / name, text.encode())
    write_json(json_file, figures)


def curves(runs: Sequence[RunOutcome]) -> str:
    """Accuracy against rounds, traffic and time."""
    begins = axis(plots.floor_of([run.accuracy for run in runs]))
    seeds = " Shade: from the lowest seed to the highest." if len({run.seed for run in runs}) > 1 else ""
    model = f"The model each device would use, on its own test samples. Dot: the installed bundles.{seeds}"
    told = {
        "Accuracy by round": model,
        "Accuracy by traffic": "Models and updates, up and down together, of all devices.",
        "Accuracy by time": "The simulated clock of the devices and their links.",
    }
    parts = zip(told.items(), plots.AXES, strict=True)
    return columns(*(section(title, f"{text} {begins}", plots.curves(runs, x)) for (title, text), x in parts))


# ------------------------------------------------------------------------------------------------------ a comparison


def of_comparison(comparison: Comparison) -> Report:
    """The results of `fedge compare`."""
    shown = page(
        f"fedge compare: {comparison.scenario.task}, {setting_of(comparison.scenario)}",
        lead(comparison),
        all_methods(comparison),
        curves(comparison.runs),
        seed_by_seed(comparison) if len(comparison.seeds) > 1 else "",
        section(
            "The methods' own numbers",
            "Silhouette: of the last clusters, from -1 to 1; where clusters overlap, of each membership.",
            table(("Method", "Number", "Mean"), numbers),
        )
        if (numbers := own_rows(comparison))
        else "",
    )
    return Report(shown, comparison, comparison.rows(), plots.curves(comparison.runs))


def seed_by_seed(comparison: Comparison) -> str:
    """The table of the seeds."""
    head = "Method", *map(str, comparison.seeds)
    return section(
        "Seed by seed", "Mean accuracy over the devices, percent.", table(head, map(seed_row, comparison.methods))
    )


def all_methods(comparison: Comparison) -> str:
    """The table of the methods."""
    several = "Percent, mean ± standard deviation over the seeds. Differences are paired by seed."
    one = "Percent, of one seed: how far another would be from it is not known."
    return section(
        "All methods",
        f"{several if len(comparison.seeds) > 1 else one} The best other method is picked in hindsight, which flatters "
        "it. Over devices: standard deviation of their accuracies.",
        table(headings(comparison), map(row, comparison.methods)),
    )


def in_a_notebook(lead: str, shown: str, runs: Sequence[RunOutcome]) -> str:
    """A table and the curves for a cell's output."""
    svg = plots.without_a_page(plots.curves(runs))
    return f'<p>{escape(lead)}</p>{shown}<div style="max-width: 560px; background: #ffffff">{svg}</div>'


def headings(comparison: Comparison) -> tuple[str, ...]:
    """Headings of the table on the page."""
    return (
        *("Method", "Accuracy", f"− {comparison.baseline}", "− best other"),
        *("Over devices", "Worst 10 %", "Macro F1"),
        *(["Global"] if tested_globally(comparison) else []),
        *(["Late joiners"] if comparison.scenario.late_joiners else []),
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
        *([] if method.global_accuracy is None else [percent(method.global_accuracy)]),
        *([] if method.cold_start is None else [percent(method.cold_start)]),
        megabytes(method.bytes_up.mean + method.bytes_down.mean),
        cost(method.cost),
        f"{method.wall_s.mean:.1f}",
    )


def seed_row(method: MethodOutcome) -> tuple[str, ...]:
    """A method's mean accuracy on each seed."""
    return (method.method, *(f"{100 * accuracy:.1f}" for accuracy in method.accuracy.seeds))


def own_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """The methods' own figures, such as the silhouette of their clusters: method, name, mean over the seeds."""
    return [
        (method.method, name, f"{figure.mean:.2f} ±{figure.std:.2f}" if len(figure.seeds) > 1 else f"{figure.mean:.2f}")
        for method in comparison.methods
        for name, figure in method.details.items()
    ]


# ------------------------------------------------------------------------------------------------------------- a run


def of_run(outcome: RunOutcome, scenario: Scenario, target: float | None = None) -> Report:
    """The results of `fedge simulate`."""
    shown = page(
        f"fedge simulate: {outcome.method} on {scenario.task}, {setting_of(scenario)}",
        run_lead(outcome, scenario),
        section("In short", "", table(("", ""), lines_of(outcome, target))),
        curves([outcome]),
        section("Device by device", "Percent. Trained: in so many rounds.", rows_of(outcome.rows())),
    )
    return Report(shown, outcome, outcome.rows(), plots.curves([outcome]))


# ------------------------------------------------------------------------------------------------------------ a demo


def of_demo(demo: Demonstration) -> Report:
    """The results of `fedge demo`."""
    rows = demo.rows()
    shared = {"fedavg": "fedavg", "personal": f"{demo.learned_by}, shared"}  # names of the others keep their colours
    told = {shared.get(run.method, run.method): run.validation if run.method in shared else {} for run in demo.runs}
    plot = plots.accuracy_by_round(told)
    *_, ours = demo.runs
    if len(demo.places) > 1 and ours.clusters:
        cluster_map = plots.cluster_map(demo)
    else:
        why = "This method made no clusters" if demo.places else "This method compares no updates"
        cluster_map = f"<p>{why}: there is nothing to draw.</p>"
    shown = page(
        f"fedge demo: {demo.scenario.task}, {len(rows)} devices",
        demo_lead(demo),
        tiles(_demo_tiles(demo)),
        all_methods(demo),
        columns(
            section(
                "Shared models by round",
                "The shared model each device received, on its own validation samples, before it trained. These are "
                "not the table's figures: those are of what devices have at the end, on test samples.",
                plot,
            ),
            section(
                "Cluster map",
                "Devices whose updates point the same way lie close. Dot: first cluster found. Ring: true group."
                if ours.clusters
                else "",
                cluster_map,
            ),
            section(
                "Device by device",
                f"Test accuracy. {axis(plots.floor_of(plots.accuracies(demo.runs)))}",
                plots.device_bars(demo.runs),
            ),
        ),
        section(
            "All figures",
            "Accuracies in percent. Rounds: in which an update of the device was accepted.",
            rows_of(rows),
        ),
    )
    return Report(shown, demo, rows, plot)


def _demo_tiles(demo: Demonstration) -> list[tuple[str, str]]:
    mean = {run.method: run.accuracy for run in demo.runs}
    *_, ours = demo.runs
    return [
        (f"{100 * ours.accuracy:.1f} %", "personalised accuracy"),
        (points(ours.accuracy - mean["fedavg"]), "points above FedAvg"),
        (points(ours.accuracy - mean["local"]), "points above local only"),
        (points(ours.accuracy - mean["fedavg+ft"]), "points above fine-tuned"),
        (f"{megabytes(ours.bytes_up)} ↑", f"{megabytes(ours.bytes_down)} ↓"),
        (f"{demo.wall_s:.0f} s", "from start to end"),
    ]


# ------------------------------------------------------------------------------------------------------ a federation


def of_federation(summary: dict[str, Any]) -> Report:
    """A coordinator's home as a page, with the figures of `fedge status`."""
    curve = {line["round"]: line["accuracy"] for line in summary["history"] if line["accuracy"] is not None}
    ids = sorted({*summary["devices"], *summary["selection"], *summary["problems"]})
    rows: list[dict[str, Any]] = [
        {
            "device": device,
            "presence": summary["devices"].get(device, "not seen"),
            "trained": summary["selection"].get(device, 0),
            "bundle": device in summary["installed"],
            "problem": summary["problems"].get(device, {}).get("reason", ""),
        }
        for device in ids
    ] or [dict.fromkeys(("device", "presence"), "")]
    plot = plots.accuracy_by_round({summary["method"]: curve})
    figures = [
        (f"{summary['round']} of {summary['rounds']}", "rounds"),
        (f"{100 * list(curve.values())[-1]:.1f} %" if curve else NOTHING, "validation accuracy, last cohort"),
        (f"{len(summary['installed'])} of {len(ids)}", "devices have a bundle"),
        (f"{megabytes(summary['bytes_up'])} ↑", f"{megabytes(summary['bytes_down'])} ↓"),
    ]
    shown = page(
        f"fedge coordinator: {summary['federation']}, {summary['method']}",
        f"Seed {summary['seed']}. Accuracies are on validation samples of the devices that were asked in a round.",
        tiles(figures),
        section("Accuracy by round", "The shared model each device received, before it trained.", plot),
        section("Device by device", "", rows_of(rows)),
    )
    return Report(shown, summary, rows, plot)
