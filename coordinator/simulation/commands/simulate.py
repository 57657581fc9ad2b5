"""`fedge simulate`: one method on simulated devices; `fedge compare`: several, on equal terms."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from rich.console import Console

from coordinator.methods.options import STDOUT, json_option, method_options, parse_method, resolve_options
from coordinator.simulation.settings import CompareSettings, StreamedSettings
from coordinator.watch.runs import name_by_time
from fedge.settings import resolve, settings_options
from fedge.system.help import Command
from fedge.tasks.shares import check_partitioning


@click.command(cls=Command)
@settings_options(StreamedSettings, "simulate")
@method_options
@json_option
def simulate(config: Path | None, options: tuple[str, ...], json_file: Path | None, **flags: object) -> None:
    """Run one method on simulated devices, in this process, and measure it.

    Samples are partitioned among devices that train with the code of real ones. The accuracy is that of each device's
    installed bundle, run by ONNX Runtime on its own unseen test samples. A method's options follow colons in its name,
    or --option; docs/methods lists them. With --stream the run is of many campaigns, and the figures of each are shown.

    Examples:
      fedge simulate
      fedge simulate --method fedavg+ft --partition groups --rounds 60
      fedge simulate --method fedepc --option warm_up=10 --alpha 0.1 --json figures.json
      fedge simulate --method scmoe-pfl:clustering=k-means:top=1
      fedge simulate --task uci-har --data ~/har --partition natural
      fedge simulate --task mnist --data ~/mnist --model cnn_fedavg --devices 100 --participation 0.3
      fedge simulate --stream 10 --devices 8 --partition groups

    Exit codes: 0 done, 1 an error, 2 wrong usage, no such data or method, 4 a file cannot be written,
    6 nothing was learned or no device has a bundle, 130 stopped by Ctrl-C.
    """
    settings = resolve(StreamedSettings, "simulate", config, flags)
    name, own = parse_method(settings.method)
    own = resolve_options(config, options) | own
    from coordinator.simulation.interface import run_simulation
    from coordinator.simulation.reports.report import FILES

    if settings.stream is not None:
        from coordinator.simulation.stream.command import run_stream

        run_stream(
            settings, settings.stream, name, own, lambda text: click.echo(f"{name}  {text}", err=True), json_file
        )
        return
    result = run_simulation(settings, name, own, lambda text: click.echo(f"{name}  {text}", err=True), json_file)
    click.echo(result, err=json_file == STDOUT)
    if settings.out is not None:
        click.echo(
            f"in {settings.out}: {', '.join(FILES)}, and the devices' folders with their bundles",
            err=json_file == STDOUT,
        )


@click.command(cls=Command)
@settings_options(CompareSettings, "compare")
@json_option
def compare(config: Path | None, json_file: Path | None, **flags: object) -> None:
    """Run several methods on equal terms and show what each brings.

    For each seed all methods have the same partition, first model and budget, so differences are paired. A comparison
    that is started again with the same settings and --out continues, also with more methods or seeds.

    Examples:
      fedge compare --methods local,fedavg,fedavg+ft,fedge --partition groups
      fedge compare --methods fedepc,fedepc:clustering=k-means --seeds 0,1,2,3,4 --out ablation
      fedge compare --methods fedavg,scmoe-pfl,fedge --alpha 0.1 --json figures.json

    Exit codes: 0 done, 1 a run failed, 2 wrong usage, no such data or method, 4 a file cannot be written or read,
    6 in a run nothing was learned or no device has a bundle, 130 stopped by Ctrl-C.
    """
    settings = resolve(CompareSettings, "compare", config, flags)
    check_partitioning(settings)
    from coordinator.simulation.interface import run_comparison
    from coordinator.simulation.reports.report import FILES
    from coordinator.simulation.reports.terminal import print_comparison

    out = settings.out or name_by_time("compare")
    comparison = run_comparison(settings, out, partial(click.echo, err=True), json_file)
    print_comparison(comparison, Console(stderr=json_file == STDOUT))
    click.echo(f"in {out}: {', '.join(FILES)}", err=json_file == STDOUT)
