"""An environment that holds what `fedge[deploy]` needs and nothing else, made of links to what is installed here."""

from __future__ import annotations

import os
import sys
from importlib.metadata import distribution
from pathlib import Path

from tests.support.requirements import brought

ROOT = Path(__file__).parents[2]


def environment(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The start of a Python command and its environment; `folder` becomes its site-packages."""
    folder.mkdir()
    for name, found in [("fedge", distribution("fedge")), *brought("deploy").items()]:
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__", "bin"}:
            source = Path(str(found.locate_file(top)))
            if name != "fedge" or source.suffix == ".dist-info":  # our own packages come from the clone
                (folder / top).symlink_to(source)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return [sys.executable, "-S"], kept | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
