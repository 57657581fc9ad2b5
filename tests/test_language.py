"""Names say what a function does, and one thing has one word: the rules of CONTRIBUTING.md and of docs/glossary.md."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.language import NAMES_THAT_STAY, PREDICATES, PREPOSITIONS, VERBS

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "deploy", "edge_agent", "export", "fedge")
NO_NAMES = {"property", "cached_property", "setter", "command", "group"}
"""Decorators of what is no function for its caller."""
GLOSSARY = ROOT / "docs" / "glossary.md"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def decorators(function: Function) -> set[str]:
    return {ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list}


class Named(NamedTuple):
    where: str
    name: str
    returns: str | None


@functools.cache
def functions() -> list[Named]:
    """Functions and methods, also nested ones, but for properties, commands and special methods."""
    return [
        Named(f"{file}:{node.lineno}", node.name, None if node.returns is None else ast.unparse(node.returns))
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, Function) and not (re.fullmatch(r"__\w+__", node.name) or decorators(node) & NO_NAMES)
    ]


def words(name: str) -> list[str]:
    """The words of an identifier: snake_case or CamelCase."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def identifiers() -> Iterator[tuple[str, str]]:
    """What our code names itself: functions, classes, parameters, variables and fields."""
    for file, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield f"{file}:{node.lineno}", node.name
                case ast.arg():
                    yield f"{file}:{node.lineno}", node.arg
                case ast.Name(ctx=ast.Store()):
                    yield f"{file}:{node.lineno}", node.id
                case ast.Attribute(ctx=ast.Store()):
                    yield f"{file}:{node.lineno}", node.attr


def glossary(heading: str | None) -> dict[str, str]:
    """The first two columns of the table under a heading; None: the first table."""
    text = GLOSSARY.read_text()
    part = text if heading is None else text.split(f"## {heading}\n")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", part.split("\n## ")[0], re.MULTILINE)
    return dict(rows[1:])  # without the names of the columns


def not_our_words() -> dict[str, str]:
    """Each word that our names do not use, with ours."""
    return {word: ours for row, ours in glossary("Words that we do not use").items() for word in row.split(", ")}


def test_the_glossary_lists_words_to_avoid() -> None:
    assert len(not_our_words()) > 10


def test_no_word_to_avoid_is_one_of_ours() -> None:
    ours = {word for row in glossary(None) for word in row.split(", ")}

    assert not ours & not_our_words().keys()


def test_functions_begin_with_a_verb_or_ask_a_question() -> None:
    known = VERBS | PREDICATES | PREPOSITIONS

    others = [
        f"{function.where}: {function.name}"
        for function in functions()
        if function.name not in NAMES_THAT_STAY and words(function.name)[0] not in known
    ]

    assert not others, "rename these, or add a verb or an exception to tests/support/language.py"


def test_what_begins_with_a_preposition_goes_on() -> None:
    """`from_arrays` and `on_connect` say from what and on what; a bare preposition does not, but for `without`."""
    assert not [f"{f.where}: {f.name}" for f in functions() if f.name.strip("_") in PREPOSITIONS - {"without"}]


def test_predicates_return_a_truth_value() -> None:
    wrong = [
        f"{function.where}: {function.name}"
        for function in functions()
        if words(function.name)[0] in {"is", "has", "can", "are"}
        and function.name not in NAMES_THAT_STAY
        and function.returns is not None
        and not re.search(r"bool|TypeGuard", function.returns)
    ]

    assert not wrong


def test_no_list_names_what_is_gone() -> None:
    """A verb, a preposition or an exception that nothing needs any more is no rule."""
    names = {function.name for function in functions()}
    firsts = {words(name)[0] for name in names}

    assert not NAMES_THAT_STAY.keys() - names
    assert not (VERBS | PREDICATES | PREPOSITIONS) - firsts


def test_docstrings_begin_with_a_sentence() -> None:
    """A riddle saves a line and costs each reader a minute."""
    wrong = [
        f"{file}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function)
        and (text := ast.get_docstring(node) or "").startswith(("Of ", "As `", "None:"))
    ]

    assert not wrong


def test_identifiers_use_the_words_of_the_glossary() -> None:
    avoided = not_our_words()
    found: dict[str, list[str]] = defaultdict(list)

    for where, name in identifiers():
        for word in set(words(name)) & avoided.keys():
            if name not in NAMES_THAT_STAY:
                found[f"{word} (we say {avoided[word]})"].append(f"{where}: {name}")

    assert not found
