"""What the examples have in common: they are short, and what their first lines tell people to run can be run."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from coordinator.methods.catalogue import load_method_class
from coordinator.methods.options import parse_method, require_method_options
from fedge.steps.contract import load_known_steps
from tests.support.cli_reference import commands

FILES = sorted((Path(__file__).parents[2] / "examples" / "methods").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_at_most_120_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 120


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_commands(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in re.findall(r"^ +fedge (.*)$", text, re.MULTILINE)]
    known = {name: {flag for parameter in found.params for flag in parameter.opts} for name, found in commands()}
    assert {line[0] for line in lines} >= {"compare", "coordinator", "agent"}
    for name, *words in lines:
        assert {word for word in words if word.startswith("--")} <= known[name]
        given = dict(itertools.pairwise(words))
        for method in ",".join(given.get(flag, "") for flag in ("--method", "--methods")).split(","):
            if method:
                require_method_options(*parse_method(method))
        load_known_steps(path for path in given.get("--steps", "").split(",") if path)
    assert load_method_class(f"methods.{file.stem}:{own_class(text)}").name == file.stem


def own_class(text: str) -> str:
    (name,) = re.findall(r"--method methods\.\w+:(\w+)", text)
    return name
