"""What tests of several parts of the coordinator do without."""

from __future__ import annotations

import pytest

from coordinator.fleet.mqtt import checking
from coordinator.service import beginning
from fedge.data.task import TaskSpec
from fedge.tensors.layout import Layout, Model
from tests.support.learners import first_model


@pytest.fixture
def checked_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of any size are checked in processes, as large ones are: tests need no 65,536 weights for that."""
    monkeypatch.setattr(checking, "SMALL", 0)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first model without the seconds that its child needs for torch: the seed of each that was made.

    `coordinator.service.checks.make_first_model` has its own tests.
    """
    seeds: list[int] = []

    def made(task: TaskSpec, seed: int, *rest: object) -> tuple[Layout, Model]:
        seeds.append(seed)
        return first_model(task, seed, *rest)

    monkeypatch.setattr(beginning, "make_first_model", made)
    return seeds
