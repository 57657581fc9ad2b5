"""How large the house is: entries and lines of each room, long files, words of the documents.

    python benchmarks/house.py

Code is a line that holds more than a docstring or a comment. A word is a token between blanks that holds a letter or a
digit: bars and dashes of a table are no words. `make lint` checks that imports go down only and in no circle; this
script counts.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from script import finish, parser_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedge", "edge_agent", "export", "coordinator", "deploy")
LONG = 400


def entries(room: Path) -> int:
    """Modules and rooms in a folder, apart from its own page."""
    inside = [p for p in room.iterdir() if not p.name.startswith("__")]
    return sum(p.suffix == ".py" or (p / "__init__.py").is_file() for p in inside)


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code."""
    aside = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in aside]
    lines = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def rooms() -> Iterator[Path]:
    """All packages and their rooms, from the roof down."""
    for package in PACKAGES:
        yield from sorted(p.parent for p in (ROOT / package).rglob("__init__.py"))


def documents() -> list[Path]:
    """Everything that is written for people."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def words(text: str) -> int:
    """Tokens between blanks that hold a letter or a digit."""
    return sum(any(map(str.isalnum, token)) for token in text.split())


def main() -> None:
    """Count, print, and write if asked."""
    arguments = parser_of(__doc__).parse_args()
    found: list[dict[str, Any]] = []
    long_files: list[tuple[int, str]] = []
    for room in rooms():
        texts = {file: file.read_text(encoding="utf-8") for file in sorted(room.glob("*.py"))}
        code = sum(len(code_lines(text)) for text in texts.values())
        every = {file: len(text.splitlines()) for file, text in texts.items()}
        long_files += [(n, str(file.relative_to(ROOT))) for file, n in every.items() if n > LONG]
        name = str(room.relative_to(ROOT))
        found.append({"room": name, "entries": entries(room), "code": code, "lines": sum(every.values())})
        print(f"{name:42} {found[-1]['entries']:3} entries {code:6} code {found[-1]['lines']:6} lines")
    written = sum(words(page.read_text(encoding="utf-8")) for page in documents())
    total = {"code": sum(r["code"] for r in found), "lines": sum(r["lines"] for r in found), "words": written}
    print(f"together {total['code']} lines of code, {total['lines']} lines; {written} words of documents")
    for n, file in sorted(long_files, reverse=True):
        print(f"over {LONG} lines: {file} {n}")
    finish(arguments, {"rooms": found, "long": long_files, **total})


if __name__ == "__main__":
    main()
