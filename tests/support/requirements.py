"""What an extra of fedge brings: of fedge itself as pyproject.toml says, of others as their metadata say."""

from __future__ import annotations

import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def brought(extra: str) -> dict[str, Distribution]:
    """What `fedge[extra]` brings into this environment, by name: what it needs, what that needs, and so on.

    Raises:
        PackageNotFoundError: something of it is not installed.
    """
    found: set[tuple[str, str]] = set()
    open_ = {("fedge", ""), ("fedge", extra)}
    while open_:
        found |= open_
        needed = [one for name, of_extra in open_ for one in _requirements(name, of_extra)]
        open_ = {(canonicalize_name(one.name), wanted) for one in needed for wanted in ("", *one.extras)} - found
    return {name: distribution(name) for name in sorted({name for name, _ in found} - {"fedge"})}


def _requirements(name: str, extra: str) -> list[Requirement]:
    """What a package needs here, with this extra ("": without any)."""
    if name == "fedge":
        return [Requirement(text) for text in (EXTRAS[extra] if extra else PROJECT["dependencies"])]
    wanted = map(Requirement, distribution(name).requires or ())
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]
