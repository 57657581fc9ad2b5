"""What a newcomer does first in Python: README's example as it is written, and the notebook."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_readmes_python_runs_as_it_is_written(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    (tmp_path / "pandas.py").write_text("DataFrame = list")  # the tests do not bring it
    words = [sys.executable, "-c", BEFORE + block[1]]  # which finds modules in its folder
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


async def test_the_notebook_runs_cell_by_cell_where_a_loop_is_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.get_running_loop().is_running()
    space: dict[str, object] = {"__name__": "__main__"}
    for cell in QUICKSTART.read_text().split("# %%"):
        if not cell.startswith(" [markdown]"):
            exec(compile(cell, "cell", "exec"), space)
    assert "fedge 0." in capsys.readouterr().out
    assert "<svg" in space["table"]._repr_html_()  # type: ignore[attr-defined]
