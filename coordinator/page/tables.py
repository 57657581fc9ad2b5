"""Tables of the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from fedge.system.text import escape_controls


def print_table(
    found: list[dict[str, Any]], as_json: bool, columns: Mapping[str, Callable[[dict[str, Any]], object]]
) -> int:
    """Print a table with these columns, or everything as JSON; the last column has no limit."""
    if as_json:
        click.echo(json.dumps(found))
        return 0
    rows = [[*columns], *([escape_controls(str(of(row))) for of in columns.values()] for row in found)]
    widths = [max(map(len, column)) for column in [*zip(*rows, strict=True)][:-1]]
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        click.echo("  ".join([*padded, last]).rstrip())
    return 0
