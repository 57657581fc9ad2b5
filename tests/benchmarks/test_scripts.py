"""Every script of `benchmarks` runs as a process on its smallest inputs: rows are named and figures are finite.

What the figures say is no matter here. Scripts that take long however little they are given only print their help,
which still needs all that they import. `make test-all` runs a few scripts, `make figures` all.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from coordinator.methods.options import parse_method, require_method_options
from coordinator.methods.papers.cfic import Cfic
from coordinator.methods.settings import MethodSettings
from fedge.tensors.layout import Layout, TensorInfo

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
DATA = ROOT.parent / "shared" / "data"


LAYOUT = Layout(tensors=(TensorInfo(name="a", shape=(2,)), TensorInfo(name="b", shape=(1,))))


class Script(NamedTuple):
    """Arguments, a word of each kind that its figures must have, and the data set that it cannot do without."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    data: str | None = None


ONE_RUN = ("--seeds", "0", "--rounds", "8", "--jobs", "1", "--out", "out")
QUICK = ("--quick", "--jobs", "1", "--out", "out")
SCRIPTS = {
    "attacks.py": Script(
        (
            "--out",
            "out",
            "--methods",
            "fedavg",
            "--rules",
            "clipped",
            "--attacks",
            "x10",
            "--shares",
            "0.2",
            "--alphas",
            "0.5",
        ),
        ("fedavg", "clipped", "x10", "accuracy", "hostile"),
    ),
    "checks.py": Script(
        ("--numbers", "70000", "--updates", "4", "--repetitions", "1"),
        ("int8+zstd", "thread", "processes", "reports_s"),
    ),
    "clustering.py": Script(("--devices", "60"), ("aidc", "mctc", "rand", "memory_mb")),
    "default_method.py": Script(
        (*ONE_RUN, "--settings", "digits, alpha 0.5", "--methods", "fedge,fedavg"),
        ("digits, alpha 0.5", "fedge", "fedavg", "to_best_other"),
    ),
    "dp.py": Script(("--tasks", "digits", "--rounds", "1"), ("digits", "inf", "global", "own")),
    "frameworks.py": Script(
        ("--sizes", "small:4", "--rounds", "2", "--rivals", "plain"), ("fedge", "plain", "ms_per_client")
    ),
    "honest.py": Script(
        ("--out", "out", "--methods", "fedavg", "--settings", "power law of 1, iid, half a round", "--seeds", "0,1"),
        ("power law of 1, iid, half a round", "mean", "clipped"),
    ),
    "living.py": Script(
        ("--out", "out", "--methods", "fedavg,fedavg!", "--seeds", "0", "--campaigns", "2"),
        ("digits rotations", "fedavg!", "turned", "backward"),
    ),
    "int8.py": Script(("--networks", "mlp,resnet_moe"), ("mlp", "resnet_moe", "latency_int8_ms", "agreement")),
    "independent.py": Script(
        ("--devices", "3", "--rounds", "2", "--samples", "200", "--seeds", "0"),
        ("fedavg, plain PyTorch", "fedper, plain PyTorch"),
    ),
    "leaks.py": Script(
        ("--devices", "5", "--samples", "400", "--rounds", "1", "--seeds", "0", "--targets", "1", "--steps", "5"),
        ("labels, first round", "whole update, imitated", "recovered", "true_positives"),
    ),
    "secure_aggregation.py": Script(
        ("--devices", "6", "12", "--hidden", "10", "--dropped", "0.1"), ("masked", "plain", "coordinator_s", "device_s")
    ),
    "load.py": Script(
        ("--devices", "30", "--rounds", "2", "--processes", "1", "--deadline-s", "20", "--storm"),
        ("devices", "reports/s", "coordinator MB", "back s", "lost"),
    ),
    "problems.py": Script(
        ("--data", str(DATA), "--out", "out", "--quick", "--seeds", "0", "--methods", "fedavg", "--rows", "shuttle"),
        ("shuttle", "fedavg", "auroc", "false alarms"),
        "shuttle",
    ),
    "recipes.py": Script(("--turns", "1"), ("Nesterov", "Adam", "digits MLP (2,410 weights), alone")),
    "round_overhead.py": Script(
        ("--agents", "1", "--rounds", "1", "--models", "1.6 MB"), ("coordinator", "agent", "broker", "peak_mb")
    ),
    "serving.py": Script(("--requests", "16", "--rounds", "1"), ("loop", "json, 1", "binary, 16", "server_ms")),
    "simulate.py": Script(("scale", "--devices", "20", "--rounds", "1"), ("seconds", "peak_gib", "split")),
    "house.py": Script((), ("room", "entries", "coordinator/fleet", "words")),
    "store.py": Script(("--reports", "20"), ("reports/s, 1 under way", "reports/s, 100 under way", "fsyncs/s")),
    "watched.py": Script(
        ("--devices", "3", "--pages", "2", "--turns", "1", "--turn-s", "3", "--settle-s", "1"),
        ("nobody", "coordinator", "fedge ui", "round ms", "reads/s"),
    ),
    "papers/cfic.py": Script((*QUICK, "--settings", "skew 0.1, lr 0.1"), ("FedAvg", "CFIC 0.9 / 0.2", "claim")),
    "papers/fedcoe.py": Script((*QUICK, "--data", str(DATA)), ("FedCoE printed", "repaired", "cold"), "mnist"),
    "papers/fedcoe_newcomers.py": Script(
        ("--quick", "--data", str(DATA)), ("assembled model", "mean of the experts"), "mnist"
    ),
    "papers/fedepc.py": Script((*QUICK, "--tables", "8.1,8.3"), ("8.1", "8.3", "random, no deadline", "index")),
    "papers/fedepc_images.py": Script(
        (*QUICK, "--data", str(DATA), "--settings", "MNIST, 0.1"), ("MNIST, 0.1", "fedavg", "fedepc", "claim"), "mnist"
    ),
    "papers/pm_moe.py": Script(
        (*QUICK, "--settings", "digits, alpha 0.1"), ("fedper", "dbe+ft", "pm-moe:base=dbe:guard=false", "claim")
    ),
    "papers/scmoe_pfl.py": Script(
        (*QUICK, "--settings", "digits turned"), ("**SCMoE default**", "PFMoE-style", "FedAvg, all data", "claim")
    ),
}
LONG = (
    "aggregation.py",
    "at_rest.py",
    "budget.py",
    "conformal.py",
    "deep.py",
    "deeper.py",
    "engines.py",
    "gate.py",
    "inference.py",
    "marks.py",
    "outlier.py",
    "pfllib.py",
    "relay.py",
    "student.py",
    "transfer.py",
    "papers/natural.py",
)
"""Their smallest inputs take 7 to 25 seconds of a processor, or minutes."""


