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
from coordinator.simulation.reports.markup import (
    render_columns,
    render_page,
    render_rows,
    render_section,
    render_table,
    render_tiles,
)
from coordinator.simulation.reports.outcome import RunOutcome, format_csv, format_megabytes
from coordinator.simulation.reports.terminal import list_figures
from coordinator.simulation.reports.words import (
    NOTHING,
    describe_axis,
    describe_comparison,
    describe_demo,
    describe_partition,
    describe_run,
    format_cost,
    format_difference,
    format_percent,
    format_points,
    is_tested_globally,
)
from coordinator.simulation.settings import Scenario
from coordinator.watch.accuracy import find_trained, summarise_accuracy
from fedge.system.files import write_atomically

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Demonstration, MethodOutcome

FILES: Final = ("report.html", "figures.json", "figures.csv", "accuracy.svg")


# --------------------------------------------------------------------------------------------------------- the pages


class Report(NamedTuple):
    """The results of a demo, run, comparison or federation: HTML page, JSON figures, their rows, and a plot (SVG)."""

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
        texts = report.page, figures.decode(), format_csv(report.rows), plots.to_file(report.plot)
        for name, text in zip(FILES, texts, strict=True):
            write_atomically(folder / name, text.encode())
    write_json(json_file, figures)


def render_curves(runs: Sequence[RunOutcome]) -> str:
    """Render accuracy against rounds, traffic and time."""
    begins = describe_axis(plots.compute_floor([run.accuracy for run in runs]))
    seeds = " Shade: from the lowest seed to the highest." if len({run.seed for run in runs}) > 1 else ""
    model = f"The model each device would use, on its own test samples. Dot: the installed bundles.{seeds}"
    curves = {
        "Accuracy by round": model,
        "Accuracy by traffic": "Models and updates, up and down together, of all devices.",
        "Accuracy by time": "The simulated clock of the devices and their links.",
    }
    parts = zip(curves.items(), plots.AXES, strict=True)
    return render_columns(
        *(render_section(title, f"{text} {begins}", plots.draw_curves(runs, x)) for (title, text), x in parts)
    )


# ------------------------------------------------------------------------------------------------------ a comparison


def make_comparison_report(comparison: Comparison) -> Report:
    """Report the results of `fedge compare`."""
    shown = render_page(
        f"fedge compare: {comparison.scenario.task}, {describe_partition(comparison.scenario)}",
        describe_comparison(comparison),
        render_methods(comparison),
        render_curves(comparison.runs),
        render_seeds(comparison) if len(comparison.seeds) > 1 else "",
        render_section(
            "The methods' own numbers",
            "Silhouette: of the last clusters, from -1 to 1; where clusters overlap, of each membership.",
            render_table(("Method", "Number", "Mean"), numbers),
        )
        if (numbers := list_own_rows(comparison))
        else "",
        render_section(
            "Further figures", "Means over the devices.", render_table(("Method", "Figure", "Mean"), further)
        )
        if (further := list_further_rows(comparison))
        else "",
    )
    return Report(shown, comparison, comparison.to_rows(), plots.draw_curves(comparison.runs))


def render_seeds(comparison: Comparison) -> str:
    """Render the table of the seeds."""
    head = "Method", *map(str, comparison.seeds)
    return render_section(
        "Seed by seed",
        "Mean accuracy over the devices, percent.",
        render_table(head, map(format_seed_row, comparison.methods)),
    )


def render_methods(comparison: Comparison) -> str:
    """Render the table of the methods."""
    several = "Percent, mean ± standard deviation over the seeds. Differences are paired by seed."
    one = "Percent, of one seed: how far another would be from it is not known."
    return render_section(
        "All methods",
        f"{several if len(comparison.seeds) > 1 else one} The best other method is picked in hindsight, which flatters "
        "it. Over devices: standard deviation of their accuracies.",
        render_table(list_headings(comparison), map(format_row, comparison.methods)),
    )


def render_notebook(lead: str, shown: str, runs: Sequence[RunOutcome]) -> str:
    """Render a table and the curves as the output of a notebook's cell."""
    svg = plots.fix_colours(plots.draw_curves(runs))
    return f'<p>{escape(lead)}</p>{shown}<div style="max-width: 560px; background: #ffffff">{svg}</div>'


def list_headings(comparison: Comparison) -> tuple[str, ...]:
    """List the headings of the table on the page."""
    return (
        *("Method", "Accuracy", f"− {comparison.baseline}", "− best other"),
        *("Over devices", "Worst 10 %", "Macro F1"),
        *(["Global"] if is_tested_globally(comparison) else []),
        *(["Late joiners"] if comparison.scenario.late_joiners else []),
        *("Traffic", f"Cost of {100 * comparison.target:.1f} %", "s / run"),
    )


def format_row(method: MethodOutcome) -> tuple[str, ...]:
    """Format a method's row of the table."""
    return (
        method.method,
        format_percent(method.accuracy),
        format_difference(method.to_baseline),
        f"{format_difference(method.to_best_other)} {method.best_other or ''}".strip(),
        format_percent(method.std),
        format_percent(method.worst_decile),
        format_percent(method.macro_f1),
        *([] if method.global_accuracy is None else [format_percent(method.global_accuracy)]),
        *([] if method.cold_start is None else [format_percent(method.cold_start)]),
        format_megabytes(method.bytes_up.mean + method.bytes_down.mean),
        format_cost(method.cost),
        f"{method.wall_s.mean:.1f}",
    )


def format_seed_row(method: MethodOutcome) -> tuple[str, ...]:
    """Format a method's mean accuracy on each seed."""
    return (method.method, *(f"{100 * accuracy:.1f}" for accuracy in method.accuracy.seeds))


