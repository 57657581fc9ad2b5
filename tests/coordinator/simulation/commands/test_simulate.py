"""The two commands as a user meets them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fedge.commands.cli import command, main

SMALL = ["--devices", "3", "--samples", "200", "--rounds", "2"]


@pytest.mark.parametrize("name", ["simulate", "compare"])
def test_help_shows_examples_and_exit_codes(name: str) -> None:
    text = CliRunner().invoke(command, [name, "--help"]).output
    assert "Exit codes: 0" in text
    assert "\\b" not in text
    for flag in ("--partition", "--alpha", "--participation", "--hardware", "--json", "--global-test"):
        assert flag in text


def test_help_needs_no_torch() -> None:
    command = "coordinator.simulation.commands.simulate"
    script = f"import sys, {command}; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "fedge2"], "there is no method 'fedge2'"),
        (["--method", "fedprox", "--option", "mu=1"], "no option 'mu'"),
        (["--option", "mu"], "NAME=VALUE"),
        (["--partition", "natural"], "do not say which person"),
        (["--alpha", "0"], "--alpha: Expected `float` > 0"),
        (["--task", "digitz"], "unknown task digitz (did you mean digits?)"),
        (["--task", "mnist"], "task mnist needs its four IDX files"),
        (["--task", "uci-har"], "task uci-har does not bring its samples: say where they are (--data)"),
        (["--model", "cn"], "unknown model cn (did you mean cnn?)"),
        (["--task", "uci-har", "--data", "no/such/place"], "no/such/place"),
        (["--devices", "100"], "too few for 100 devices"),
        (["--groups", "rotation", "--partition", "groups", "--n-groups", "5"], "1 to 4 groups"),
        (["--alpha", "0.1", "--partition", "iid"], "--alpha changes nothing with --partition iid"),
        (["--n-groups", "3"], "--n-groups changes nothing with --partition dirichlet: it is for groups"),
        (["--devices", "3", "--partition", "groups"], "3 devices cannot be in 4 groups: use --n-groups"),
        (["--iid-share", "0.2", "--partition", "groups"], "--iid-share changes nothing"),
        (["--marks", "classes"], "--marks changes nothing without --sensitive"),
        (["--size-spread", "2"], "--size-spread changes nothing with equal sizes"),
        (["--data", "somewhere"], "the digits come with fedge: leave out --data"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert words in capfd.readouterr().err


def test_a_run_is_told_on_standard_error_and_its_figures_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    flags = ["--method", "fedavg", *SMALL, "--target", "0.99", "--json", str(file), "--out", str(tmp_path / "out")]
    assert main(["simulate", *flags]) == 0
    said = capfd.readouterr()
    assert said.err.count("round 2/2") == 1
    assert "the devices' bundles  accuracy" in said.err
    assert "accuracy" in said.out
    assert "until 99.0 %" in said.out
    figures = json.loads(file.read_bytes())
    assert f"{100 * figures['accuracy']:.1f} %" in said.out
    assert figures["bundles"] == 3
    assert len(list((tmp_path / "out").glob("device-*/bundles/1/manifest.json"))) == 3
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert len((tmp_path / "out" / "figures.csv").read_text().splitlines()) == 4
    assert (tmp_path / "out" / "figures.json").read_bytes() == file.read_bytes()
    assert main(["simulate", *flags]) == 2
    assert "is not empty" in capfd.readouterr().err


def test_figures_on_standard_output_stand_there_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--method", "fedavg", *SMALL, "--json", "-"]) == 0
    said = capfd.readouterr()
    assert f"{100 * json.loads(said.out)['accuracy']:.1f} %" in said.err


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_folder_that_cannot_be_made_is_found_before_anything_runs(
    tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([command, *SMALL, "--out", str(tmp_path / "file")]) == 4
    told = capfd.readouterr().err
    assert told.startswith("error: cannot make folder")
    assert "accuracy" not in told


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_file_that_cannot_be_written_is_found_before_anything_runs(
    tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for file in (tmp_path / "file" / "figures.json", tmp_path):
        assert main([command, *SMALL, "--json", str(file)]) == 4
        told = capfd.readouterr().err
        assert told.startswith("error: cannot")
        assert "accuracy" not in told


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_gpu_that_is_not_there_is_missed_before_anything_runs(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([command, *SMALL, "--train-on", "cuda", "--out", str(tmp_path / "out")]) == 2
    told = capfd.readouterr().err
    assert "finds no GPU here" in told
    assert "accuracy" not in told
    assert not (tmp_path / "out" / "runs").exists()


def test_a_task_and_a_network_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples")
    noise = np.random.default_rng(0).normal(0, 3, (3, 64 * 40))
    recordings = noise + np.array([[10.0], [20.0], [30.0]])
    np.savez(tmp_path / "machine.npz", **dict(zip(("healthy", "worn", "broken"), recordings, strict=True)))
    flags = ["simulate", "--method", "fedavg", "--devices", "3", "--rounds", "2", "--task", "custom_task:Vibration"]
    assert main(flags) == 2
    assert "say where they are (--data)" in capfd.readouterr().err
    assert main([*flags, "--data", str(tmp_path / "machine.npz")]) == 0
    assert "bundles          3 of 3" in capfd.readouterr().out
    (tmp_path / "broken_network.py").write_text("def network(task): raise KeyError('weights')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("simulate", "compare"):
        assert main([name, "--model", "broken_network:network", "--out", str(tmp_path / name)]) == 2
        assert "error: broken_network:network fails with KeyError: 'weights'" in capfd.readouterr().err


def test_a_network_that_cannot_learn_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The coordinator installed its random weights as bundles, and `simulate` called them 26.5 % accurate."""
    (tmp_path / "two_heads.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(64, 10)\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x.flatten(1))\n"
        "        return (y, y) if self.training else y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("simulate", "compare"):
        assert main([name, "--model", "two_heads:Net", "--out", str(tmp_path / name)]) == 2
        told = capfd.readouterr()
        last = told.err.splitlines()[-1]
        assert last.startswith("error: in training mode the network returns a tuple of 2, no tensor: let forward")
        assert "Traceback" not in told.err
        assert told.out == ""


def test_options_come_from_the_table_of_the_method(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "fedge.toml"
    config.write_text('[simulate]\nmethod = "fedprox"\n[method]\nproximal_mu = -1.0\n')
    assert main(["simulate", "--config", str(config), *SMALL]) == 2
    assert "option of the method" in capfd.readouterr().err
    assert main(["simulate", "--config", str(config), *SMALL, "--option", "proximal_mu=0.5"]) == 0


def test_a_comparison_ends_with_a_table_a_report_and_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "out", tmp_path / "figures.json"
    flags = ["--methods", "local,fedavg", "--seeds", "0", *SMALL, "--jobs", "1", "--out", str(out), "--json", str(file)]
    assert main(["compare", *flags]) == 0
    said = capfd.readouterr()
    assert "2/2" in said.err
    assert "method" in said.out
    assert f"in {out}: report.html, figures.json, figures.csv" in said.out
    figures = json.loads(file.read_bytes())
    assert [m["method"] for m in figures["methods"]] == ["local", "fedavg"]
    assert figures["scenario"]["devices"] == 3
    assert file.read_bytes() == (out / "figures.json").read_bytes()
    assert "<svg" in (out / "report.html").read_text()


@pytest.mark.process
def test_ctrl_c_is_clean(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedge", "simulate", "--method", "fedavg", "--rounds", "100000", *SMALL[:4]]
    command += ["--evaluate-every", "2"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as run:
        assert run.stderr is not None
        assert any("round 0" in line for line in iter(run.stderr.readline, ""))
        assert "round 2" in run.stderr.readline()
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=300) == 130
        assert "Traceback" not in run.stderr.read()
    assert not list(tmp_path.glob("fedge-*"))
