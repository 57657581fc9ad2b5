"""The table of kinds in docs/privacy.md, and the steps by their results: python -m tests.support.step_reference."""

from __future__ import annotations

import click

from fedge.privacy.egress import PRESETS
from fedge.steps.contract import Result, Reveals, load_installed_steps

KINDS = ("| kind | lets out | `strict` | `default` |", "|---|---|---|---|")


def by_result() -> dict[type[Result], list[str]]:
    """The names of the installed steps, by what comes back; both in alphabetical order."""
    found: dict[type[Result], list[str]] = {}
    for name, kind in sorted(load_installed_steps().items()):
        found.setdefault(kind.RESULT, []).append(name)
    return found


def kinds() -> str:
    """A row for each kind of what may leave."""
    rows = [
        f"| `{kind}` | {kind.words} | {' | '.join('yes' if kind in PRESETS[preset] else 'no' for preset in PRESETS)} |"
        for kind in Reveals
    ]
    return "\n".join([*KINDS, *rows])


if __name__ == "__main__":
    click.echo(kinds())
