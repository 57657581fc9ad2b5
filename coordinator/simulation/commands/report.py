"""`fedge report`: remakes the report of a run from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from coordinator.simulation.reports.comparison import Comparison, Demonstration
from coordinator.simulation.reports.outcome import RunOutcome, decode_figures
from coordinator.simulation.reports.report import (
    FILES,
    Report,
    make_comparison_report,
    make_demo_report,
    make_federation_report,
    make_run_report,
    write_results,
)
from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.report import make_stream_report
from coordinator.simulation.stream.run import StreamOutcome
from coordinator.watch import runs
from coordinator.watch.state import read_summary
from fedge.errors import MALFORMED, StoreError
from fedge.settings import resolve_given
from fedge.system.help import Command, json_option


@click.command(cls=Command)
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@json_option()
def report(folder: Path, *, as_json: bool) -> None:
    """Write the report of a run anew from its folder, and say what the run was.

    RUN is the --out folder of `simulate`, `compare` or `demo`, or the home of a coordinator, which may be running. The
    command writes report.html, figures.json, figures.csv and accuracy.svg; run.json has configuration, versions, seed
    and commit.

    Examples:
      fedge report run-1
      fedge report shop

    Exit codes: 0 done, 2 no such folder, or not that of a run, 4 a file cannot be read or written.
    """
    run = runs.read_run(folder)
    try:
        made = remake_report(folder, run)
    except (OSError, KeyError, TypeError, *MALFORMED) as error:
        raise StoreError(f"the figures in {folder} cannot be read: {error!r}; has the run ended?") from error
    write_results(folder, made)
    if as_json:
        figures = json.loads((folder / "figures.json").read_bytes())
        click.echo(json.dumps({"run": msgspec.to_builtins(run), "figures": figures}))
        return
    table = Table.grid(padding=(0, 2))
    again = f", started again at {run.restarts[-1].began}" if run.restarts else ""
    for name, value in (
        ("command", f"fedge {run.command}, began {run.began}{again}"),
        ("seed", str(run.seed)),
        ("commit", run.commit or "none"),
        ("versions", ", ".join(f"{package} {version}" for package, version in run.versions.items())),
        ("settings", ", ".join(f"{setting}={value}" for setting, value in run.settings.items() if value is not None)),
        *(
            [("options", ", ".join(f"{option}={value}" for option, value in run.options.items()))]
            if run.options
            else []
        ),
    ):
        table.add_row(name, value)
    Console().print(table, highlight=False, markup=False)
    click.echo(f"in {folder}: {', '.join(FILES)}")


def remake_report(folder: Path, run: runs.Run) -> Report:
    """Remake the report from the figures in the folder.

    Raises:
        OSError, KeyError, TypeError, msgspec.DecodeError: they do not exist, or are malformed.
        ConfigError: the coordinator has left no summary.
    """
    if run.command == "coordinator":
        return make_federation_report(read_summary(folder))
    figures = (folder / "figures.json").read_bytes()
    if run.command == "simulate" and run.settings.get("stream"):
        return make_stream_report(decode_figures(figures, StreamOutcome), read_scenario(run))
    if run.command == "simulate":
        outcome = decode_figures(figures, RunOutcome)
        return make_run_report(outcome, read_scenario(run), run.settings.get("target"))
    if run.command == "compare":
        return make_comparison_report(Comparison.read(figures))
    return make_demo_report(Demonstration.read(figures))


def read_scenario(run: runs.Run) -> Scenario:
    """Read the scenario of a simulation from the settings of its record."""
    names = Scenario.__struct_fields__
    return resolve_given(Scenario, {name: value for name, value in run.settings.items() if name in names})
