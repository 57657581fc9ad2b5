import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from coordinator.demo.cli import demo, summary_of, table_of
from coordinator.demo.outcome import METHODS
from coordinator.simulation.report import of_demo
from fedge.cli import main
from tests.support.demo import a_background, an_outcome


def test_help_shows_examples_and_exit_codes() -> None:
    text = CliRunner().invoke(demo, ["--help"]).output
    assert "fedge demo --task mnist" in text
    assert "\n    Exit codes: 0" in text or "\n  Exit codes: 0" in text
    assert "\\b" not in text
    for flag in ("--devices", "--rounds", "--partition", "--sensitive", "--broker", "--participation", "--samples"):
        assert flag in text


def test_help_needs_neither_torch_nor_matplotlib() -> None:
    script = "import sys, coordinator.demo.cli; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task", "digit"], "unknown task digit (did you mean digits?)"),
        (["--devices", "0"], "--devices: Expected `int` >= 1"),
        (["--alpha", "0"], "--alpha: Expected `float` > 0"),
        (["--participation", "0"], "--participation: Expected `float` > 0"),
        (["--sensitive", "1.5"], "--sensitive: Expected `float` <= 1"),
        (["--task", "mnist"], "mnist needs its four IDX files"),
        (["--task", "image-folder", "--data", "no/such/place"], "no/such/place"),
        (["--broker", "mosquito"], "unknown broker 'mosquito'"),
        (["--method", "fedegg"], "there is no method 'fedegg'"),
        (["--method", "ditto", "--option", "proximal_lamda=1"], "did you mean 'proximal_lambda'"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "out"), *flags]) == 2
    assert words in capfd.readouterr().err


def test_settings_come_from_file_environment_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fedge.toml"
    config.write_text("[demo]\nsamples = 10\ndevices = 50\n")
    monkeypatch.setenv("FEDGE_DEMO_SAMPLES", "30")
    assert main(["demo", "--config", str(config), "--devices", "7", "--out", str(tmp_path / "out")]) == 2
    assert "30 samples are too few for 7 devices" in capfd.readouterr().err


def test_too_few_samples_for_so_many_devices_is_an_error_of_the_user(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedge.cli", "demo", "--devices", "12", "--samples", "100", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ran.returncode == 2
    assert "error: 100 samples are too few for 12 devices" in ran.stderr


def test_the_json_has_exactly_the_promised_keys() -> None:
    import msgspec

    figures = json.loads(msgspec.json.encode(an_outcome()))
    assert list(figures) == [
        *("task", "partition", "agents", "rounds", "seed", "broker", "wall_s", "bytes_up", "bytes_down"),
        *("clusters", "selection", "split", "accuracy", "devices"),
    ]
    assert list(figures["accuracy"]) == list(METHODS)
    keys = ["id", "n_train", "n_test", "experts", "accuracy", "bundle", "max_abs_diff_torch_onnx"]
    assert list(figures["devices"][0]) == keys


def test_the_summary_names_clusters_selection_and_bytes() -> None:
    text = summary_of(an_outcome())
    assert "split into experts: yes" in text
    assert "cluster 1: camera-01, camera-03" in text
    assert "1.5 MB up, 2.5 MB down" in text


def test_the_table_fits_a_narrow_terminal_and_ends_with_the_mean() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table_of(an_outcome()))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "device train test rounds cluster local FedAvg +tuned expert personal" in lines
    assert "camera-03 83 30 3 1 47.0 57.0 67.0 77.0 87.0" in lines
    assert "mean 48.5 58.5 68.5 78.5 88.5" in lines


def test_the_csv_has_a_row_for_each_device() -> None:
    first, *_ = of_demo(an_outcome(), a_background()).rows
    assert first == {"device": "camera-00", "n_train": 80, "n_test": 30, "rounds": 6} | an_outcome().devices[0].accuracy
