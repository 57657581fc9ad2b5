"""`fedge demo`: a whole federation on this machine, and what it brings."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from coordinator.methods.options import (
    STDOUT,
    json_option,
    method_options,
    parse_method,
    require_method_options,
    resolve_options,
)
from coordinator.simulation.settings import DemoSettings
from coordinator.watch import runs
from fedge.settings import resolve, settings_options
from fedge.system.help import Command
from fedge.tasks.shares import check_partitioning


@click.command(cls=Command)
@settings_options(DemoSettings, "demo")
@method_options
@json_option
def demo(config: Path | None, options: tuple[str, ...], json_file: Path | None, **flags: object) -> None:
    """Run a whole federation on this machine and show what it brings.

    The command starts a broker, a coordinator and one agent process per device, slowed like boards of different speed.
    The devices train together, and each gets a bundle. ONNX Runtime runs every bundle on its device's own unseen test
    samples. The report compares it with simpler ways to learn that had the same budget. It also says who was asked to
    train, why, and what time choosing saves.

    Examples:
      fedge demo
      fedge demo --partition dirichlet --alpha 0.3 --seed 1
      fedge demo --method ditto --option proximal_lambda=0.3
      fedge demo --task image-folder --data photos.zip --rounds 60
      fedge demo --secure
      fedge demo --broker mosquitto --json figures.json --out try-1

    Exit codes: 0 every device has a bundle and it ran, 1 a process failed (the end of its log is shown),
    2 wrong usage, 3 the broker does not start or cannot be reached, 6 nothing was learned or no device has a bundle,
    130 stopped by Ctrl-C.
    """
    began = time.monotonic()
    settings = resolve(DemoSettings, "demo", config, flags)
    name, own = parse_method(settings.method)
    own = resolve_options(config, options) | own
    require_method_options(name, own)
    check_partitioning(settings)
    from coordinator.demo.run import run  # a missing package is found at once
    from coordinator.simulation.reports.choosing import list_choosing
    from coordinator.simulation.reports.outcome import format_megabytes
    from coordinator.simulation.reports.report import make_demo_report, write_results
    from coordinator.simulation.reports.terminal import print_comparison

    folder = runs.make_new_folder(settings.out, "demo").absolute()
    settings = msgspec.structs.replace(settings, out=folder, method=name)
    runs.record_run(folder, "demo", settings, own)
    demonstration = run(settings, partial(click.echo, err=True), own, began)
    write_results(folder, make_demo_report(demonstration), json_file)
    *_, ours = demonstration.runs
    legend = [
        "fedavg+ft: fine-tuned at the end; expert: the best shared model; personal: what the device has installed",
        "expert and personal are measured at the end alone",
        *(f"cluster {k}: {', '.join(members)}" for k, members in ours.clusters.items()),
        *(f"{name}: {value:.2f}, the most of a device" for name, value in ours.details.items()),
        *list_choosing(demonstration),
        f"broker {demonstration.broker}: {format_megabytes(ours.bytes_up)} up, "
        f"{format_megabytes(ours.bytes_down)} down; {time.monotonic() - began:.0f} s in all",
    ]
    print_comparison(demonstration, Console(stderr=json_file == STDOUT), *legend)
    click.echo(
        f"report: {folder / 'report.html'}   figures: {folder / 'figures.json'}   logs: {folder / 'logs'}",
        err=json_file == STDOUT,
    )
