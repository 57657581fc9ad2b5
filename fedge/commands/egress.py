"""`fedge egress`: shows what has left a device, and what its owner permits to leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec

from fedge.errors import ConfigError
from fedge.privacy.egress import PRESETS, REVEALED_FIELDS, RULES_HELP, read_rules
from fedge.privacy.ledger import Line, read_lines
from fedge.steps.contract import Action, Result, Reveals, load_installed_steps
from fedge.system.help import Command, json_option, last_option, option
from fedge.system.text import Heading, escape_controls
from fedge.wire.messages import Report, Want

NOUNS: Final = {
    "status": "status",
    "context": "state of the machine",
    "reports": "report",
    "blobs": "tensors",
    "wants": "request for a model",
    "release-wants": "request for a release",
    "health": "health of the runtime",
    "renewal": "request for a certificate",
    "certificate": "receipt of a certificate",
    "predictions": "answer to a sensor",
}


@click.command(cls=Command)
@click.argument("home", type=click.Path(path_type=Path))
@option(
    "--rules",
    is_flag=True,
    heading=Heading.SELECTION,
    help="The command shows what may leave, field by field, instead of what has left.",
)
@option("--egress", heading=Heading.EGRESS, type=click.Path(path_type=Path), help=RULES_HELP)
@last_option(40)
@json_option("The command prints all lines as JSON.")
def egress(home: Path, rules: bool, egress: Path | None, last: int, as_json: bool) -> None:
    """Show what has left a device, and what may leave it.

    Agent and runtime record in HOME everything that they send over MQTT before it leaves: when, how many bytes, and
    what it reveals. --rules lists what may leave: the presets strict and default, and the owner's rules
    (docs/privacy.md). Bytes are those of payloads, without TLS and MQTT.

    Examples:
      fedge egress cam1
      fedge egress cam1 --rules

    Exit codes: 2 no such HOME, or a wrong file of the owner's, 4 the ledger cannot be read.
    """
    if not home.is_dir():
        raise ConfigError(f"there is no {home}: name the folder that `fedge agent` or `fedge serve` has as --home")
    if rules:
        allowed = read_rules(home, egress, None).allowed
        for kind, where in group_fields():
            marks = {name: kind in preset for name, preset in (*PRESETS.items(), ("here", allowed))}
            if as_json:
                click.echo(msgspec.json.encode({"kind": kind, "tells": kind.words, "fields": where, **marks}).decode())
                continue
            said = "  ".join(f"{name}: {'yes' if yes else 'no':3}" for name, yes in marks.items())
            click.echo(f"{kind:9} {said}  {kind.words}")
            click.echo("\n".join(f"          {field}" for field in where))
        return
    found = read_lines(home)
    if as_json:
        for line in found:
            click.echo(msgspec.json.encode(line).decode())
        return
    for line in found[-last:]:
        click.echo(escape_controls(describe_line(line)))
    n, size = sum(line.n for line in found), sum(line.bytes for line in found)
    click.echo(f"{len(found[-last:])} of {len(found)} lines; {n} messages, {size:,} bytes in all")


def describe_line(line: Line) -> str:
    """Describe one line of the ledger in plain words."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.last)) if line.day else "before that    "
    step, _, order = line.about.rpartition(" ")
    about = f" of {step or 'no result'}, order {order}" if order else ""
    known = {str(kind): kind.words for kind in Reveals}
    kinds = ", ".join(known.get(kind, kind) for kind in line.kinds) or Reveals.NOTHING.words  # or from a newer fedge
    return f"{when}  {line.n:6} x {line.bytes:12,} bytes  {NOUNS.get(line.message, line.message)}{about}: {kinds}"


def group_fields() -> Iterator[tuple[Reveals, list[str]]]:
    """Yield each kind with the fields that reveal it: first fields of messages, then of step results."""
    places: list[tuple[str, str, Reveals]] = [
        (kind.__name__, field, revealed.get(field, Reveals.NOTHING))
        for kind, revealed in REVEALED_FIELDS.items()
        if kind is not Want
        for field in kind.__struct_fields__
        if not (kind is Report and field in {"body", "blobs"})
    ]
    places += [("Health of an introduction", field, Reveals.PERSONAL) for field in ("before", "now")]
    results: dict[type[Result], list[type[Action]]] = {}
    for _, step in sorted(load_installed_steps().items()):
        results.setdefault(step.RESULT, []).append(step)
    for result, steps in results.items():
        names = ", ".join(step.STEP for step in steps)
        places += [(names, field, revealed) for field, revealed in result.get_revealed().items()]
    for kind in Reveals:
        found = [f"{where}: {field}" for where, field, revealed in places if revealed is kind]
        yield kind, found or ["predictions over MQTT"]
