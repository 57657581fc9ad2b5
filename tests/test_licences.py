"""Whoever installs fedge, with whichever extra, gets no package under a licence of the GPL family."""

from __future__ import annotations

import re
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.support.requirements import EXTRAS, PROJECT, brought

ROOT = Path(__file__).parent.parent
GPL_FAMILY = re.compile(r"\b[AL]?GPL|GNU .*General Public", re.IGNORECASE)


def licences(package: Distribution) -> list[str]:
    """What a package says that its own code is under: any one of the answers may be chosen.

    Not what its wheel carries besides (SciPy's brings libgfortran, under the GPL with the runtime exception).
    """
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return re.split(r"\s+OR\s+", expression)
    if classifiers := [c for c in metadata.get_all("Classifier") or () if c.startswith("License :: OSI Approved ::")]:
        return classifiers
    return [(metadata.get("License") or "").strip().partition("\n")[0]]


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_extra_brings_a_package_of_the_gpl_family(extra: str) -> None:
    found = {name: licences(package) for name, package in brought(extra).items()}
    assert found.keys() > {"numpy", "msgspec", "click"}
    assert [name for name, choice in found.items() if not any(choice) or all(map(GPL_FAMILY.search, choice))] == []


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


def test_fedge_itself_is_under_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "Copyright 2026 the fedge authors" in text
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
