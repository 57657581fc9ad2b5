import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.simulation.reports.report import make_demo_report
from coordinator.simulation.reports.terminal import make_table
from fedge.commands.cli import command, main
from tests.support.demo import WAYS, a_demonstration


def test_help_shows_examples_and_exit_codes() -> None:
    text = CliRunner().invoke(command, ["demo", "--help"]).output
    assert "fedge demo --task image-folder" in text
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
    command = [sys.executable, "-m", "fedge", "demo", "--devices", "12", "--samples", "100", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ran.returncode == 2
    assert "error: 100 samples are too few for 12 devices" in ran.stderr


def test_the_json_is_that_of_a_comparison_and_what_only_a_demo_knows() -> None:
    import msgspec

    figures = json.loads(msgspec.json.encode(a_demonstration(), enc_hook=str))
    assert list(figures) == [
        *("scenario", "seeds", "baseline", "target", "methods", "runs"),
        *("learned_by", "broker", "wall_s", "places", "boards", "choosing"),
    ]
    assert [run["method"] for run in figures["runs"]] == list(WAYS)
    assert [round(method["accuracy"]["mean"], 4) for method in figures["methods"]] == [
        0.485,
        0.585,
        0.685,
        0.785,
        0.885,
    ]


def test_the_table_has_a_line_for_each_way_to_learn() -> None:
    table = make_table(a_demonstration())
    assert [column.header for column in table.columns][:4] == ["method", "accuracy", "− base", "− best"]
    assert list(table.columns[0].cells) == list(WAYS)
    assert list(table.columns[1].cells) == ["48.5", "58.5", "68.5", "78.5", "88.5"]


def test_the_csv_has_a_row_for_each_device() -> None:
    first, *_ = make_demo_report(a_demonstration()).rows
    accuracy = {run.method: run.devices[0].score.accuracy for run in a_demonstration().runs}
    assert first == {"device": "camera-00", "n_train": 80, "n_test": 30, "rounds": 6, "cluster": "0"} | accuracy
