"""What a newcomer does first: README's commands as they are written, one after the other, and the notebook."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedge.broker import free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = ROOT / "examples/quickstart.py"


BEFORE = """
import numpy as np
from torch import nn

x = np.random.default_rng(0).random((900, 4))
y = x[:, :3].argmax(1)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))
"""
"""What README's example in Python has before it."""


def commands_by_hand() -> str:
    """The block under "A federation by hand", with a port that is free here."""
    block = re.search(r"```console\n(.*?)```", README.partition("## A federation by hand")[2], re.DOTALL)
    assert block is not None
    return block[1].replace("1883", str(free_port("127.0.0.1"))) + "\n"


@pytest.mark.smoke
def test_readmes_commands_run_as_they_are_written(tmp_path: Path) -> None:
    script = "set -e\n" + commands_by_hand().replace("fedge serve --home cam1", "exec fedge serve --home cam1 --port 0")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", "-m", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stderr is not None
        said = []
        for line in shell.stdout:
            said.append(line)
            if line.startswith("serving "):
                shell.send_signal(signal.SIGINT)
        log = shell.stderr.read()
        assert shell.wait(60) == 130, "".join(said) + log
    told = "".join(said)
    assert "rounds      5 of 5, done" in told
    accuracy = float(re.search(r"  accuracy (0\.\d+)", told)[1])  # type: ignore[index]
    assert accuracy > 0.5, "far above the 10 percent of guessing"
    assert "serving digits at http" in told
    assert "Traceback" not in log


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_readmes_simulations_run_as_they_are_written(command: str, tmp_path: Path) -> None:
    line = re.search(rf"^\.venv/bin/fedge ({command} .*)$", README, re.MULTILINE)
    assert line is not None
    words = [sys.executable, "-m", "fedge.cli", *line[1].split()]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "accuracy" in ran.stdout


def test_readmes_python_runs_as_it_is_written(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    (tmp_path / "pandas.py").write_text("DataFrame = list")  # the tests do not bring it
    words = [sys.executable, "-c", BEFORE + block[1]]  # which finds modules in its folder
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_notebook_runs_as_a_script(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, QUICKSTART], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "fedge 0." in ran.stdout


async def test_the_notebook_runs_cell_by_cell_where_a_loop_is_running() -> None:
    assert asyncio.get_running_loop().is_running()
    space: dict[str, object] = {"__name__": "__main__"}
    for cell in QUICKSTART.read_text().split("# %%"):
        if not cell.startswith(" [markdown]"):
            exec(compile(cell, "cell", "exec"), space)
    assert "<svg" in space["table"]._repr_html_()  # type: ignore[attr-defined]