SMOKE = ("clustering.py", "house.py", "round_overhead.py", "serving.py", "store.py", "papers/cfic.py")
"""Run by `make test-all`: one of each kind."""

RIVALS = ("flower_deployed.py", "flower_simulation.py", "pfl_simulation.py")
"""Run by frameworks.py in environments of their own, with packages that the project does not have."""


def run(script: str, arguments: tuple[str, ...], folder: Path) -> str:
    """What a script prints; it is started in an empty folder."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def words(found: object) -> Iterator[str]:
    """Names and texts of a JSON document."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        for name, value in found.items():
            yield name
            yield from words(value)
    elif isinstance(found, list):
        for value in found:
            yield from words(value)


def figures(found: object) -> Iterator[float]:
    """Numbers of a JSON document."""
    if isinstance(found, float | int) and not isinstance(found, bool):
        yield found
    elif isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from figures(value)


def test_each_script_is_run() -> None:
    scripts = {
        file.relative_to(BENCHMARKS).as_posix()
        for file in BENCHMARKS.rglob("*.py")
        if '__name__ == "__main__"' in file.read_text()
    }
    assert scripts == {*SCRIPTS, *LONG, *RIVALS}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMOKE else [pytest.mark.figures]) for name in SCRIPTS]
)
def test_a_script_runs_and_its_rows_are_named_and_its_figures_finite(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    script = SCRIPTS[name]
    if script.data and not (DATA / script.data).exists():
        pytest.skip(f"it needs {script.data} in {DATA}")
    if name in {"load.py", "round_overhead.py", "watched.py"}:
        request.getfixturevalue("mosquitto_program")
    printed = run(name, (*script.arguments, "--json", "figures.json"), tmp_path)
    assert len(printed.splitlines()) >= 2
    found = json.loads((tmp_path / "figures.json").read_text())
    assert set(script.words) <= set(words(found))
    seen = list(figures(found))
    assert len(seen) >= 4
    assert all(map(math.isfinite, seen))


@pytest.mark.parametrize("name", LONG)
def test_a_script_that_takes_long_prints_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported most of what they import."""
    monkeypatch.syspath_prepend(str((BENCHMARKS / name).parent))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_each_row_of_the_ablation_is_a_configuration() -> None:
    script = runpy.run_path(str(BENCHMARKS / "default_method.py"))
    for method, (_, published) in script["ABLATION"].items():
        require_method_options(*parse_method(method))
        assert len(published.split()) == len(script["ABLATED"])


@pytest.mark.figures
def test_the_ablation_gives_differences_to_the_default_in_points_beside_the_published_ones(tmp_path: Path) -> None:
    methods = "fedge,benchmarks.default_method:PrivateAlone"
    chosen = ("--table", "ablation", "--settings", "digits, alpha 1", "--methods", methods)
    printed = run("default_method.py", (*chosen, *ONE_RUN), tmp_path)
    runs = [json.loads(file.read_text()) for file in (tmp_path / "out" / "runs").iterdir()]
    ours, private = sorted(runs, key=lambda found: len(found["method"]))
    accuracy, f1 = (100 * (private[name] - ours[name]) for name in ("accuracy", "macro_f1"))
    *_, first, second, split = printed.splitlines()
    assert split == f"runs of fedge that split the devices: digits, alpha 1: {ours['split']:d} of 1"
    assert first.startswith(
        f"| **fedge** | {100 * ours['accuracy']:.2f} / {100 * ours['macro_f1']:.1f} (96.80 / 93.5) |"
    )
    assert f"| PrivateAlone (privonly) | {accuracy:+.2f} / {f1:+.1f} (-0.56 / -0.7) |" in second


@pytest.fixture
def of_cfic(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Cfic]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "papers"))
    return runpy.run_path(str(BENCHMARKS / "papers/cfic.py"))


def test_the_relative_length_is_that_of_the_clusters_changes(of_cfic: dict[str, type[Cfic]]) -> None:
    found = of_cfic["Relative"](MethodSettings()).compute_direction(
        [np.array([3.0, 4]), np.array([0.0, 2])], [10, 30], LAYOUT
    )
    np.testing.assert_allclose(found, (0.25 * 5 + 0.75 * 2) * np.array([0.15, 0.95]))


def test_a_norm_for_each_tensor(of_cfic: dict[str, type[Cfic]]) -> None:
    changes = [np.array([3.0, 4, 7]), np.array([0.0, 2, -1])]
    found = of_cfic["PerTensor"](MethodSettings()).compute_direction(changes, [10, 30], LAYOUT)
    np.testing.assert_allclose(found, [0.15, 0.95, 0.25 - 0.75])


def test_rows_are_run_in_the_tables_order_and_none_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "papers"))
    choose = runpy.run_path(str(BENCHMARKS / "papers/table.py"))["chosen_rows"]
    table = {"FedAvg": "fedavg", "CFIC 0.9 / 0.2": "cfic", "FedProx 0.01": "fedprox"}
    assert choose(table, Namespace(rows=None)) == list(table)
    assert choose(table, Namespace(rows="FedProx 0.01; FedAvg")) == ["FedAvg", "FedProx 0.01"]
    with pytest.raises(SystemExit, match="there are: FedAvg; CFIC"):
        choose(table, Namespace(rows="FedProx"))


def test_every_row_of_the_papers_tables_is_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "papers"))
    rows: list[str] = []
    for name, tables in {"cfic": ("METHODS",), "scmoe_pfl": ("METHODS", "CLUSTERINGS", "GATE_METHODS", "TAUS")}.items():
        script = runpy.run_path(str(BENCHMARKS / f"papers/{name}.py"))
        rows += [method for table in tables for method in script[table].values()]
    pm_moe = runpy.run_path(str(BENCHMARKS / "papers/pm_moe.py"))
    rows += [stage.format(base) for stage in pm_moe["STAGES"].values() for base in pm_moe["BASES"]]
    assert len(rows) > 60
    for row in rows:
        require_method_options(*parse_method(row))
