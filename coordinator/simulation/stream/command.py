"""`fedge simulate --stream`: checks the settings, runs the stream, prints the table and writes the files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console

from coordinator.methods.options import STDOUT, require_method_options
from coordinator.methods.settings import Option
from coordinator.simulation.compare import make_scenario
from coordinator.simulation.interface import use_one_thread
from coordinator.simulation.reports.report import FILES, write_results
from coordinator.simulation.run import Watch
from coordinator.simulation.settings import SimulationSettings, StreamedSettings
from coordinator.simulation.stream.happenings import HAPPENINGS, Happening, parse_happenings
from coordinator.simulation.stream.report import (
    COLUMNS,
    describe_happenings,
    list_lineage,
    make_stream_report,
    make_table,
)
from coordinator.simulation.stream.run import StreamSettings, simulate_stream
from coordinator.watch import runs
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import load_task
from fedge.tasks.shares import check_partitioning

USELESS = (
    "late_joiners",
    "measured",
    "metric",
    "evaluate_every",
    "target",
    "tensorboard",
    "mlflow",
    "engine",
    "ray_address",
)
"""Settings of a simulation that a stream does not heed."""


def run_stream(
    settings: StreamedSettings,
    campaigns: int,
    method: str,
    options: Mapping[str, Option],
    watch: Watch,
    json_file: Path | None,
) -> None:
    """Run a stream of campaigns and show it. Arguments as of `coordinator.simulation.interface.run_simulation`.

    Raises:
        ConfigError: a setting is out of range or has no effect in a stream, or the data or the method does not exist.
        FruitlessError: a campaign learned nothing, or no device has a bundle.
        StoreError: a file cannot be written.
    """
    require_method_options(method, dict(options))
    check_partitioning(settings)
    require_streamable(settings)
    scenario = make_scenario(settings)
    how = StreamSettings(campaigns=campaigns, happens=choose_happenings(settings), store=settings.store)
    out = settings.out
    home = Path(tempfile.mkdtemp(prefix="fedge-stream-")) if out is None else runs.make_new_folder(out, "simulate")
    try:
        with use_one_thread(), runs.record_accepted_run(out, "simulate", settings, options):
            outcome = simulate_stream(scenario, method, options, settings.seed, home, watch, settings.method, how)
    finally:
        if out is None:
            shutil.rmtree(home, ignore_errors=True)
    write_results(out, make_stream_report(outcome, scenario), json_file)
    lines = (*describe_happenings(outcome.happens), *COLUMNS, *list_lineage(outcome))
    Console(stderr=json_file == STDOUT).print(make_table(outcome), *lines, sep="\n", highlight=False, soft_wrap=True)
    if out is not None:
        click.echo(f"in {out}: {', '.join(FILES)}, and the devices' folders", err=json_file == STDOUT)


def require_streamable(settings: StreamedSettings) -> None:
    """Refuse settings that change nothing in a stream.

    Raises:
        ConfigError: there is one; the text says which.
    """
    defaults = SimulationSettings()
    for name in USELESS:
        if getattr(settings, name) != getattr(defaults, name):
            raise ConfigError(f"--{name.replace('_', '-')} changes nothing with --stream: leave it out")
    if settings.partition == "generated":
        raise ConfigError("--partition generated makes samples on demand, and a stream deals them out: take another")


def choose_happenings(settings: StreamedSettings) -> tuple[Happening, ...]:
    """Return what is to happen; by default all that the samples allow: only square images can be turned."""
    if settings.happens is not None:
        return parse_happenings(settings.happens)
    square = is_turnable(load_task(settings.task, settings.data, problem=settings.problem))
    return tuple(each for each in HAPPENINGS if each != "turn" or square)


def is_turnable(task: TaskSpec) -> bool:
    """Return whether the samples of a task are square images."""
    return len(task.input_shape) == 3 and task.input_shape[1] == task.input_shape[2]
