"""A child finds what its parent finds, and a failure says why."""

from pathlib import Path

import pytest

from fedge import child
from fedge.errors import ConfigError


def test_it_runs_a_module_that_only_this_process_knows_and_its_failure_is_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_work.py").write_text(
        "import sys\nfrom pathlib import Path\nprint('hello')\n"
        "Path(sys.argv[1]).write_text(sys.argv[2])\n"
        "if sys.argv[2] == 'bad': sys.exit('first line\\nno such thing')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    child.run("their_work", str(tmp_path / "out"), "good")
    assert (tmp_path / "out").read_text() == "good"
    with pytest.raises(ConfigError, match=r"\Ano such thing\Z"):
        child.run("their_work", str(tmp_path / "out"), "bad")


def test_a_file_in_the_present_folder_shadows_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedge.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    child.run("fedge.errors")
