"""docs/cli.md, made from the commands themselves: python -m tests.support.cli_reference > docs/cli.md.

An option that several commands describe with the same words stands once, under its heading; a command lists those of
its own and names the others. Of several such descriptions of a flag, all but the first say which commands have it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from textwrap import wrap

import click

from fedge.commands.cli import COMMANDS, command
from fedge.system.help import JSON_HELP, find_heading
from fedge.system.text import Heading

HEAD = """# The commands

Made by `python -m tests.support.cli_reference`; a test checks that it is up to date.

A command with `--config` has settings. They come from options, from environment variables and from a TOML file, in this
order: `--batch-size` of `fedge simulate` is also `FEDGE_SIMULATE_BATCH_SIZE`, and `batch_size` in the section
`[simulate]` of the file. All options are settings but `--config`, `--json`, `--option` and `--search`. An unknown key
is an error that names the nearest right one. A file may name code of your own, package.module:name, only if an option
or a variable does, too.

Every command has `--json`, which prints its result as JSON; another meaning is listed. Results go to standard output,
log lines to standard error. `fedge --log-level warning COMMAND` (`FEDGE_LOG_LEVEL`) writes fewer of them,
`fedge --log-format json COMMAND` (`FEDGE_LOG_FORMAT`) writes them for programs.

Exit codes: 0 done, 1 an error, 2 wrong usage or configuration, 3 the broker cannot be reached or refuses us, 4 durable
state cannot be written or read, 5 a bundle that is not to be trusted, 6 an end at which no device has a bundle, 130
stopped by Ctrl-C or SIGTERM. `fedge COMMAND --help` says what they mean for a command.

Parentheses hold an option's default and unit. Options that commands share are described at the [end](#shared-options).
"""


@dataclass(frozen=True)
class Row:
    """An option as its commands describe it; they may differ in the default."""

    flag: str
    value: str
    text: str
    default: str = field(compare=False)
    only: str = field(default="", compare=False)  # the commands that describe it so, if not all do

    def __str__(self) -> str:
        notes = "; ".join(filter(None, [self.default, self.only]))
        return f"- `{self.name}`{f' ({notes})' if notes else ''}: {self.text}"

    @property
    def name(self) -> str:
        """Flag and value."""
        return f"{self.flag} {self.value}".rstrip()


def reference() -> str:
    """The whole file."""
    parts = [section(name, found) for name, found in commands()]
    return "\n".join([HEAD, *parts, "## Shared options\n", *map(shared_section, shared())])


def commands() -> Iterator[tuple[str, click.Command]]:
    """All commands in their order; after one that has sub-commands come these, as "release add"."""
    for name in COMMANDS:
        found = command.get_command(click.Context(command), name)  # type: ignore[attr-defined]
        assert found is not None
        yield name, found
        if isinstance(found, click.Group):
            yield from ((f"{name} {part}", below) for part, below in found.commands.items())


@cache
def shared() -> Mapping[Heading, tuple[Row, ...]]:
    """Under each heading the options that more than one command describes in the same way, with the usual default."""
    having: dict[Heading, dict[Row, list[tuple[str, str]]]] = {heading: {} for heading in Heading}
    for name, found in commands():
        for heading, rows in options(found).items():
            for row in rows:
                having[heading].setdefault(row, []).append((name, row.default))
    return {heading: tuple(_usual(rows)) for heading, rows in having.items() if any(len(n) > 1 for n in rows.values())}


def _usual(having: Mapping[Row, list[tuple[str, str]]]) -> Iterator[Row]:
    """The rows that several commands have. `having`: of each row the commands, with their defaults."""
    most = {row.name: row for row in sorted(having, key=lambda row: len(having[row]))}
    for row, by in having.items():
        if len(by) > 1:
            default = Counter(default for _, default in by).most_common(1)[0][0]
            only = "" if most[row.name] == row else ", ".join(name for name, _ in by)
            yield replace(row, default=default, only=only)


def options(found: click.Command) -> dict[Heading, list[Row]]:
    """The options of a command by heading, without those that the head describes."""
    rows: dict[Heading, list[Row]] = {}
    for each in found.params:
        if isinstance(each, click.Option) and each.help != JSON_HELP:
            rows.setdefault(find_heading(each), []).append(row_of(each))
    return {heading: rows[heading] for heading in Heading if heading in rows}


def row_of(option: click.Option) -> Row:
    """An option, what it says, and its default with its unit."""
    value = "" if option.is_flag else option.make_metavar(click.Context(command)).replace("|", ", ")
    text, _, notes = (option.help or "").partition("  [")
    if option.name == "config":
        text = "This TOML file has settings, those of a command in the section of its name."
    known = dict(re.findall(r"(\w+): ([^;\]]*)", notes))
    default = str(option.default) if option.show_default and not option.is_flag else known.get("default", "")
    default = "required" if option.required or "required" in notes else default.replace("False", "")
    told = " ".join(filter(None, [default, known.get("unit")]))
    return Row(", ".join(option.opts), value.removesuffix(" RANGE"), text, told)


def shared_section(heading: Heading) -> str:
    """The options under a heading that commands share."""
    return "\n".join([f"### {heading.value}", "", *map(str, shared()[heading]), ""])


def section(name: str, found: click.Command) -> str:
    """One command: what it takes and does, its examples, and its options; those of sub-commands have their own."""
    arguments = [piece for piece in found.collect_usage_pieces(click.Context(found)) if piece != "[OPTIONS]"]
    texts = [paragraph(text) for text in inspect.cleandoc(found.help or "").replace("\b\n", "").split("\n\n")]
    parts = [
        f"## fedge {name}",
        *([f"`fedge {name} {' '.join(arguments)}`"] if arguments else []),
        *filter(None, texts),
    ]
    if isinstance(found, click.Group):
        return "\n\n".join(part for part in parts if "```" not in part) + "\n"
    return "\n\n".join([*parts, *own_and_shared(options(found))]) + "\n"


def paragraph(text: str) -> str:
    """A paragraph of a command's docstring: examples become a block, exit codes are in the head, the rest is text."""
    title, _, rest = text.partition("\n")
    if title == "Examples:":
        return f"```console\n{inspect.cleandoc(rest)}\n```"
    return "" if text.startswith("Exit codes:") else text


