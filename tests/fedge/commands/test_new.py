import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedge.commands.broker import find_free_port
from fedge.commands.cli import main
from fedge.errors import ConfigError
from fedge.tasks import load_task, read_device_data


def test_it_makes_a_project_by_the_folders_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "press-states"), "--json"]) == 0
    made = {
        Path(file).relative_to(tmp_path / "press-states").as_posix() for file in json.loads(capsys.readouterr().out)
    }
    assert made >= {"press_states.py", "test_press_states.py", "settings.toml", "README.md", "samples/all.npz"}
    assert "class PressStates:" in (tmp_path / "press-states/press_states.py").read_text()
    assert main(["new", str(tmp_path / "press-states")]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("1st", "letters"), ("class", "letters"), ("a b", "letters"), ("json", "module")]
)
def test_names_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_its_task_keeps_marks_and_refuses_a_typo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["new", str(tmp_path / "marked-task")]) == 0
    monkeypatch.syspath_prepend(tmp_path / "marked-task")
    with np.load(tmp_path / "marked-task/samples/dev1.npz") as held:
        x, y = held["x"], held["y"]
    marks, source = np.arange(len(y)) % 3 == 0, tmp_path / "dev.npz"
    np.savez(source, x=x, y=y, sensitive=marks)
    task = load_task("marked_task:MarkedTask", source)
    data = read_device_data(task, source, seed=0)
    assert data.sensitive_val is not None
    assert data.sensitive.sum() + data.sensitive_val.sum() == marks.sum()
    np.savez(source, x=x, y=y, Sensitive=marks)
    with pytest.raises(ConfigError, match="did you mean sensitive"):
        read_device_data(task, source, seed=0)


@pytest.mark.process
def test_its_readme_runs_as_it_is_written(tmp_path: Path) -> None:
    """Check, simulation, its own test, and a federation of three devices over a broker."""
    fedge = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{fedge}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["fedge", "new", "my-task"], cwd=tmp_path, env=environment, check=True)
    folder, port = tmp_path / "my-task", str(find_free_port("127.0.0.1"))
    (folder / "settings.toml").write_text((folder / "settings.toml").read_text().replace("1883", port))
    blocks = (folder / "README.md").read_text().replace("1883", port).split("```console\n")[1:]
    script = "set -e\n" + "".join(block.partition("```")[0] for block in blocks)
    ran = subprocess.run(
        ["bash", "-m", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "remark" not in ran.stdout
    assert "2 passed" in ran.stdout
    assert "accuracy 0.9" in ran.stdout or "accuracy 1.0" in ran.stdout
