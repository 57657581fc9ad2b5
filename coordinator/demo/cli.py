"""`fedge demo`: a whole federation on this machine, and what it brings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from coordinator import runs
from coordinator.demo.outcome import METHODS, Outcome, megabytes
from coordinator.demo.progress import Watch
from coordinator.demo.run import run
from coordinator.options import check, method_and_options, method_options, resolve_options
from coordinator.simulation.settings import DemoSettings
from fedge.config import resolve, settings_options
from fedge.files import require_writable
from fedge.tasks.partition import check_partitioning


@click.command()
@settings_options(DemoSettings, "demo")
@method_options
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
def demo(config: Path | None, options: tuple[str, ...], json_file: Path | None, **flags: object) -> None:
    """Run a whole federation on this machine and show what it brings.

    Starts a broker, a coordinator and one agent process per device; they profile, cluster, select, train and write a
    bundle for each device. Then every bundle is run by ONNX Runtime on its device's own unseen test samples, and
    compared with simpler ways to learn that had the same budget.

    \b
    Examples:
      fedge demo
      fedge demo --partition dirichlet --alpha 0.3 --seed 1
      fedge demo --method ditto --option proximal_lambda=0.3
      fedge demo --task mnist --data ~/mnist --devices 20
      fedge demo --task image-folder --data photos.zip --rounds 60
      fedge demo --secure
      fedge demo --broker mosquitto --json figures.json --out try-1

    \b
    Exit codes: 0 every device has a bundle and it ran, 1 a process failed (the end of its log is shown),
    2 wrong usage, 3 the broker does not start or cannot be reached, 130 stopped by Ctrl-C.
    """  # noqa: D301 - click wants the backspace character itself
    settings = resolve(DemoSettings, "demo", config, flags)
    name, own = method_and_options(settings.method)
    own = resolve_options(config, options) | own
    check(name, own)
    check_partitioning(settings)
    if json_file is not None:
        require_writable(json_file)
    from coordinator.simulation.report import of_demo, write_results  # what they need is missed at once

    folder = runs.new_folder(settings.out, "demo").absolute()
    settings = msgspec.structs.replace(settings, out=folder, method=name)
    runs.note(folder, "demo", settings, own)
    console = Console(stderr=True)
    with Watch(console) as watch:
        outcome, background = asyncio.run(run(settings, watch, own))
        watch.phase("drawing the report")
        background.write(folder)
        write_results(folder, of_demo(outcome, background), json_file)
    Console().print(table_of(outcome), summary_of(outcome), sep="\n", highlight=False, soft_wrap=True)
    click.echo(f"report: {folder / 'report.html'}   figures: {folder / 'figures.json'}   logs: {folder / 'logs'}")


HEADINGS = dict(zip(METHODS, ("local", "FedAvg", "+tuned", "expert", "personal"), strict=True))


def table_of(outcome: Outcome) -> Table:
    """The final table: a line per device, and the mean."""
    title = "Accuracy on each device's own test samples, percent"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("device", no_wrap=True)
    for name in ("train", "test", "rounds", "cluster", *HEADINGS.values()):
        table.add_column(name, justify="right", no_wrap=True)
    for device in outcome.devices:
        table.add_row(
            device.id,
            str(device.n_train),
            str(device.n_test),
            str(outcome.selection[device.id]),
            " ".join(map(str, device.experts)) or "–",
            *(f"{100 * device.accuracy[name]:.1f}" for name in METHODS),
        )
    table.add_section()
    table.add_row("mean", "", "", "", "", *(f"{100 * outcome.accuracy[name]:.1f}" for name in METHODS), style="bold")
    return table


def summary_of(outcome: Outcome) -> str:
    """Clusters, bytes and time in a few lines."""
    lines = [
        "local: alone; +tuned: FedAvg, then fine-tuned; expert: best shared model; personal: the mixture, measured by "
        "ONNX Runtime",
        f"split into experts: {'yes' if outcome.split else 'no'}",
        *(f"cluster {k}: {', '.join(members)}" for k, members in outcome.clusters.items()),
        f"broker {outcome.broker}: {megabytes(outcome.bytes_up)} up, {megabytes(outcome.bytes_down)} down; "
        f"{outcome.wall_s:.0f} s in all",
    ]
    return "\n".join(lines)
