"""A signed repository with a bundle before and after, for releases; and coordinators without a child process."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.service import beginning
from export.signing import Repository
from fedge.data.task import TaskSpec
from fedge.models.build import make_initial_model
from fedge.tensors.layout import Layout, Model
from tests.deploy.bundles import other_gate, variant


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    Repository.make(tmp_path / "repo")
    return tmp_path / "repo"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return variant(tmp_path / "old", release=1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return variant(tmp_path / "new", release=2, gate=other_gate)


@pytest.fixture
def first_model_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinators of this process make the first model in it, without the seconds of a child that imports torch.

    That a child makes the same, and tries the network first, is what tests/coordinator/service/test_checks.py shows.
    """

    def made(task: TaskSpec, seed: int, *_: object) -> tuple[Layout, Model]:
        return make_initial_model(task, seed)

    monkeypatch.setattr(beginning, "make_first_model", made)
