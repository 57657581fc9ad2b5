"""The documents say what the code does: commands, refusals, messages, and links that lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
from msgspec import Struct

import fedge.errors
from coordinator.methods.catalogue import get_installed_methods
from coordinator.methods.option_values import list_code
from coordinator.methods.options import parse_method, parse_pairs, require_method_options
from fedge.steps.contract import Result, load_installed_steps
from fedge.wire.messages import BlobRef, Capabilities, Context, Health, Message, Outcome, Quality, Report, Status, Want
from tests.support import floors_reference, method_reference, step_reference
from tests.support.cli_reference import commands, reference

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedge", "edge_agent", "coordinator", "export", "deploy")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
PRIVACY = (ROOT / "docs/privacy.md").read_text()

SENT_BY_DEVICES: tuple[type[Struct], ...] = (
    Status,
    Capabilities,
    Context,
    Report,
    Want,
    BlobRef,
    Health,
    Quality,
)


def test_every_command_has_examples_exit_codes_and_json() -> None:
    for name, found in commands():
        assert "Examples:" in found.help, name
        assert f"fedge {name}" in found.help
        assert "Exit codes:" in found.help, name
        assert isinstance(found, click.Group) or any("--json" in parameter.opts for parameter in found.params), name


def test_the_reference_of_the_commands_is_up_to_date() -> None:
    written = (ROOT / "docs/cli.md").read_text()
    assert written == reference(), "make it anew: python -m tests.support.cli_reference > docs/cli.md"


def test_the_reference_leads_from_each_command_to_all_of_its_options_and_to_no_other() -> None:
    """Its own are listed; of the others it names the headings: all of one, all without some, or some of it."""
    parts = re.split(r"^##+ ", reference(), flags=re.MULTILINE)
    texts = {title: text for title, _, text in (part.partition("\n") for part in parts)}
    listed = {title: set(re.findall(r"^- `(--[\w-]+)", text, re.MULTILINE)) for title, text in texts.items()}
    for name, found in commands():
        told, flags = " ".join(texts[f"fedge {name}"].split()), set(listed[f"fedge {name}"])
        for some, heading, but in re.findall(
            r"((?:`[^`]+` )+of )?\[([\w ]+)\]\(#[\w-]+\)((?: without)?(?: `--[^`]+`)*)", told
        ):
            named = set(re.findall(r"--[\w-]+", some or but))
            flags |= named if some else listed[heading] - named
        wanted = {option.opts[0] for option in found.params if isinstance(option, click.Option)}
        assert flags | {"--json"} >= wanted, name
        assert flags <= wanted, name


def test_the_plan_of_the_house_is_that_of_the_import_contracts() -> None:
    written = (ROOT / "docs/architecture.md").read_text()
    assert floors_reference.reference() in written, "make it anew: python -m tests.support.floors_reference"


def test_the_reference_of_the_methods_is_up_to_date() -> None:
    written = (ROOT / "docs/methods/README.md").read_text()
    assert written == method_reference.reference(), (
        "make it anew: python -m tests.support.method_reference > docs/methods/README.md"
    )


def test_the_methods_have_few_options_and_few_settings_that_all_share() -> None:
    shared, options = (ROOT / "docs/methods/README.md").read_text().split("## Options of a method")
    rows = re.compile(r"^\| `", re.MULTILINE)
    assert 0 < len(rows.findall(shared)) <= 15
    assert 0 < len(rows.findall(options)) <= 2.65 * len(get_installed_methods())  # 45 for 17 methods


def examples() -> Iterator[list[str]]:
    """The words of every `fedge` command in the documents' blocks; those of the commands' help are in docs/cli.md."""
    for document in DOCUMENTS:
        for block in re.findall(r"^```console\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(\S*/)?fedge ", line):
                    yield shlex.split(line.replace(" &", ""), comments=True)[1:]


def test_every_example_is_a_command_that_there_is() -> None:
    known = dict(commands())
    seen = set()
    for words in examples():
        name = next(name for n in (2, 1) if (name := " ".join(words[:n])) in known)
        context = known[name].make_context(name, words[len(name.split()) :])  # raises for what it does not know
        methods = context.params.get("methods") or context.params.get("method") or ""
        for text in filter(None, methods.split(",")):
            method, options = parse_method(text)
            if ":" not in method:  # otherwise the reader's own
                given = options | parse_pairs(context.params.get("options") or ())
                require_method_options(
                    method, {option: value for option, value in given.items() if not list_code({option: value})}
                )
        seen.add(name)
    assert seen == {name for name, found in known.items() if not isinstance(found, click.Group)}


def test_flags_beside_the_words_of_other_frameworks_are_flags_that_there_are() -> None:
    known = {flag for _, found in commands() for parameter in found.params for flag in parameter.opts}
    for page in ("coming-from", "planning"):
        flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / f"docs/{page}.md").read_text())
        assert set(flags) <= known, page


def test_every_name_of_the_python_reference_stands_in_its_tables_too() -> None:
    page = (ROOT / "docs/api.md").read_text()
    told = "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    found = vars(fedge.errors).items()
    errors = [name for name, kind in found if isinstance(kind, type) and issubclass(kind, fedge.errors.FedgeError)]
    names = [path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", page, re.MULTILINE)]
    names = [*fedge.__all__, *errors, *(name for name in names if name not in {"interface", "errors"})]
    assert [name for name in names if not re.search(rf"\b{name}\b", told)] == []


def test_every_refusal_is_in_the_protocol_and_no_other() -> None:
    sources = [file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    raised = {name for source in sources for name in re.findall(r'ProtocolError\(\s*"([a-z-]+)"', source)}
    table = PROTOCOL.partition("## Refusals")[2].partition("\n\nAn order")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == raised


def test_every_message_is_in_the_protocol_with_its_version() -> None:
    for kind in get_args(Message):
        assert f"| {kind.__name__} | {kind.VERSION} |" in PROTOCOL


def test_every_step_is_in_the_protocol_with_its_version_and_result_and_no_other() -> None:
    table = PROTOCOL.partition("| step | version | result |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \|", table, re.MULTILINE))
    assert rows == {(name, str(kind.VERSION), kind.RESULT.__name__) for name, kind in load_installed_steps().items()}


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_in_the_protocol(outcome: Outcome) -> None:
    assert f"| `{outcome}` |" in PROTOCOL


@pytest.mark.parametrize("kind", SENT_BY_DEVICES, ids=lambda kind: kind.__name__)
def test_every_field_that_leaves_a_device_is_in_the_privacy_document(kind: type[Struct]) -> None:
    missing = [field for field in kind.__struct_fields__ if f"`{field}`" not in PRIVACY]
    assert missing == []


def test_the_table_of_what_an_owner_lets_out_is_up_to_date() -> None:
    assert step_reference.kinds() in PRIVACY, "make it anew: python -m tests.support.step_reference"


@pytest.mark.parametrize(("kind", "names"), step_reference.by_result().items(), ids=lambda word: str(word))
def test_every_field_of_a_result_is_told_in_words_under_one_of_its_steps(kind: type[Result], names: list[str]) -> None:
    """Not under another one that has a field of the same name."""
    (mark,) = [f"**`{name}`**" for name in names if f"**`{name}`**" in PRIVACY]
    told = re.split(r"\n(?:\*\*`|#)", PRIVACY.partition(mark)[2])[0]
    assert [field for field in kind.__struct_fields__ if f"`{field}`" not in told] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_benchmark_command_is_one_of_a_script_that_has_its_flags(document: Path) -> None:
    text = re.sub(r"\\?\n\s*", " ", document.read_text())
    for script, words in re.findall(r"python (benchmarks/[\w/]+\.py)([^`|]*?)(?=`|\||  |$)", text):
        own = (ROOT / script).read_text()
        shared = ("script.py", "papers/table.py", *["default_method.py"] * ("parser_of_settings" in own))
        known = own + "".join((ROOT / "benchmarks" / name).read_text() for name in shared)
        assert [flag for flag in re.findall(r"(?<= )--[a-z-]+", words) if f'"{flag}"' not in known] == [], script


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_and_named_tests_are_there(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    for file, name in re.findall(r"`((?:tests|benchmarks|examples)/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {name}" in (ROOT / file).read_text()
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == []


def modules_with_examples() -> list[str]:
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if re.search(r"^ *>>> ", file.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_give_what_they_say(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
