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
from fedge.system.help import Command, json_option
from fedge.system.text import printable


@click.command(cls=Command)
@json_option()
def methods(*, as_json: bool) -> None:
    """List the methods that --method can name, those of other packages, too, with a sentence each.

    docs/methods says how each works and which options it has.

    Examples:
      fedge methods
      fedge methods --json

    Exit codes: 0 done, 2 a method needs a package that is not installed.
    """
    found = [
        {"name": name, "path": point.value, "about": first_sentence(method_class(name))}
        for name, point in installed_methods().items()
    ]
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(len(each["name"]) for each in found)
    for each in found:
        click.echo(printable(f"{each['name']:<{width}}  {each['about']}"))


def first_sentence(kind: type[Method[Any]]) -> str:
    """What a method is, by the docstring of its file, or by its own where the file has none."""
    text = inspect.getdoc(sys.modules[kind.__module__]) or inspect.getdoc(kind) or ""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]
