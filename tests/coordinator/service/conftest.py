"""A store for the tests of a coordinator."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path / "server")) as opened:
        yield opened
