"""The table in docs/privacy.md, made from what the steps declare: python -m tests.support.step_reference."""

from __future__ import annotations

import click

from fedge.step import Result, installed_steps

HEAD = ("| step | field of its result | lets out |", "|---|---|---|")


def by_result() -> dict[type[Result], list[str]]:
    """The names of the installed steps, by what comes back; both in alphabetical order."""
    found: dict[type[Result], list[str]] = {}
    for name, kind in sorted(installed_steps().items()):
        found.setdefault(kind.RESULT, []).append(name)
    return found


def table() -> str:
    """A row for each field of each result."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | `{field}` | {kind.REVEALS[field]} |"
        for kind, names in by_result().items()
        for field in kind.__struct_fields__
    ]
    return "\n".join([*HEAD, *rows])


if __name__ == "__main__":
    click.echo(table())
