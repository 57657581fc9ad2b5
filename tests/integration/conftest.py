"""Fixtures of the tests in which releases reach devices: a signed repository, and a bundle before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.signing import Repository
from tests.deploy.bundles import other_gate, variant


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    Repository.create(tmp_path / "repo")
    return tmp_path / "repo"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return variant(tmp_path / "old", release=1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return variant(tmp_path / "new", release=2, gate=other_gate)