def own_and_shared(by_heading: Mapping[Heading, list[Row]]) -> Iterator[str]:
    """A list of a command's own options, then a sentence about the shared ones."""
    own, named, differing = [], [], []
    for heading, rows in by_heading.items():
        common = {row: row.default for row in shared().get(heading, ())}
        own += [str(row) for row in rows if row not in common]
        taken = [row for row in rows if row in common]
        differing += [f"`{row.flag}` ({row.default or 'optional'})" for row in taken if row.default != common[row]]
        if taken:
            named.append(of_heading(heading, taken))
    if own:
        yield "\n".join(own)
    also = f"{'And' if own else 'Options:'} {', '.join(named)}." if named else ""
    if differing:
        also += f" Other defaults: {', '.join(differing)}."
    if also:
        yield "\n".join(wrap(also, 120, break_long_words=False, break_on_hyphens=False))


def of_heading(heading: Heading, taken: list[Row]) -> str:
    """The options that a command has of a heading: all, all but some, or some."""
    link = f"[{heading.value}](#{heading.value.lower().replace(' ', '-')})"
    names = {row.name for row in taken}
    lacking = [row for row in shared()[heading] if row.name not in names and not row.only]
    if not lacking:
        return link
    return f"{link} without {flags(lacking)}" if len(lacking) < len(taken) else f"{flags(taken)} of {link}"


def flags(rows: list[Row]) -> str:
    """The names of options; --json takes a value or not."""
    return " ".join(
        f"`{row.flag} {row.value}`" if row.value and row.flag == "--json" else f"`{row.flag}`" for row in rows
    )


if __name__ == "__main__":
    click.echo(reference(), nl=False)
