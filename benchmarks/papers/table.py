"""What the scripts of this folder that compare methods by `coordinator.simulation.compare` have in common.

A row of a table is a method with its options, a column a setting; a cell holds our figure and, in brackets, the
specification's (or the paper's), a dash where it has none. Under a table each of its claims is judged in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.compare import compare
from coordinator.simulation.reports.comparison import Comparison, MethodOutcome, Spread
from coordinator.simulation.reports.outcome import RunOutcome
from coordinator.simulation.settings import CompareSettings
from fedge.system.hardware import Processor
from fedge.tensors.layout import Codec

sys.path.append(str(Path(__file__).parents[1]))
from default_method import source_of
from script import finish, markdown, progress_of, say
from script import parser_of as plain_parser

__all__ = ["finish", "plain_parser", "say"]  # the scripts of this folder find `script` through this one

Runs = dict[str, list[RunOutcome]]
"""By method: one run for each seed, the seeds as they were given."""
METRICS = (
    *("accuracy", "over devices", "worst tenth", "macro F1", "global", "late_joiners"),
    *("rounds", "MB", "seconds", "silhouette"),
)
WHOLE = {"mnist": "mnist-28", "fashion-mnist": "fashion-mnist-28", "cifar10": "cifar10-32"}
"""The set with images as they are, by the set with pooled ones."""
VERDICTS = {True: "held", False: "DID NOT HOLD", None: "undecided, within noise"}
BARE = {"hardware": "none", "evaluate_every": 1000, "global_test": 0.0}
MEASURED = {"hardware": "steady", "evaluate_every": None, "global_test": 0.1}
"""With a clock, a curve of ten points, and a global test set, for which the devices have a tenth less."""


def parser_of(description: str | None, out: str) -> argparse.ArgumentParser:
    """The options that all of these scripts have."""
    parser = plain_parser(description)
    parser.add_argument("--data", type=Path, help="folder with the data sets (docs/results/fedge.md)")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (default 0,1,2)")
    parser.add_argument("--quick", action="store_true", help="one seed, three rounds, four devices: does it run?")
    parser.add_argument("--settings", help="some of the columns, with ; between them (default: all of the table)")
    add_metrics(parser, out, "also print what METRICS has; for it runs are done anew")
    parser.add_argument(
        "--train-on",
        choices=[processor.value for processor in Processor],
        default=Processor.CPU.value,
        help="what trains networks: cpu (default), or the GPU that torch sees first",
    )
    return parser


def add_metrics(parser: argparse.ArgumentParser, out: str, text: str) -> None:
    """--metrics, and what `compared` needs beside the options that every script has."""
    parser.add_argument("--metrics", action="store_true", help=text)
    parser.add_argument("--jobs", type=int, help="runs at a time (default: a core each; 1 with cuda)")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder that keeps the runs that are done")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """--rows, for tables with more rows than one may want to run."""
    parser.add_argument("--rows", help="some of the rows, with ; between them; claims are judged of the whole table")


def chosen(settings: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Names of the columns that were asked for."""
    return _among(settings, arguments.settings, "settings")


def chosen_rows(rows: Iterable[str], arguments: argparse.Namespace) -> list[str]:
    """Names of the rows that were asked for, in the table's order."""
    known = list(rows)
    asked = _among(known, arguments.rows, "rows")
    return [row for row in known if row in asked]


def _among(known: Iterable[str], asked: str | None, what: str) -> list[str]:
    """Those of the known names that are asked for, with ; between them; all if nobody asks."""
    known = list(known)
    if not asked:
        return known
    names = [name.strip() for name in asked.split(";")]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"unknown {what} {unknown}; there are: {'; '.join(known)}")
    return names


def measure(label: str, methods: Sequence[str], fields: Mapping[str, object], arguments: argparse.Namespace) -> Runs:
    """The runs of `compared`, by method."""
    found = compared(label, methods, fields, arguments)
    return {method: [run for run in found.runs if run.method == method] for method in methods}


