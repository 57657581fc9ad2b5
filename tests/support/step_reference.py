"""The tables in docs/privacy.md, made from what messages and steps declare: python -m tests.support.step_reference."""

from __future__ import annotations

import click

from fedge.egress import PRESETS, TOLD
from fedge.step import Result, Reveals, installed_steps

HEAD = ("| step | field of its result | lets out | kind |", "|---|---|---|---|")
KINDS = ("| kind | lets out | `strict` | `default` |", "|---|---|---|---|")
MESSAGES = ("| message | field | kind |", "|---|---|---|")


def by_result() -> dict[type[Result], list[str]]:
    """The names of the installed steps, by what comes back; both in alphabetical order."""
    found: dict[type[Result], list[str]] = {}
    for name, kind in sorted(installed_steps().items()):
        found.setdefault(kind.RESULT, []).append(name)
    return found


def table() -> str:
    """A row for each field of each result."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | `{field}` | {told.words} | `{told}` |"
        for kind, names in by_result().items()
        for field, told in ((field, kind.REVEALS[field]) for field in kind.__struct_fields__)
    ]
    return "\n".join([*HEAD, *rows])


def kinds() -> str:
    """A row for each kind of what may leave."""
    rows = [
        f"| `{kind}` | {kind.words} | {' | '.join('yes' if kind in PRESETS[preset] else 'no' for preset in PRESETS)} |"
        for kind in Reveals
    ]
    return "\n".join([*KINDS, *rows])


def messages() -> str:
    """A row for each kind that a message outside steps lets out."""
    found: dict[tuple[str, Reveals], list[str]] = {}
    for message, told in TOLD.items():
        for field in told:
            found.setdefault((message.__name__, told[field]), []).append(f"`{field}`")
    rows = [f"| {message} | {', '.join(names)} | `{kind}` |" for (message, kind), names in found.items()]
    return "\n".join([*MESSAGES, *rows])


if __name__ == "__main__":
    click.echo("\n\n".join((kinds(), messages(), table())))
