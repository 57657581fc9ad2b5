"""The reports of demos, runs and comparisons: one self-contained HTML file each, and text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from coordinator.fleet import problems
from coordinator.methods.options import write_json
from coordinator.simulation.reports import plots
from coordinator.simulation.reports.outcome import SPENT, Cost, RunOutcome, as_csv, cost_of, megabytes, without_bundle
from coordinator.simulation.settings import Scenario
from fedge.system.files import write_atomically

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Demonstration, MethodOutcome, Spread

NOTHING: Final = "–"
NARROW: Final = 4
"""Columns that fit on a phone."""
GLOBAL: Final = "global: the models that devices are served, each on samples from all devices' distributions"
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


def page(title: str, lead: str, *content: str) -> str:
    """A whole page; `content` is HTML, the rest text."""
    template = Template(_resource("page.html"))
    return template.substitute(
        style=_resource("page.css"), title=escape(title), lead=escape(lead), content="\n".join(content)
    )


def section(title: str, text: str, content: str) -> str:
    """A part of a page; `content` is HTML."""
    said = f"<p>{escape(text)}</p>\n" if text else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{said}{content}\n</section>"


def columns(*sections: str) -> str:
    """Sections side by side where there is room."""
    return '<div class="columns">\n' + "\n".join(sections) + "\n</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts as HTML; if it is too wide, it scrolls by itself, and a wide one says so on a phone."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    whole = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll{" wide" * (len(head) > NARROW)}" tabindex="0">{whole}</div>'


def rows_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a CSV file as a table: shares in percent."""
    words = {True: "yes", False: "no"}

    def shown(cell: object) -> str:
        if isinstance(cell, float):
            return f"{100 * cell:.1f}"
        return words[cell] if isinstance(cell, bool) else str(cell)

    head = [name.removeprefix("n_").replace("_", " ") for name in rows[0]]
    return table(head, ([shown(cell) for cell in row.values()] for row in rows))


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Figures in large letters, with captions."""
    found = (f"<div><strong>{escape(big)}</strong><span>{escape(small)}</span></div>" for big, small in figures)
    return '<div class="tiles">\n' + "\n".join(found) + "\n</div>"


def axis(floor: float) -> str:
    """The caption for the start of an axis of accuracies."""
    return f"The axis begins at {floor:.0%}." if floor else "The axis begins at zero."


def _resource(name: str) -> str:
    return files("coordinator.simulation.reports").joinpath(name).read_text(encoding="utf-8")


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


def setting_of(scenario: Scenario) -> str:
    """The partition in a few words."""
    how = scenario.partition
    skew = f"α {scenario.alpha:g}"
    even = f"{scenario.iid_share:.0%} spread evenly"
    words = {
        "dirichlet": f"Dirichlet, {skew}" + (f", {even}" if scenario.iid_share else ""),
        "groups": f"{scenario.n_groups} groups by {scenario.groups}, {skew}",
        "shards": f"{scenario.shards} shards, {even}",
        "natural": "people",
        "iid": "no skew",
        "generated": f"made by number, turned in {scenario.n_groups} groups, {skew}",
    }
    return words[how]


def lead(comparison: Comparison) -> str:
    """A summary of the setting, in a few sentences."""
    scenario = comparison.scenario
    n_devices = len(comparison.runs[0].devices)
    return (
        f"{n_devices} simulated devices, {setting_of(scenario)}; {scenario.rounds} rounds of {work_of(scenario)}, "
        f"participation {scenario.participation:.0%}, {scenario.sensitive:.0%} of the training samples marked "
        f"sensitive; {seeds_of(comparison)}. Accuracies are of the installed bundles, run by "
        "ONNX Runtime on each device's own test samples, which no choice has seen. "
        "Global: the models that devices are served, each on samples from all devices' distributions. "
        f"Cost: rounds, traffic and simulated time until {comparison.target:.1%} mean accuracy was seen."
        f" {unequipped(comparison.runs)} {milder(comparison.runs)}".rstrip()
    )


def seeds_of(comparison: Comparison) -> str:
    """The seeds in words."""
    return f"seed{'s' * (len(comparison.seeds) > 1)} {', '.join(map(str, comparison.seeds))}"


def work_of(scenario: Scenario) -> str:
    """A device's work in a round."""
    epochs = scenario.local_epochs
    return f"{scenario.local_steps} steps" if epochs is None else f"{epochs} epoch{'s' * (epochs > 1)}"


