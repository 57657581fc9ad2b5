"""`fedge campaign` asks for a campaign of a running coordinator, or shows the campaigns so far."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.page.tables import print_table
from coordinator.store.requests import request_action, request_campaign
from coordinator.watch.accuracy import find_figure, name_scores
from coordinator.watch.options import HOME, JSON, STORE, open_store
from coordinator.watch.state import read_summary
from coordinator.watch.words import describe_campaign, format_duration
from fedge.data.task import TaskSpec
from fedge.errors import MALFORMED
from fedge.system.help import Command, CommandGroup, option
from fedge.system.text import Heading, escape_controls


@click.group(cls=CommandGroup)
def campaign() -> None:
    """Run campaigns: further rounds of training that go on from what the last ones have learned.

    A coordinator that stays begins campaigns by --every and --when, too.

    Examples:
      fedge campaign run --home shop
      fedge campaign status --home shop

    Exit codes: 0, 2 no coordinator's folder, 4 the store cannot be read or written.
    """


@campaign.command(cls=Command)
@HOME
@STORE
@option(
    "--add-class",
    "classes",
    heading=Heading.CAMPAIGNS,
    multiple=True,
    metavar="NAME",
    help="A class of this name joins with the campaign; give the option again for another.",
)
@JSON
def run(home: Path, store: str | None, classes: tuple[str, ...], as_json: bool) -> int:
    """Ask for a campaign, which begins as soon as none is running.

    With --add-class the network gets further outputs, and goes on from what it has learned. Devices take up the new
    class by themselves; its samples count from then on (docs/campaigns.md).

    Examples:
      fedge campaign run --home shop
      fedge campaign run --home shop --add-class bird --add-class fish

    Exit codes: 0, 2 no coordinator's folder, or no name of a further class, 4 the store cannot be written.
    """
    with contextlib.closing(open_store(home, store)) as found:
        text = request_campaign(found, _read_task(home), classes) if classes else request_action(found, "campaign-run")
    click.echo(json.dumps({"asked": "campaign-run", "text": text}) if as_json else text)
    return 0


def _read_task(home: Path) -> TaskSpec | None:
    """Read the federation's present task; None if its coordinator has not written it yet."""
    with contextlib.suppress(OSError, *MALFORMED):
        return msgspec.json.decode((home / "task.json").read_bytes(), type=TaskSpec)
    return None


@campaign.command(cls=Command)
@HOME
@JSON
def status(home: Path, as_json: bool) -> int:
    """Show the campaigns so far: why each began, its rounds, and what came of it.

    Examples:
      fedge campaign status --home shop

    Exit codes: 0, 2 no coordinator's folder, 4 what the coordinator wrote cannot be read.
    """
    summary = read_summary(home)
    found: dict[str, Any] = summary.get("campaign") or {"history": []}
    figure = find_figure(summary)
    if as_json:
        click.echo(json.dumps(name_scores(found, figure)))
        return 0
    if "number" in found:
        click.echo(escape_controls(f"campaign {describe_campaign(found)}"))
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "campaign": lambda c: c["number"],
        "began": lambda c: datetime.fromtimestamp(c["began_at"]).astimezone().strftime("%Y-%m-%d %H:%M"),
        "took": lambda c: format_duration(c["ended_at"] - c["began_at"]),
        "rounds": lambda c: c["rounds"],
        figure.words: lambda c: "-" if c["accuracy"] is None else f"{c['accuracy']:.3f}",
        "experts": lambda c: c["experts"],
        "why": lambda c: "; ".join([*([c["why"]] if c["why"] else []), *c["lineage"]]),
    }
    return print_table(found["history"], as_json, columns)
