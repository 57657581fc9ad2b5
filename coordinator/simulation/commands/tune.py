"""`fedge tune`: search a method's options and the settings of local training on validation samples."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from coordinator.methods.options import STDOUT, json_option, write_json
from coordinator.simulation.settings import TuneSettings
from coordinator.watch.runs import name_by_time
from fedge.settings import resolve, settings_options
from fedge.system.help import Command, option
from fedge.system.text import Heading

SHOWN = 5


@click.command(cls=Command)
@settings_options(TuneSettings, "tune")
@option(
    "--search",
    heading=Heading.RUNS,
    multiple=True,
    metavar="NAME=RANGE",
    help="This is searched: NAME=LOW..HIGH, NAME=A,B,C (augment: none,flip+crop), or NAME alone for its usual range; "
    "it may be repeated. By default it is the learning rate, and the options of the method that have a lowest and a "
    "highest value.",
)
@json_option
def tune(config: Path | None, search: tuple[str, ...], json_file: Path | None, **flags: object) -> None:
    """Search a method's options and the settings of local training on validation samples, with Ray Tune.

    The first configuration is the given one. The others are drawn at random, and worse ones are stopped early. They are
    judged by the model that each device would use after training. The best one is written as a file for `fedge
    simulate` and `fedge coordinator`. A search that is started again with the same settings and --out continues.

    Examples:
      fedge tune --method fedavg --search learning_rate
      fedge tune --method fedprox --search learning_rate=0.01..0.3 --search proximal_mu=0.001..1 --trials 40
      fedge tune --partition groups --search batch_size=16,32,64 --search gamma=0..0.9 --out search
      fedge simulate --config search/best.toml

    Exit codes: 0 done, 1 every trial failed, 2 wrong usage, no such data or method, 4 a file cannot be written,
    6 no trial learned anything, 130 stopped by Ctrl-C.
    """
    settings = resolve(TuneSettings, "tune", config, flags)
    from coordinator.simulation.interface import run_tuning
    from coordinator.simulation.tune import CONFIG, FIGURES, describe_score

    out = settings.out or name_by_time("tune")
    found = run_tuning(settings, search, out, partial(click.echo, err=True))
    write_json(json_file, (out / FIGURES).read_bytes())
    console = Console(stderr=json_file == STDOUT)
    table = Table(*found.searched, found.figure.words, "rounds", box=None, pad_edge=False)
    for one in found.trials[:SHOWN]:
        values = [one.values.get(name, "") for name in found.searched]  # what is not set by default is missing
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        table.add_row(*texts, found.figure.format(one.score), str(one.rounds))
    console.print(table, highlight=False)
    if found.asked is not None:
        click.echo(f"as it was given: {describe_score(found.asked, found)}", err=console.stderr)
    click.echo(
        f"in {out}: {CONFIG}, {FIGURES}; on test samples: fedge simulate --config {out / CONFIG}", err=console.stderr
    )
