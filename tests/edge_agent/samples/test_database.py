"""The file of the samples: for its owner alone, and damage is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.samples.database import Database, get_fact, save_fact
from fedge.errors import DamagedError, StoreError


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    database = Database(tmp_path)
    with database.write() as db:
        save_fact(db, "n", 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3  # with its log, which holds samples, too
    assert [oct(path.stat().st_mode & 0o077) for path in files] == ["0o0"] * 3
    assert oct((tmp_path / "samples").stat().st_mode & 0o777) == "0o700"
    database.close()


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path)
    with pytest.raises(DamagedError), database.write() as db:
        db.execute("INSERT INTO facts VALUES ('n', 1), ('n', 1)")
    with database.read() as db:
        assert get_fact(db, "n", 0) == 0
    database.close()


def test_a_damaged_file_is_refused_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "samples" / "samples.db"
    file.parent.mkdir()
    file.write_bytes(b"not a database, and long enough to be looked at as one" * 100)
    with pytest.raises(DamagedError, match="damaged, move it away"):
        Database(tmp_path)
    assert file.stat().st_size > 1000


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("")
    with pytest.raises(StoreError):
        Database(tmp_path)
