"""docs/cli.md, made from the commands themselves: python -m tests.support.cli_reference > docs/cli.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from fedge.cli import COMMANDS, command

HEAD = """# The commands

Made from the commands themselves by `python -m tests.support.cli_reference`; a test checks that it is up to date.

Settings come from a TOML file (`--config`, one section for each command), from environment variables and from flags;
flags win over the environment, the environment over the file. Code of your own, package.module:name, is named by a flag
or the environment; a file may repeat it. An unknown key is an error that names the nearest right
one. Log lines go to standard error (`fedge --log-level warning COMMAND` for fewer, `--log-format json` for programs),
results to standard output.

Exit codes of every command: 0 done, 1 an error, 2 wrong usage or configuration, 3 the broker cannot be reached or
refuses us, 4 durable state cannot be written or read, 5 a bundle that is not to be trusted, 6 an end at which no
device has a bundle, 130 stopped by Ctrl-C or SIGTERM.
"""


def reference() -> str:
    """The whole file."""
    return "\n".join([HEAD, *(section(name, found) for name, found in commands())])


def commands() -> Iterator[tuple[str, click.Command]]:
    """All commands in their order; after one that has sub-commands come these, as "release add"."""
    for name in COMMANDS:
        found = command.get_command(click.Context(command), name)  # type: ignore[attr-defined]
        assert found is not None
        yield name, found
        if isinstance(found, click.Group):
            yield from ((f"{name} {part}", below) for part, below in found.commands.items())


def section(name: str, found: click.Command) -> str:
    """One command: what it does, its examples and exit codes, and a table of its options."""
    usage = " ".join(found.collect_usage_pieces(click.Context(found)))
    parts = [f"## fedge {name}", f"`fedge {name} {usage}`", *map(paragraph, inspect.cleandoc(found.help).split("\n\n"))]
    options = [option for option in found.params if isinstance(option, click.Option)]
    table = ["\n".join(["| option | |", "|---|---|", *map(row, options)])] if options else []
    return "\n\n".join([*parts, *table]) + "\n"


def paragraph(text: str) -> str:
    """A paragraph of a command's docstring: examples become a block, the rest is text."""
    title, _, rest = text.removeprefix("\b\n").partition("\n")
    if title != "Examples:":
        return text.removeprefix("\b\n")
    return f"<!-- not run: help -->\n```console\n{inspect.cleandoc(rest)}\n```"


def row(option: click.Option) -> str:
    """An option, and what its help says."""
    value = "" if option.is_flag else f" {option.make_metavar(click.Context(command))}".replace("|", ", ")
    text = re.sub(r"(FEDGE_\w+)", r"`\1`", option.help or "").replace("  [", " [")
    if option.show_default and not option.is_flag:
        text += f" [default: {option.default}]"
    return f"| `{', '.join(option.opts)}{value}` | {text} |"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
