"""The help of all commands: headings, sentences, and each option once."""

import re
from collections import Counter
from enum import Enum

import click
import pytest
from click.testing import CliRunner

from fedge.commands.cli import command as fedge
from fedge.system.help import Command, CommandGroup, Option, find_heading, json_lines_option, json_option, option
from fedge.system.text import Heading
from tests.support.cli_reference import commands

ALL = [("", fedge), *commands()]
EACH = pytest.mark.parametrize("found", [found for _, found in ALL], ids=[name or "fedge" for name, _ in ALL])
VERBS = frozenset(
    re.split(
        r"\s+",
        "acts admits are be becomes begins belongs changes come counts covers decides declines deletes describe "
        "differ distinguishes do ends fine-tunes follow get gets give gives go goes has have hold holds is keeps "
        "leads leave leaves listens lists looks lose makes may must names needs passes prints reach replaces "
        "reports run runs says sees sets show shows stands stays stops take takes tells trains turns uses wait "
        "waits win",
    )
)
"""Words of which each sentence has one."""


def lines_of(found: click.Command) -> list[str]:
    """What --help prints, its options from the left."""
    return CliRunner().invoke(found, ["--help"], terminal_width=1000).output.splitlines()


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.partition("  [")[0])


@EACH
def test_help_lists_every_option_once_under_its_heading(found: click.Command) -> None:
    listed: dict[str, list[str]] = {}
    heading = ""
    for line in lines_of(found):
        heading = line.removesuffix(":") if re.fullmatch(r"[A-Z][\w ]+:", line) else heading
        if line.startswith("  -"):
            listed.setdefault(heading, []).append(line.split()[0].rstrip(","))
    wanted: dict[str, list[str]] = {}
    for each in found.get_params(click.Context(found)):
        if isinstance(each, click.Option):
            first = "-f" if "-f" in each.opts else "--help" if each.name == "help" else each.opts[0]
            wanted.setdefault(find_heading(each).value, []).append(first)
    assert listed == wanted


@EACH
def test_headings_keep_their_order(found: click.Command) -> None:
    order = [heading.value for heading in Heading]
    printed = [line[:-1] for line in lines_of(found) if line.endswith(":") and line[:-1] in order]
    assert printed == sorted(printed, key=order.index)


@EACH
def test_only_what_is_about_the_command_itself_is_general(found: click.Command) -> None:
    general = {each.name for each in found.get_params(click.Context(found)) if find_heading(each) is Heading.GENERAL}
    options = {each.name for each in found.params if isinstance(each, click.Option)}
    assert general & options <= {"config", "help", "version", "log_level", "log_format"}


@EACH
def test_every_text_of_an_option_is_made_of_short_sentences(found: click.Command) -> None:
    for each in found.get_params(click.Context(found)):
        if not isinstance(each, click.Option):
            continue
        for sentence in sentences(each.help or ""):
            words = sentence.split()
            assert re.fullmatch(r"[A-Z].*[a-z0-9)].*\.", sentence), (each.name, sentence)
            assert 3 <= len(words) <= 25, (each.name, sentence)
            assert VERBS & {word.strip(",.;:()") for word in words}, (each.name, sentence)


def test_a_setting_that_commands_describe_alike_has_one_heading() -> None:
    headings: dict[tuple[str, str], set[Heading]] = {}
    for _, found in commands():
        for each in found.params:
            if isinstance(each, Option):
                headings.setdefault((each.opts[0], sentences(each.help or "")[0]), set()).add(each.heading)
    assert {key: found for key, found in headings.items() if len(found) > 1} == {}


def test_most_options_have_one_description_in_all_commands() -> None:
    """One that differs from command to command is read anew each time."""
    texts = {(each.opts[0], each.help) for _, found in commands() for each in found.params if isinstance(each, Option)}
    several = Counter(flag for flag, _ in {(flag, (text or "").partition("  [")[0]) for flag, text in texts})
    assert sum(n == 1 for n in several.values()) > 100


@click.group(cls=CommandGroup)
def tools() -> None:
    """Tools."""


@tools.command()
@option("--colour", heading=Heading.TRAINING, help="It has this colour.")
@json_lines_option("tool")
@click.option("--other", help="It is plain.")
def tool(**_: object) -> None:
    """A tool."""


def test_commands_of_a_group_have_headings_too_and_plain_options_are_general() -> None:
    assert isinstance(tool, Command)
    text = "\n".join(lines_of(tool))
    places = [text.index(each) for each in ("Training:", "--colour", "Output:", "--json", "General:", "--other")]
    assert places == sorted(places)
    assert "The command prints a line of JSON per tool." in text
    assert "tool  A tool." in "\n".join(lines_of(tools))


def test_texts_begin_in_the_same_column_under_all_headings() -> None:
    @click.command(cls=Command)
    @option("--a", heading=Heading.TASK, help="It is short.")
    @option("--long-enough", heading=Heading.OUTPUT, help="It is longer.")
    @json_option()
    def both(**_: object) -> None:
        """Both."""

    found = [line for line in lines_of(both) if line.startswith("  -")]
    assert len({re.search(r"(?<=  )[A-Z][a-z]", line).start() for line in found}) == 1  # type: ignore[union-attr]


def test_a_heading_is_no_text_of_its_setting() -> None:
    assert issubclass(Heading, Enum)
    assert not issubclass(Heading, str)
