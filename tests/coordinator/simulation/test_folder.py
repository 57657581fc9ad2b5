from pathlib import Path

import pytest

from coordinator.simulation.folder import named_by_time, new_folder
from fedge.errors import ConfigError


def test_old_results_are_not_mixed_with_new(tmp_path: Path) -> None:
    assert new_folder(tmp_path / "a" / "b", "demo").is_dir()
    (tmp_path / "a" / "b" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        new_folder(tmp_path / "a" / "b", "demo")


def test_a_folder_that_nobody_named_has_the_name_of_the_command_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_by_time("compare").name.startswith("fedge-compare-2")
    assert new_folder(None, "demo").name.startswith("fedge-demo-2")
