"""The plan of the house in docs/architecture.md, from pyproject.toml and the rooms' pages.

Print it with `python -m tests.support.floors_reference`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]


def floors() -> dict[str, list[str]]:
    """The floors of each package, from top to bottom, as the import contracts have them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {c["containers"][0]: c["layers"] for c in contracts if c["type"] == "layers" and "containers" in c}


def first_line(file: Path) -> str:
    """What a room or a module says that it is."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]


def plan() -> Iterator[str]:
    """The tables, line by line."""
    for package, names in floors().items():
        yield from (f"| floor of `{package}` | what is there |", "|---|---|")
        for name in names:
            at = ROOT / package / name
            yield f"| `{name}` | {first_line(at / '__init__.py' if at.is_dir() else at.with_suffix('.py'))} |"
        yield ""


def reference() -> str:
    """The tables, as they stand in the document."""
    return "\n".join(plan()).strip()


if __name__ == "__main__":
    click.echo(reference())
