"""The reports of demos, runs and comparisons: one self-contained HTML file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

from coordinator.methods.options import write_json
from coordinator.simulation.reports import plots
from coordinator.simulation.reports.choosing import render_choices, render_choosing
from coordinator.simulation.reports.markup import (
    render_columns,
    render_page,
    render_rows,
    render_section,
    render_table,
    render_tiles,
)
from coordinator.simulation.reports.outcome import RunOutcome, encode_figures, format_csv, format_megabytes
from coordinator.simulation.reports.terminal import list_figures
from coordinator.simulation.reports.words import (
    NOTHING,
    describe_axis,
    describe_comparison,
    describe_demo,
    describe_partition,
    describe_run,
    find_second,
    format_cost,
    format_difference,
    format_spread,
    get_second,
    is_tested_globally,
    name_all,
)
from coordinator.simulation.settings import Scenario
from coordinator.watch.accuracy import find_figure, find_trained, summarise_accuracy
from fedge.data.problems.scores import ACCURACY, Figure, get_figure
from fedge.system.files import write_atomically

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Demonstration, MethodOutcome

FILES: Final = ("report.html", "figures.json", "figures.csv", "accuracy.svg")


# --------------------------------------------------------------------------------------------------------- the pages


class Report(NamedTuple):
    """The results of a demo, run, comparison or federation: HTML page, JSON figures, their rows, and a plot (SVG).

    `figure`: how people read the score.
    """

    page: str
    outcome: Struct | dict[str, Any]
    rows: Sequence[Mapping[str, Any]]
    plot: str
    figure: Figure = ACCURACY


def write_results(folder: Path | None, report: Report, json_file: Path | None = None) -> None:
    """Write `FILES` into the folder, and the figures as `--json` asks.

    Raises:
        StoreError: a file cannot be written.
    """
    figures = encode_figures(report.outcome, report.figure)
    if folder is not None:
        texts = report.page, figures.decode(), format_csv(report.rows), plots.to_file(report.plot)
        for name, text in zip(FILES, texts, strict=True):
            write_atomically(folder / name, text.encode())
    write_json(json_file, figures)


def render_curves(runs: Sequence[RunOutcome]) -> str:
    """Render the score against rounds, traffic and time."""
    figure = runs[0].figure
    begins, name = (
        describe_axis(plots.compute_floor([run.score for run in runs], figure)),
        make_heading(figure.words),
    )
    seeds = " Shade: from the lowest seed to the highest." if len({run.seed for run in runs}) > 1 else ""
    model = f"The model each device would use, on its own test samples. Dot: the installed bundles.{seeds}"
    curves = {
        f"{name} by round": model,
        f"{name} by traffic": "Models and updates, up and down together, of all devices.",
        f"{name} by time": "The simulated clock of the devices and their links.",
    }
    parts = zip(curves.items(), plots.AXES, strict=True)
    return render_columns(
        *(render_section(title, f"{text} {begins}".rstrip(), plots.draw_curves(runs, x)) for (title, text), x in parts)
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
            "Further figures",
            "Means over the devices, shares in percent.",
            render_table(("Method", "Figure", "Mean"), further),
        )
        if (further := list_further_rows(comparison))
        else "",
    )
    return Report(shown, comparison, comparison.to_rows(), plots.draw_curves(comparison.runs), comparison.figure)


def render_seeds(comparison: Comparison) -> str:
    """Render the table of the seeds."""
    head = "Method", *map(str, comparison.seeds)
    return render_section(
        "Seed by seed",
        f"Mean {comparison.figure.words} over the devices{', percent' * comparison.figure.share}.",
        render_table(head, (format_seed_row(method, comparison.figure) for method in comparison.methods)),
    )


def render_methods(comparison: Comparison) -> str:
    """Render the table of the methods."""
    figure = comparison.figure
    percent, of_one = ("Percent, mean", "Percent, of one") if figure.share else ("Mean", "Of one")
    several = f"{percent} ± standard deviation over the seeds. Differences are paired by seed."
    one = f"{of_one} seed: how far another would be from it is not known."
    all_ = "accuracies" if figure == ACCURACY else f"{figure.words}"
    return render_section(
        "All methods",
        f"{several if len(comparison.seeds) > 1 else one} The best other method is picked in hindsight, which flatters "
        f"it. Over devices: standard deviation of their {all_}.",
        render_table(list_headings(comparison), (format_row(method, comparison) for method in comparison.methods)),
    )


def render_notebook(lead: str, shown: str, runs: Sequence[RunOutcome]) -> str:
    """Render a table and the curves as the output of a notebook's cell."""
    svg = plots.fix_colours(plots.draw_curves(runs))
    return f'<p>{escape(lead)}</p>{shown}<div style="max-width: 560px; background: #ffffff">{svg}</div>'


def list_headings(comparison: Comparison) -> tuple[str, ...]:
    """List the headings of the table on the page."""
    figure = comparison.figure
    second = find_second(comparison)
    return (
        *("Method", make_heading(figure.words), f"− {comparison.baseline}", "− best other"),
        *("Over devices", "Worst 10 %", *([] if second is None else [make_heading(second.words)])),
        *(["Global"] if is_tested_globally(comparison) else []),
        *(["Late joiners"] if comparison.scenario.late_joiners else []),
        *("Traffic", f"Cost of {figure.format(comparison.target)}", "s / run"),
    )


