"""The help of a command, which lists options under headings, each option described by sentences.

A setting names its heading where it is defined (`fedge.settings`), so it has the same heading in all commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from fedge.system.text import Heading

F = TypeVar("F", bound=Callable[..., Any])


class Option(click.Option):
    """An option under a heading. `setting` is whether a file and the environment can give it, too."""

    def __init__(self, *args: Any, heading: Heading = Heading.GENERAL, setting: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading
        self.setting = setting


class Command(click.Command):
    """A command whose help lists its options under their headings."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option --help, described in a sentence as all options are."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.help = "The command shows this text and ends."
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options by heading, all texts in one column."""
        rows: dict[Heading, list[tuple[str, str]]] = {heading: [] for heading in Heading}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                rows[find_heading(parameter)].append(record)
        widest = max(len(flag) for found in rows.values() for flag, _ in found)
        for heading, found in rows.items():
            if found:
                with formatter.section(heading.value):
                    formatter.write_dl([(flag.ljust(min(widest, WIDEST)), text) for flag, text in found], WIDEST)


class CommandGroup(click.Group, Command):
    """A command with sub-commands."""

    command_class = Command


WIDEST: Final = 28
"""Most characters of a flag that shares its line with its text; longer flags have a line of their own."""
JSON_HELP: Final = "The command prints its result as JSON."


def find_heading(parameter: click.Parameter) -> Heading:
    """Return the heading of a parameter; click's own parameters, such as --help, are general."""
    return parameter.heading if isinstance(parameter, Option) else Heading.GENERAL


def option(*names: str, heading: Heading, **attributes: Any) -> Callable[[F], F]:
    """Decorate a command with an option that only the command line can give."""
    return click.option(*names, cls=Option, heading=heading, **attributes)


def json_option(text: str = JSON_HELP) -> Callable[[F], F]:
    """Decorate a command with --json, which it gets as `as_json`."""
    return option("--json", "as_json", is_flag=True, heading=Heading.OUTPUT, help=text)


def last_option(default: int) -> Callable[[F], F]:
    """Decorate a command with --last, for a list that grows."""
    text = "The command shows this many entries, the newest."
    kind = click.IntRange(min=1)
    return option("--last", heading=Heading.SELECTION, type=kind, default=default, show_default=True, help=text)


def json_lines_option(each: str) -> Callable[[F], F]:
    """Decorate a command with --json for many results, such as one for each "event"."""
    return json_option(f"The command prints a line of JSON per {each}.")
