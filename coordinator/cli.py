"""`fedge coordinator` runs a federation; `fedge status` tells how it stands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from coordinator.service import CoordinatorSettings, Observer, serve
from coordinator.store import Store
from fedge.config import resolve, settings_options
from fedge.errors import ConfigError
from fedge.task import TaskSpec
from fedge.tasks import task_spec

INTERRUPTED = 130


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings_options(CoordinatorSettings, "coordinator")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event on standard output.")
def coordinator(config: Path | None, as_json: bool, **flags: object) -> int:
    """Run a federation to its end, from where it is.

    Killed at any moment and started again with the same --home it goes on where it was.

    \b
    Examples:
      fedge coordinator --broker localhost:1883 --federation shop --home shop --task digits --devices 12
      fedge coordinator --config edge_server.toml --rounds 50 --json

    \b
    Exit codes: 0 done, 2 wrong configuration, 3 the broker refuses us, 4 the disk is full or broken, 130 stopped.
    """  # noqa: D301 - click wants the backspace character itself
    settings = resolve(CoordinatorSettings, "coordinator", config, flags)
    task = task_spec(settings.task)
    with contextlib.closing(Store(settings.home)) as store, _observer(as_json) as observe:
        finished = asyncio.run(_until_stopped(settings, task, store, observe))
    return 0 if finished else INTERRUPTED


async def _until_stopped(settings: CoordinatorSettings, task: TaskSpec, store: Store, observe: Observer) -> bool:
    """Serve until the end (True) or until SIGINT or SIGTERM (False)."""
    serving = asyncio.ensure_future(serve(settings, task, store, observe))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return False
    return True


@contextlib.contextmanager
def _observer(as_json: bool) -> Iterator[Observer]:
    """JSON lines; or a live line on a terminal; or a line per round."""
    if as_json:
        yield lambda event, fields: click.echo(json.dumps({"event": event, **fields}))
        return
    progress = Progress(live=sys.stderr.isatty())
    try:
        yield progress.observe
    finally:
        progress.close()


class Progress:
    """What a person sees: rounds, devices, accuracy, bytes, time left."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._began = time.monotonic()
        self._first_round: int | None = None
        self._answers = 0
        self._text = "waiting for devices"

    def observe(self, event: str, fields: dict[str, Any]) -> None:
        """Take note of an event and redraw."""
        if event == "round_begun":
            self._answers = 0
            self._first_round = self._first_round or fields["round"]
            self._text = f"round {fields['round']}: {fields['devices']} devices"
        elif event == "answer":
            self._answers += 1
        elif event == "round_done":
            self._line(self._round_line(fields))
        if self._live:
            click.echo(f"\r\x1b[2K{self._text}, {self._answers} answers", nl=False, err=True)

    def _round_line(self, summary: dict[str, Any]) -> str:
        number, rounds = summary["round"], summary["rounds"]
        done = max(number - (self._first_round or 1) + 1, 1)
        left_s = (time.monotonic() - self._began) / done * max(rounds - number, 0)
        accuracy = summary["history"][-1]["accuracy"] if summary["history"] else None
        shown = "-" if accuracy is None else f"{accuracy:.3f}"
        traffic = f"{summary['bytes_up'] / 1e6:.2f} MB up, {summary['bytes_down'] / 1e6:.2f} MB down"
        if summary["done"]:
            return f"done: {len(summary['installed'])} bundles installed, {traffic}, {summary['wall_s']:.0f} s"
        return f"round {number}/{rounds}  validation accuracy {shown}  {traffic}  about {left_s:.0f} s left"

    def _line(self, text: str) -> None:
        click.echo(("\r\x1b[2K" if self._live else "") + text, err=True)

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._live:
            click.echo("", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", required=True, type=click.Path(path_type=Path), help="Folder of a coordinator.")
@click.option("--json", "as_json", is_flag=True, help="The whole summary as JSON.")
def status(home: Path, as_json: bool) -> int:
    """Tell how a federation stands: rounds, devices, accuracy, traffic, what was refused.

    Reads what the coordinator wrote after its last round; the coordinator may be running or not.

    \b
    Examples:
      fedge status --home shop
      fedge status --home shop --json

    \b
    Exit codes: 0, 2 there is no coordinator's folder.
    """  # noqa: D301 - click wants the backspace character itself
    file = home / "summary.json"
    if not file.exists():
        raise ConfigError(f"{file} is not there: no round was finished in {home}, or it is no coordinator's --home")
    summary = json.loads(file.read_bytes())
    if as_json:
        click.echo(json.dumps(summary))
        return 0
    history = summary["history"]
    accuracy = history[-1]["accuracy"] if history else None
    click.echo(f"federation  {summary['federation']} ({summary['method']})")
    click.echo(f"rounds      {summary['round']} of {summary['rounds']}{', done' if summary['done'] else ''}")
    click.echo(f"accuracy    {'-' if accuracy is None else f'{accuracy:.3f}'} (validation, last cohort)")
    click.echo(f"clusters    {len(summary['clusters']) if summary['split'] else 'one global model'}")
    click.echo(f"traffic     {summary['bytes_up'] / 1e6:.2f} MB up, {summary['bytes_down'] / 1e6:.2f} MB down")
    click.echo(f"refused     {summary['refused'] or 'nothing'}")
    for device, n in sorted(summary["selection"].items()):
        click.echo(f"  {device}: trained {n} times{', bundle installed' if device in summary['installed'] else ''}")
    return 0