def unequipped(runs: Sequence[RunOutcome]) -> str:
    """In which runs devices ended without a bundle, and what their figures are of; empty: in none."""
    found = [
        f"{run.method}, seed {run.seed}: {len(run.devices) - run.bundles} of {len(run.devices)}"
        f" ({problems.told(without_bundle(run.devices))})"
        for run in runs
        if run.bundles < len(run.devices)
    ]
    if not found:
        return ""
    return f"Devices without a bundle are measured by the model that they are served: {'; '.join(found)}."


def milder(runs: Sequence[RunOutcome]) -> str:
    """How often the partition was drawn and how many samples were moved, by seed; empty: neither, or unknown."""
    found = {}
    for run in runs:
        if (run.draws or 1) > 1 or run.moved:
            found[run.seed] = f"{run.draws} draws, {run.moved} samples moved"
    if not found:
        return ""
    by_seed = "; ".join(f"seed {seed}: {text}" for seed, text in sorted(found.items()))
    return f"Devices differ less than requested, so that each has enough samples: {by_seed}."


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


def percent(figure: Spread) -> str:
    """Mean and, over several seeds, standard deviation."""
    return f"{100 * figure.mean:.1f}{_deviation(figure)}"


def difference(figure: Spread | None) -> str:
    """In percentage points, with sign."""
    return NOTHING if figure is None else f"{points(figure.mean)}{_deviation(figure)}"


def _deviation(figure: Spread) -> str:
    return f" ±{100 * figure.std:.1f}" if len(figure.seeds) > 1 else ""


def cost(found: Cost | None) -> str:
    """Rounds, bytes and simulated time."""
    if found is None:
        return "not reached"
    time = f", {found.seconds:.1f} s" if found.seconds else ""  # there may be no clock
    return f"{found.round} r, {megabytes(found.bytes)}{time}"


def table_of(comparison: Comparison) -> Table:
    """The comparison for a terminal of 80 columns: means; standard deviations where seeds decide."""
    found = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # as narrow as it goes: names of variants are long
    found.add_column("method", overflow="fold")
    clock = has_clock(comparison)
    some = ["global"] if tested_globally(comparison) else []
    some += ["new"] if comparison.scenario.late_joiners else []
    for heading in ("accuracy", "− base", "− best", "worst", "F1", *some, "MB", "r", *(["s"] if clock else [])):
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
            *([] if method.global_accuracy is None else [f"{100 * method.global_accuracy.mean:.1f}"]),
            *([] if method.cold_start is None else [f"{100 * method.cold_start.mean:.1f}"]),
            f"{(method.bytes_up.mean + method.bytes_down.mean) / 1e6:.1f}",
            NOTHING if method.cost is None else str(method.cost.round),
            *([NOTHING if method.cost is None else f"{method.cost.seconds:.1f}"] if clock else []),
            style="bold" if method.accuracy.mean == best else "",
        )
    return found


def tested_globally(comparison: Comparison) -> bool:
    """Whether there is a global test set."""
    return comparison.methods[0].global_accuracy is not None


def has_clock(comparison: Comparison) -> bool:
    """Whether devices take simulated time."""
    return comparison.scenario.hardware != "none"


def show(comparison: Comparison, console: Console, *more: str) -> None:
    """Print the comparison, what its columns mean, and more lines."""
    console.print(table_of(comparison), legend_of(comparison), *more, sep="\n", highlight=False, soft_wrap=True)