def compared(
    label: str, methods: Sequence[str], fields: Mapping[str, object], arguments: argparse.Namespace
) -> Comparison:
    """All methods on one setting: `fields` are those of `Scenario`, but `set`, the data set, stands for its data."""
    fields = dict(fields)
    arguments.out.mkdir(parents=True, exist_ok=True)
    source = source_of(str(fields.pop("set")), arguments.data, arguments.out)
    settings = msgspec.convert(
        {"methods": ",".join(methods), "seeds": arguments.seeds, "jobs": arguments.jobs, "train_on": arguments.train_on}
        | {"codec": Codec.FLOAT32, "server_data": 0.0, "average": "mean"}  # as the papers have it
        | (MEASURED if arguments.metrics else BARE)
        | source
        | fields
        | (quick(fields) if arguments.quick else {}),
        CompareSettings,
        strict=False,
    )

    found = compare(settings, arguments.out, progress_of(label))
    if arguments.metrics:
        show_metrics(label, found)
    return found


def quick(fields: Mapping[str, object]) -> dict[str, object]:
    """The smallest federation that still has all that a setting has."""
    small: dict[str, object] = {"seeds": "0", "rounds": 3, "devices": 4}
    if "late_joiners" in fields:
        small["late_joiners"] = 1
    if fields.get("partition") != "natural":  # people have as many samples as they have
        small["samples"] = 500 if "server_data" in fields else 240  # a server learns from some of each class
    return small


def measured(label: str, found: Comparison) -> dict[str, Any]:
    """A comparison as `write` takes it."""
    return {"setting": label, "target": found.target, "methods": msgspec.to_builtins(found.methods)}


def show_metrics(label: str, found: Comparison) -> None:
    """What a comparison measures, a line for each method; the last but one three until the target was seen."""
    title = f"{label}; target {100 * found.target:.1f} %"
    show(title, METRICS, {own.method: metrics_of(own) for own in found.methods})


def metrics_of(own: MethodOutcome) -> list[str]:
    """A method's line of METRICS."""
    cost, silhouette = own.cost, own.details.get("silhouette")
    assert own.macro_f1 is not None
    untrained = own.method == "local"  # its late joiners have nothing but the first model
    return [
        percent(own.accuracy),
        f"{100 * own.std.mean:.1f}",
        f"{100 * own.worst_decile.mean:.1f}",
        f"{100 * own.macro_f1.mean:.1f}",
        percent(own.global_accuracy),
        "-" if untrained else percent(own.cold_start),
        *(["-"] * 3 if cost is None else [str(cost.round), f"{cost.bytes / 1e6:.1f}", f"{cost.seconds:.1f}"]),
        "-" if silhouette is None else f"{silhouette.mean:.2f}",
    ]


def percent(figure: Spread | None) -> str:
    """Mean and deviation over the seeds."""
    return "-" if figure is None else f"{100 * figure.mean:.1f} ± {100 * figure.std:.1f}"


def over_seeds(runs: Sequence[RunOutcome], figure: Callable[[RunOutcome], float]) -> NDArray[np.float64]:
    """A figure of each seed's run."""
    return np.array([figure(run) for run in runs], np.float64)


def show(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """A table in Markdown."""
    print(
        f"\n{title}\n",
        markdown(["", *columns], [[name, *cells] for name, cells in rows.items()]),
        "",
        sep="\n",
        flush=True,
    )


def claim(text: str, held: bool | None, seen: str) -> dict[str, Any]:
    """Say whether something that was promised was seen; None: the figures do not tell, see `beyond`."""
    print(f"- {VERDICTS[held]}: {text} ({seen})", flush=True)
    return {"claim": text, "held": held, "seen": seen}


def beyond(gains: Iterable[float], noise: float) -> bool | None:
    """Whether all gains are above the noise; False: one is below it on the other side; None: neither.

    Example:
        >>> beyond([0.02, 0.03], 0.01), beyond([0.02, -0.03], 0.01), beyond([0.02, 0.005], 0.01)
        (True, False, None)
    """
    gains = list(gains)
    if any(gain < -noise for gain in gains):
        return False
    return True if gains and all(gain > noise for gain in gains) else None


def write(arguments: argparse.Namespace, figures: list[dict[str, Any]], claims: list[dict[str, Any]]) -> None:
    """The end: the JSON file, if one was asked for."""
    if arguments.quick:
        print("quick: one seed, three rounds, four devices; neither figures nor claims mean anything")
    seeds = "0" if arguments.quick else arguments.seeds
    document = {"seeds": seeds, "quick": arguments.quick, "figures": figures, "claims": claims}
    finish(arguments, document)