def list_own_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """List the methods' own figures, such as the clusters' silhouette: method, name, mean over the seeds."""
    return [
        (method.method, name, f"{figure.mean:.2f} ±{figure.std:.2f}" if len(figure.seeds) > 1 else f"{figure.mean:.2f}")
        for method in comparison.methods
        for name, figure in method.details.items()
    ]


def list_further_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """List the figures beside accuracy and F1, such as the AUROC: method, name, mean over the seeds."""
    return [
        (method.method, name, f"{figure.mean:.4g} ±{figure.std:.2g}" if len(figure.seeds) > 1 else f"{figure.mean:.4g}")
        for method in comparison.methods
        for name, figure in method.metrics.items()
    ]


# ------------------------------------------------------------------------------------------------------------- a run


def make_run_report(outcome: RunOutcome, scenario: Scenario, target: float | None = None) -> Report:
    """Report the results of `fedge simulate`."""
    shown = render_page(
        f"fedge simulate: {outcome.method} on {scenario.task}, {describe_partition(scenario)}",
        describe_run(outcome, scenario),
        render_section("In short", "", render_table(("", ""), list_figures(outcome, target))),
        render_curves([outcome]),
        render_counts(outcome),
        render_section(
            "Device by device",
            "Percent; after weighted F1, figures in their own units. Trained: in so many rounds.",
            render_rows(outcome.to_rows(), outcome.metrics),
        ),
    )
    return Report(shown, outcome, outcome.to_rows(), plots.draw_curves([outcome]))


def render_counts(outcome: RunOutcome) -> str:
    """Render the confusion matrix, if there is one."""
    found = outcome.counts
    if found is None:
        return ""
    rows = [(name, *map(str, row)) for name, row in zip(found.rows, found.counts, strict=True)]
    text = f"Test {found.unit} of all devices by what they are (rows) and what the bundles say (columns)."
    return render_section("Right and wrong answers", text, render_table(("", *found.columns), rows))


# ------------------------------------------------------------------------------------------------------------ a demo


def make_demo_report(demo: Demonstration) -> Report:
    """Report the results of `fedge demo`."""
    rows = demo.to_rows()
    shared = {"fedavg": "fedavg", "personal": f"{demo.learned_by}, shared"}  # names of the others keep their colours
    validation = {
        shared.get(run.method, run.method): run.validation if run.method in shared else {} for run in demo.runs
    }
    plot = plots.draw_validation(validation)
    *_, ours = demo.runs
    if len(demo.places) > 1 and ours.clusters:
        cluster_map = plots.draw_cluster_map(demo)
    else:
        why = "This method made no clusters" if demo.places else "This method compares no updates"
        cluster_map = f"<p>{why}: there is nothing to draw.</p>"
    shown = render_page(
        f"fedge demo: {demo.scenario.task}, {len(rows)} devices",
        describe_demo(demo),
        render_tiles(_list_demo_tiles(demo)),
        render_methods(demo),
        render_columns(
            render_section(
                "Shared models by round",
                "The shared model each device received, on its own validation samples, before it trained. These are "
                "not the table's figures: those are of what devices have at the end, on test samples.",
                plot,
            ),
            render_section(
                "Cluster map",
                "Devices whose updates point the same way lie close. Dot: first cluster found. Ring: true group."
                if ours.clusters
                else "",
                cluster_map,
            ),
            render_section(
                "Device by device",
                f"Test accuracy. {describe_axis(plots.compute_floor(plots.list_accuracies(demo.runs)))}",
                plots.draw_device_bars(demo.runs),
            ),
        ),
        render_section(
            "All figures",
            "Accuracies in percent. Rounds: in which an update of the device was accepted.",
            render_rows(rows),
        ),
    )
    return Report(shown, demo, rows, plot)


def _list_demo_tiles(demo: Demonstration) -> list[tuple[str, str]]:
    mean = {run.method: run.accuracy for run in demo.runs}
    *_, ours = demo.runs
    return [
        (f"{100 * ours.accuracy:.1f} %", "personalised accuracy"),
        (format_points(ours.accuracy - mean["fedavg"]), "points above FedAvg"),
        (format_points(ours.accuracy - mean["local"]), "points above local only"),
        (format_points(ours.accuracy - mean["fedavg+ft"]), "points above fine-tuned"),
        (f"{format_megabytes(ours.bytes_up)} ↑", f"{format_megabytes(ours.bytes_down)} ↓"),
        (f"{demo.wall_s:.0f} s", "from start to end"),
    ]


# ------------------------------------------------------------------------------------------------------ a federation


def make_federation_report(summary: dict[str, Any]) -> Report:
    """Report on a coordinator's home, with the figures of `fedge status`."""
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
    plot = plots.draw_validation({summary["method"]: curve})
    shown_first = summarise_accuracy(summary.get("fleet", {}).values(), find_trained(summary["history"]))
    figures = [
        (f"{summary['round']} of {summary['rounds']}", "rounds"),
        *([(f"{100 * each.share:.1f} %", f"accuracy {each.of}") for each in shown_first] or [(NOTHING, "accuracy")]),
        (f"{len(summary['installed'])} of {len(ids)}", "devices have a bundle"),
        (f"{format_megabytes(summary['bytes_up'])} ↑", f"{format_megabytes(summary['bytes_down'])} ↓"),
    ]
    shown = render_page(
        f"fedge coordinator: {summary['federation']}, {summary['method']}",
        f"Seed {summary['seed']}. Accuracies are on validation samples of the devices that were asked in a round.",
        render_tiles(figures),
        render_section("Accuracy by round", "The shared model each device received, before it trained.", plot),
        render_section("Device by device", "", render_rows(rows)),
    )
    return Report(shown, summary, rows, plot)