def legend_of(comparison: Comparison) -> str:
    """The meaning of the columns in the terminal."""
    several = len(comparison.seeds) > 1
    lines = [
        f"accuracy: mean over the devices of their bundles on own test samples, percent{', ± over seeds' * several}",
        f"− base: to {comparison.baseline}{', seed by seed' * several}; − best: to the best other method, picked in "
        "hindsight",
        "worst: lowest tenth of the devices; MB: up and down",
        *([GLOBAL] if tested_globally(comparison) else []),
        f"r{', s' * has_clock(comparison)}: rounds{' and simulated seconds' * has_clock(comparison)} until "
        f"{100 * comparison.target:.1f} % were seen; in the report, too: bytes until then, deviation over the devices",
    ]
    if comparison.scenario.late_joiners:
        lines.append("new: accuracy of the devices that came when training was over; the other figures leave them out")
    for name in sorted({name for method in comparison.methods for name in method.details if name.startswith(SPENT)}):
        most = [f"{m.method} {max(m.details[name].seeds):.2f}" for m in comparison.methods if name in m.details]
        lines.append(f"{name}, the most of a device: {', '.join(most)}")
    lines += [note for note in (unequipped(comparison.runs), milder(comparison.runs)) if note]
    return "\n".join(lines)


def lines_of(outcome: RunOutcome, target: float | None) -> list[tuple[str, str]]:
    """A single run for a terminal: names and figures."""
    overall = NOTHING
    if outcome.global_accuracy is not None:
        overall = f"{100 * outcome.global_accuracy:.1f} %  (served models, on samples from all devices' distributions)"
    experts = f"{len(outcome.clusters)} clusters" if outcome.split else "one shared model"
    n_late = sum(device.late_joiner for device in outcome.devices)
    n_measured = len(outcome.devices) - n_late
    lines = [
        ("accuracy", f"{100 * outcome.accuracy:.1f} %  ± {100 * outcome.std:.1f} over {n_measured} devices"),
        ("worst 10 %", f"{100 * outcome.worst_decile:.1f} %  (lowest {100 * outcome.minimum:.1f} %)"),
        ("macro F1", f"{100 * outcome.macro_f1:.1f} %"),
        ("global accuracy", overall),
        ("experts", experts),
        ("traffic", f"{megabytes(outcome.bytes_up)} up, {megabytes(outcome.bytes_down)} down"),
        ("simulated time", f"{outcome.seconds:.1f} s"),
        *((name, f"{value:.2f}") for name, value in outcome.details.items()),
        ("bundles", f"{outcome.bundles} of {len(outcome.devices)}, torch − ONNX Runtime <= {outcome.max_abs_diff:.0e}"),
        *([("without one", without)] if (without := problems.told(without_bundle(outcome.devices))) else []),
        ("took", f"{outcome.wall_s:.1f} s, of which measuring {outcome.evaluation_s:.1f} s"),
    ]
    if outcome.cold_start is not None:
        lines.insert(4, ("late joiners", f"{100 * outcome.cold_start:.1f} %  over {n_late} devices"))
    if target is not None:
        lines.append((f"until {100 * target:.1f} %", cost(cost_of(outcome.curve, target))))
    return lines


# ------------------------------------------------------------------------------------------------------------- a run


def run_lead(outcome: RunOutcome, scenario: Scenario) -> str:
    """A summary of the setting, in a few sentences."""
    return (
        f"{len(outcome.devices)} simulated devices, {setting_of(scenario)}; {scenario.rounds} rounds of "
        f"{work_of(scenario)}, participation {scenario.participation:.0%}; seed {outcome.seed}. Accuracies are of the "
        "installed bundles, run by ONNX Runtime on each device's own test samples, which no choice has seen. "
        f"{unequipped([outcome])} {milder([outcome])}".rstrip()
    )


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


def demo_lead(demo: Demonstration) -> str:
    """A summary of the demo, in a few sentences."""
    *_, ours = demo.runs
    split = f"It made {len(ours.clusters)} clusters with a model each."
    return (
        f"{len(ours.devices)} devices learned “{demo.scenario.task}” ({setting_of(demo.scenario)}) in {ours.rounds} "
        f"rounds of {demo.learned_by} over MQTT ({demo.broker}), seed {ours.seed}. "
        f"{split if ours.split else 'It made no clusters: devices share one model, or none.'} "
        "Accuracies are on each device's own test samples, which no choice has seen. local: every device alone; "
        "fedavg+ft: FedAvg, then fine-tuned; expert: the best shared model; personal: what the device has installed, "
        "run by ONNX Runtime in a process without PyTorch. The last two are measured at the end alone."
    )


def points(gain: float) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    return f"{100 * gain:+.1f}"


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
