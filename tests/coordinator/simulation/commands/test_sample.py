import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedge.commands.cli import main
from fedge.tasks import load_task, read_device_data


def test_an_agent_can_read_what_it_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["sample", "--devices", "2", "--samples", "120", "--sensitive", "0.5", "--out", str(out)]) == 0
    assert f"{out / 'cam2.npz'}: " in capfd.readouterr().out
    data = read_device_data(load_task(str(out / "task.json")), out / "cam1.npz", seed=0)
    assert data.n_train > data.n_shared > 0
    with np.load(out / "cam1-test.npz") as test:
        assert len(test["x"]) == len(test["y"]) > 0
    assert main(["sample", "--out", str(out)]) == 2
    assert "is not empty" in capfd.readouterr().err


def test_the_files_as_json_and_samples_without_torch(tmp_path: Path) -> None:
    code = "import sys; from fedge.commands.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    flags = ["sample", "--devices", "1", "--out", str(tmp_path), "--json"]
    ran = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [str(tmp_path / "cam1.npz")]


def test_what_changes_nothing_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--partition", "iid", "--alpha", "0.1"]) == 2
    assert "changes nothing" in capfd.readouterr().err