def make_heading(words: str) -> str:
    """Return words with a large first letter."""
    return words[:1].upper() + words[1:]


def format_row(method: MethodOutcome, comparison: Comparison) -> tuple[str, ...]:
    """Format a method's row of the table."""
    figure = comparison.figure
    second = find_second(comparison)
    return (
        method.method,
        format_spread(method.score, figure),
        format_difference(method.to_baseline, figure),
        f"{format_difference(method.to_best_other, figure)} {method.best_other or ''}".strip(),
        format_spread(method.std, figure),
        format_spread(method.worst_decile, figure),
        *([] if second is None else [format_spread(get_second(method, second), second)]),
        *([] if method.global_score is None else [format_spread(method.global_score, figure)]),
        *([] if method.cold_start is None else [format_spread(method.cold_start, figure)]),
        format_megabytes(method.bytes_up.mean + method.bytes_down.mean),
        format_cost(method.cost),
        f"{method.wall_s.mean:.1f}",
    )


def format_seed_row(method: MethodOutcome, figure: Figure) -> tuple[str, ...]:
    """Format a method's mean score on each seed."""
    return (method.method, *map(figure.format_cell, method.score.seeds))


def list_own_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """List the methods' own figures, such as the clusters' silhouette: method, name, mean over the seeds."""
    return [
        (method.method, name, f"{figure.mean:.2f} ±{figure.std:.2f}" if len(figure.seeds) > 1 else f"{figure.mean:.2f}")
        for method in comparison.methods
        for name, figure in method.details.items()
    ]


def list_further_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """List the further figures, such as the AUROC: method, name, mean over the seeds, shares in percent."""
    return [
        (method.method, get_figure(name).words, format_spread(spread, get_figure(name)))
        for method in comparison.methods
        for name, spread in method.metrics.items()
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
        render_choices(outcome.choices, {}),
        render_section(
            "Device by device",
            f"{describe_unit(outcome.figure)}Trained: in so many rounds.",
            render_rows(outcome.to_rows(), outcome.figure, outcome.metrics),
        ),
    )
    return Report(shown, outcome, outcome.to_rows(), plots.draw_curves([outcome]), outcome.figure)


def describe_unit(figure: Figure) -> str:
    """Describe the units of the table of devices."""
    if figure == ACCURACY:
        return "Percent; after weighted F1, figures in their own units. "
    return "Percent; further figures in their own units. " if figure.share else ""


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
    figure = demo.figure
    plot = plots.draw_validation(validation, figure)
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
        render_choosing(demo),
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
                f"Test {figure.words}. {describe_axis(plots.compute_floor(plots.list_accuracies(demo.runs), figure))}",
                plots.draw_device_bars(demo.runs),
            ),
        ),
        render_choices(ours.choices, {i: f"{i}: {board}" for i, board in demo.boards.items()}),
        render_section(
            "All figures",
            f"{'Accuracies in percent. ' if figure.share else ''}Rounds: in which an update of the device was "
            "accepted.",
            render_rows(rows, figure),
        ),
    )
    return Report(shown, demo, rows, plot, figure)


def _list_demo_tiles(demo: Demonstration) -> list[tuple[str, str]]:
    mean = {run.method: run.score for run in demo.runs}
    *_, ours = demo.runs
    figure, points = demo.figure, "points " * demo.figure.share
    return [
        (figure.format(ours.score), f"personalised {figure.words}"),
        (figure.format_cell(ours.score - mean["fedavg"], "+"), f"{points}above FedAvg"),
        (figure.format_cell(ours.score - mean["local"], "+"), f"{points}above local only"),
        (figure.format_cell(ours.score - mean["fedavg+ft"], "+"), f"{points}above fine-tuned"),
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
    figure = find_figure(summary)
    plot = plots.draw_validation({summary["method"]: curve}, figure)
    shown_first = summarise_accuracy(summary.get("fleet", {}).values(), find_trained(summary["history"]))
    figures = [
        (f"{summary['round']} of {summary['rounds']}", "rounds"),
        *([(figure.format(s.share), f"{figure.words} {s.of}") for s in shown_first] or [(NOTHING, figure.words)]),
        (f"{len(summary['installed'])} of {len(ids)}", "devices have a bundle"),
        (f"{format_megabytes(summary['bytes_up'])} ↑", f"{format_megabytes(summary['bytes_down'])} ↓"),
    ]
    shown = render_page(
        f"fedge coordinator: {summary['federation']}, {summary['method']}",
        f"Seed {summary['seed']}. {name_all(figure)} on validation samples of the devices that were asked in a round.",
        render_tiles(figures),
        render_section(
            f"{make_heading(figure.words)} by round", "The shared model each device received, before it trained.", plot
        ),
        render_section("Device by device", "", render_rows(rows)),
    )
    return Report(shown, summary, rows, plot, figure)
