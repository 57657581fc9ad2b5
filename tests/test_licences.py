"""Whoever installs fedge, with whichever extra, gets no package under a licence of the GPL family."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
GPL_FAMILY = re.compile(r"\b[AL]?GPL|GNU (?:Affero |Lesser |Library )?(?:Lesser )?General Public", re.IGNORECASE)


def licences(name: str) -> list[str]:
    """What a package says that its own code is under: any one of the answers may be chosen.

    Not what its wheel carries besides (SciPy's brings libgfortran, under the GPL with the runtime exception).
    """
    metadata = distribution(name).metadata
    if expression := metadata.get("License-Expression"):
        return re.split(r"\s+OR\s+", expression)
    if classifiers := [c for c in metadata.get_all("Classifier") or () if c.startswith("License :: OSI Approved ::")]:
        return classifiers
    return [(metadata.get("License") or "").strip().partition("\n")[0]]


def requirements(name: str, extra: str) -> list[Requirement]:
    """What a package needs here, with this extra ("": without any). Of fedge itself: what pyproject.toml says."""
    if name == "fedge":
        return [Requirement(text) for text in (EXTRAS[extra] if extra else PROJECT["dependencies"])]
    wanted = map(Requirement, distribution(name).requires or ())
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]


def required(extra: str) -> set[str]:
    """The packages that `fedge[extra]` brings into this environment, those that they bring, and so on."""
    found: set[tuple[str, str]] = set()
    open_ = {("fedge", ""), ("fedge", extra)}
    while open_:
        found |= open_
        needed = {(one.name, wanted) for name in open_ for one in requirements(*name) for wanted in ("", *one.extras)}
        open_ = needed - found
    return {name for name, _ in found} - {"fedge"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_extra_brings_a_package_of_the_gpl_family(extra: str) -> None:
    needed = sorted(required(extra))
    assert {"numpy", "msgspec", "click"} < set(needed)
    assert [name for name in needed if all(map(GPL_FAMILY.search, licences(name)))] == []
    assert [name for name in needed if not any(licences(name))] == []


@pytest.mark.parametrize(
    ("licence", "refused"),
    [
        ("GPL-3.0-or-later", True),
        ("LGPL-2.1-only", True),
        ("AGPL-3.0", True),
        ("License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)", True),
        ("GNU Affero General Public License v3", True),
        ("MPL-2.0", False),
        ("EPL-2.0", False),
        ("License :: OSI Approved :: BSD License", False),
    ],
)
def test_which_names_belong_to_the_family(licence: str, refused: bool) -> None:
    assert bool(GPL_FAMILY.search(licence)) == refused


def test_a_package_that_is_not_installed_is_no_reason_to_pass() -> None:
    with pytest.raises(PackageNotFoundError):
        licences("no-such-package-of-ours")


def test_fedge_itself_is_under_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "Copyright 2026 the fedge authors" in text
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
