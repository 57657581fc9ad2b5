"""An environment that holds what `fedge[deploy]` needs and nothing else, made of links to what is installed here."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The start of a Python command and its environment; `folder` becomes its site-packages."""
    folder.mkdir()
    needed = _closure("fedge", "deploy")
    for name, found in needed.items():
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__", "bin"}:
            source = Path(str(found.locate_file(top)))
            if name != "fedge" or source.suffix == ".dist-info":  # our own packages come from the clone
                (folder / top).symlink_to(source)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return [sys.executable, "-S"], kept | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def _closure(name: str, extra: str) -> dict[str, Distribution]:
    """A distribution with an extra and all that it requires, by name."""
    found: dict[str, Distribution] = {}
    waiting = [(name, extra)]
    while waiting:
        current, wanted = waiting.pop()
        if current in found:
            continue
        try:
            found[current] = distribution(current)
        except PackageNotFoundError:  # of another platform or version
            continue
        for line in found[current].requires or ():
            requirement, _, marker = line.partition(";")
            asked = re.search(r"extra\s*==\s*['\"](.+?)['\"]", marker)
            if asked is None or asked[1] == wanted:
                waiting.append((re.split(r"[\s<>=!~\[;(]", requirement.strip())[0], ""))
    return found
