"""Code and documents cite the methods' specifications by section: every citation has its heading in docs/methods.

Three forms are read as citations:

- `NAME.md section 4.1`, `NAME.md sections 4, 6 and 8 to 10`, `NAME.md 4.1`: of docs/methods/NAME.md;
- `FedEPC section 5`: a method's name in the place of the file's;
- `section 5` alone: of the first docs/methods/NAME.md that the module's docstring names. In a page of docs/methods, and
  in the page of its figures in docs/results, it is a section of that page's own method.

A section of a paper is written with its own sign: "Li et al., §3.1".
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SPECIFICATIONS = {page.stem: page for page in sorted((ROOT / "docs/methods").glob("[a-z]*.md"))}
FOLDERS = ("fedge", "edge_agent", "coordinator", "export", "deploy", "benchmarks", "examples", "tests")
GENERATED = {"docs/methods/README.md", "docs/cli.md"}  # from docstrings, which are read where they stand
METHODS = {"FedEPC": "fedepc", "CFIC": "cfic", "FedCoE": "fedcoe", "SCMoE-PFL": "scmoe_pfl", "PM-MoE": "pm_moe"}

_SECTION = r"\d+(?:\.\d+)?"
_SECTIONS = rf"(?P<sections>{_SECTION}(?:(?:, and |, | and | to |-){_SECTION}(?![\w%]))*)"
CITATION = re.compile(
    rf"(?:(?P<file>\w+)\.md[`)]?,? |(?P<method>{'|'.join(METHODS)})(?:'s specification,)? )?[Ss]ections? {_SECTIONS}"
    rf"|(?P<short>\w+)\.md[`)]?,? {_SECTIONS.replace('sections', 'of_short')}"
)
HEADING = re.compile(rf"^#{{2,3}} ({_SECTION})\.? \S", re.MULTILINE)


class Citation(NamedTuple):
    """`name`: of the specification; None where a bare section stands in a text that names no specification."""

    source: str
    line: int
    name: str | None
    section: str


def texts() -> list[Path]:
    """Modules and documents that may cite a specification."""
    modules = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = sorted(file for file in (*modules, *documents) if str(file.relative_to(ROOT)) not in GENERATED)
    return [file for file in found if file != Path(__file__)]


def own_specification(file: Path, text: str) -> str | None:
    """What a bare section in this file is a section of."""
    if file.suffix == ".md":
        return file.stem if file.parent.name in {"methods", "results"} else None
    named = re.findall(r"(\w+)\.md\b", ast.get_docstring(ast.parse(text)) or "")
    return next((name for name in named if name in SPECIFICATIONS), None)


def citations(file: Path, root: Path = ROOT) -> Iterator[Citation]:
    """All citations of a file, a range as its two ends; their source is a path from the root."""
    text = file.read_text()
    joined = re.sub(r"\n[ #]*", lambda gap: " " + "\0" * (len(gap.group()) - 1), text)  # positions stay
    source = joined.replace("\0", "")
    if not (all_found := list(CITATION.finditer(source))):
        return
    own = own_specification(file, text)
    starts = [position for position, letter in enumerate(joined) if letter != "\0"]
    for found in all_found:
        name = found["file"] or found["short"] or METHODS.get(found["method"] or "", own)
        line = 1 + text.count("\n", 0, starts[found.start()])
        for section in re.findall(_SECTION, found["sections"] or found["of_short"]):
            yield Citation(str(file.relative_to(root)), line, name, section)


@functools.cache
def headings(name: str) -> list[str]:
    """Numbers of the sections of a specification."""
    return HEADING.findall(SPECIFICATIONS[name].read_text())


def problem(citation: Citation) -> str | None:
    """What is wrong with a citation, and where it stands; None: nothing."""
    where = f"{citation.source}:{citation.line}, section {citation.section}"
    if citation.name is None:
        return f"{where}: of what? Name docs/methods/NAME.md in the module's docstring"
    if citation.name not in SPECIFICATIONS:
        return f"{where}: there is no docs/methods/{citation.name}.md"
    return None if citation.section in headings(citation.name) else f"{where}: docs/methods/{citation.name}.md has none"


def test_every_cited_section_exists() -> None:
    found = [citation for file in texts() for citation in citations(file)]
    assert len(found) > 100
    assert [said for citation in found if (said := problem(citation))] == []


def test_what_is_wrong_with_a_citation_is_said_with_its_place() -> None:
    assert problem(Citation("a.py", 3, None, "4")) is not None
    assert problem(Citation("a.py", 3, "nothing", "4")) == "a.py:3, section 4: there is no docs/methods/nothing.md"
    assert problem(Citation("a.py", 3, "fedepc", "99")) == "a.py:3, section 99: docs/methods/fedepc.md has none"
    assert problem(Citation("a.py", 3, "fedepc", "4")) is None


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_sections_are_numbered_without_gaps(name: str) -> None:
    numbers = headings(name)
    whole = [int(number) for number in numbers if "." not in number]
    assert whole == list(range(1, len(whole) + 1))
    for section in whole:
        parts = [int(number.split(".")[1]) for number in numbers if number.startswith(f"{section}.")]
        assert parts == list(range(1, len(parts) + 1)), section


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Of docs/methods/fedepc.md."""\n# section 4.1', [("fedepc", "4.1")]),
        ('"""fedepc.md\nsections 3, 4.1 and 6 to 8."""', [("fedepc", n) for n in ("3", "4.1", "6", "8")]),
        ('"""fedcoe.md 7 (FedEPC section 9.10)."""', [("fedcoe", "7"), ("fedepc", "9.10")]),
        ('"""FedEPC\'s specification, section 4.4: so."""', [("fedepc", "4.4")]),
        ("x = 1  # section 5", [(None, "5")]),
        ("x = 1  # Li et al., §3.1", []),
    ],
)
def test_what_counts_as_a_citation(tmp_path: Path, text: str, found: list[tuple[str | None, str]]) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert [(citation.name, citation.section) for citation in citations(file, tmp_path)] == found
