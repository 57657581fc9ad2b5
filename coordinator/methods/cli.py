"""`fedge methods`: the methods that are installed, with a sentence each."""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

import click

from coordinator.methods.catalogue import get_installed_methods, load_method_class
from coordinator.methods.method import Method
from coordinator.methods.option_values import PARTS
from fedge.system.help import Command, json_option, option
from fedge.system.loading import find_entry_points, load_named
from fedge.system.text import Heading, escape_controls


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
        list_installed_parts()
        if parts
        else [
            {"name": name, "path": point.value, "about": describe_method(load_method_class(name))}
            for name, point in get_installed_methods().items()
        ]
    )
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(len(each["name"]) for each in found)
    for each in found:
        click.echo(escape_controls(f"{each['name']:<{width}}  {each['about']}"))


def list_installed_parts() -> list[dict[str, str]]:
    """List the installed selections and clusterings, by option and value, each with its first sentence."""
    return [
        {"name": f"{part}={name}", "path": point.value, "about": get_first_sentence(load_named(name, group, part))}
        for part, (group, _) in PARTS.items()
        for name, point in find_entry_points(group).items()
    ]


def describe_method(kind: type[Method[Any]]) -> str:
    """Describe a method by the docstring of its file, or by its own where the file has none."""
    return get_first_sentence(sys.modules[kind.__module__]) or get_first_sentence(kind)


def get_first_sentence(thing: object) -> str:
    """Return the first sentence of an object's docstring; empty without one."""
    return re.split(r"(?<=[.!?])\s", " ".join((inspect.getdoc(thing) or "").split()), maxsplit=1)[0]
