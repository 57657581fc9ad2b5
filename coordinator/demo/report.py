"""The demo's report: one HTML file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from coordinator.demo import plots
from coordinator.demo.outcome import METHODS, Background, DeviceOutcome, Outcome, megabytes
from fedge.files import write_atomically


def write_report(path: Path, outcome: Outcome, background: Background) -> None:
    """Draw the report.

    Raises:
        StoreError: the file cannot be written.
    """
    write_atomically(path, render(outcome, background).encode())


def render(outcome: Outcome, background: Background) -> str:
    """The report as HTML."""
    template = Template(files("coordinator.demo").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        style=page_style(),
        title=escape(f"fedge demo: {outcome.task}, {outcome.agents} devices"),
        lead=escape(lead(outcome, background)),
        tiles=_tiles(outcome),
        overall=table(("Way to learn", "Mean accuracy"), _overall_rows(outcome)),
        accuracy_by_round=plots.accuracy_by_round(background),
        cluster_map=_cluster_map(outcome, background),
        selection=plots.selection_counts(outcome.selection),
        device_bars=plots.device_bars(outcome),
        devices=table(
            ("Device", "Train", "Test", "Cluster", *METHODS.values(), "|Δp|"), map(_device_row, outcome.devices)
        ),
    )


def lead(outcome: Outcome, background: Background) -> str:
    """What happened, in a few sentences."""
    return (
        f"{outcome.agents} devices learned “{outcome.task}” ({outcome.partition}) in {outcome.rounds} rounds of "
        f"{background.method} over MQTT ({outcome.broker}), seed {outcome.seed}. "
        f"{_experts(outcome, background.method)} "
        "Accuracies are on each device's own test samples, which no choice has seen; those of the personalised mixture "
        "come from ONNX Runtime in a process without PyTorch."
    )


def _experts(outcome: Outcome, method: str) -> str:
    n = len(outcome.clusters)
    if method != "fedge":  # the only one with a trial
        return f"It made {n} clusters with a model each." if outcome.split else "It made no clusters."
    if outcome.split:
        return f"The trial found that {n} overlapping clusters are worth an expert each."
    return "No split into experts: one shared model serves all devices better."


def points(gain: float) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    return f"{100 * gain:+.1f}"


def _tiles(outcome: Outcome) -> str:
    ours = outcome.accuracy["personalised"]
    tiles = [
        (f"{100 * ours:.1f} %", "personalised accuracy"),
        (points(ours - outcome.accuracy["fedavg"]), "points above FedAvg"),
        (points(ours - outcome.accuracy["local_only"]), "points above local only"),
        (points(ours - outcome.accuracy["fedavg_finetuned"]), "points above fine-tuned"),
        (f"{megabytes(outcome.bytes_up)} ↑", f"{megabytes(outcome.bytes_down)} ↓"),
        (f"{outcome.wall_s:.0f} s", "from start to end"),
    ]
    return "\n".join(f"<div><strong>{escape(big)}</strong><span>{escape(small)}</span></div>" for big, small in tiles)


def _overall_rows(outcome: Outcome) -> list[tuple[str, str]]:
    return [(label, f"{100 * outcome.accuracy[name]:.1f} %") for name, label in METHODS.items()]


def _device_row(device: DeviceOutcome) -> tuple[str, ...]:
    return (
        device.id,
        str(device.n_train),
        str(device.n_test),
        ", ".join(map(str, device.experts)) or "–",
        *(f"{100 * device.accuracy[name]:.1f}" for name in METHODS),
        f"{device.max_abs_diff_torch_onnx:.0e}",
    )


def _cluster_map(outcome: Outcome, background: Background) -> str:
    if background.places is None or len(background.ids) < 2:
        return "<p>This method compares no updates.</p>"
    return plots.cluster_map(outcome, background)


def page_style() -> str:
    """The style sheet of all our pages."""
    return files("coordinator.demo").joinpath("page.css").read_text(encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts as HTML."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
