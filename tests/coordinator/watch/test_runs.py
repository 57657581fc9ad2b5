import subprocess
from pathlib import Path

import msgspec
import pytest

import fedge
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.settings import SimulationSettings
from coordinator.watch import runs
from fedge.errors import ConfigError
from fedge.settings import Secret


def test_a_folder_says_what_its_run_was(tmp_path: Path) -> None:
    runs.record_run(tmp_path, "simulate", SimulationSettings(seed=7, out=tmp_path, alpha=0.3), {"top": 2})
    run = runs.read_run(tmp_path)
    assert (run.command, run.seed, run.options) == ("simulate", 7, {"top": 2})
    assert (run.settings["alpha"], run.settings["out"], run.settings["partition"]) == (0.3, str(tmp_path), "dirichlet")
    assert {"fedge", "python", "numpy", "torch", "onnxruntime"} <= set(run.versions)


def test_secrets_are_masked(tmp_path: Path) -> None:
    url = Secret("postgresql://me:hunter2@db/fedge")
    settings = CoordinatorSettings(broker="b:1", federation="f", home=tmp_path, task="digits", store=url)
    runs.record_run(tmp_path, "coordinator", settings)
    assert runs.read_run(tmp_path).settings["store"] == "***"
    assert b"hunter2" not in (tmp_path / runs.FILE).read_bytes()


def test_a_coordinator_that_is_started_again_keeps_its_first_record(tmp_path: Path) -> None:
    settings = CoordinatorSettings(broker="b:1", federation="f", home=tmp_path, task="digits")
    runs.record_run(tmp_path, "coordinator", settings)
    first = msgspec.structs.replace(runs.read_run(tmp_path), versions={"fedge": "0.1.0"})  # by a version before ours
    (tmp_path / runs.FILE).write_bytes(msgspec.json.encode(first))
    for rounds in (300, 400):
        runs.record_run(tmp_path, "coordinator", msgspec.structs.replace(settings, rounds=rounds))
    run = runs.read_run(tmp_path)
    assert (run.began, run.versions, run.settings) == (first.began, first.versions, first.settings)
    assert [(start.settings["rounds"], start.versions["fedge"]) for start in run.restarts] == [
        (300, fedge.__version__),
        (400, fedge.__version__),
    ]


def test_the_commit_is_that_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs.find_commit() is None
    (tmp_path / "a").write_text("1")
    me = ("-c", "user.name=n", "-c", "user.email=e@x")
    for words in (("init", "-q"), ("add", "a"), (*me, "commit", "-qm", "first")):
        subprocess.run(["git", *words], check=True)
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert runs.find_commit() == found
    (tmp_path / "a").write_text("2")
    assert runs.find_commit() == f"{found}-dirty"


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json: name the folder"):
        runs.read_run(tmp_path)
    (tmp_path / runs.FILE).write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        runs.read_run(tmp_path)


def test_old_results_are_not_mixed_with_new(tmp_path: Path) -> None:
    assert runs.make_new_folder(tmp_path / "a" / "b", "demo").is_dir()
    (tmp_path / "a" / "b" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        runs.make_new_folder(tmp_path / "a" / "b", "demo")


def test_a_folder_that_nobody_named_has_the_name_of_the_command_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs.name_by_time("compare").name.startswith("fedge-compare-2")
    assert runs.make_new_folder(None, "demo").name.startswith("fedge-demo-2")
