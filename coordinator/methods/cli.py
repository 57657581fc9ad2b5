"""`fedge methods`: the methods that are installed, with a sentence each."""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

import click

from coordinator.methods.catalogue import installed_methods, method_class
from coordinator.methods.method import Method
from coordinator.methods.option_values import PARTS
from fedge.system.help import Command, json_option, option
from fedge.system.loading import installed, load_named
from fedge.system.text import Heading, printable


@click.command(cls=Command)
@json_option()
@option(
    "--parts",
    is_flag=True,
    heading=Heading.OUTPUT,
    help="The selections and clusterings are listed instead, which the options of these names take.",
)
def methods(*, as_json: bool, parts: bool) -> None:
    """List the methods that --method can name, those of other packages, too, with a sentence each.

    docs/methods says how each works and which options it has.

    Examples:
      fedge methods
      fedge methods --json
      fedge methods --parts

    Exit codes: 0 done, 2 a method needs a package that is not installed.
    """
    found = (
        installed_parts()
        if parts
        else [
            {"name": name, "path": point.value, "about": first_sentence(method_class(name))}
            for name, point in installed_methods().items()
        ]
    )
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(len(each["name"]) for each in found)
    for each in found:
        click.echo(printable(f"{each['name']:<{width}}  {each['about']}"))


def installed_parts() -> list[dict[str, str]]:
    """The installed selections and clusterings, by option and value, each with the first sentence of its docstring."""
    return [
        {"name": f"{part}={name}", "path": point.value, "about": sentence_of(load_named(name, group, part))}
        for part, (group, _) in PARTS.items()
        for name, point in installed(group).items()
    ]


def first_sentence(kind: type[Method[Any]]) -> str:
    """What a method is, by the docstring of its file, or by its own where the file has none."""
    return sentence_of(sys.modules[kind.__module__]) or sentence_of(kind)


def sentence_of(thing: object) -> str:
    """The first sentence of its docstring; empty without one."""
    return re.split(r"(?<=[.!?])\s", " ".join((inspect.getdoc(thing) or "").split()), maxsplit=1)[0]
