import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.simulation.reports.report import (
    FILES,
    Report,
    make_comparison_report,
    make_demo_report,
    make_run_report,
    write_results,
)
from coordinator.simulation.settings import CompareSettings, DemoSettings, Scenario, SimulationSettings
from coordinator.watch import runs
from fedge.commands.cli import main
from tests.support.comparison import a_comparison, a_run
from tests.support.demo import a_demonstration

SUMMARY = {
    "federation": "shop", "method": "fedge", "seed": 3, "round": 2, "rounds": 5, "at": 0.0, "bytes_up": 10,
    "bytes_down": 20, "history": [{"round": 1, "accuracy": None}, {"round": 2, "accuracy": 0.5}],
    "devices": {"cam1": "online", "cam2": "offline"}, "selection": {"cam1": 2}, "installed": {},
    "problems": {"<b>": {"round": 1, "reason": "<script>"}},
}  # fmt: skip


def simulated(folder: Path) -> Report:
    runs.record_run(folder, "simulate", SimulationSettings(out=folder, target=0.5))
    return make_run_report(a_run("m", 0), Scenario(), 0.5)


def compared(folder: Path) -> Report:
    runs.record_run(folder, "compare", CompareSettings(out=folder))
    return make_comparison_report(a_comparison(2))


def demonstrated(folder: Path) -> Report:
    runs.record_run(folder, "demo", DemoSettings(out=folder))
    return make_demo_report(a_demonstration())


@pytest.mark.parametrize("made", [simulated, compared, demonstrated])
def test_a_report_is_made_again_from_its_folder(tmp_path: Path, made: Callable[[Path], Report]) -> None:
    write_results(tmp_path, made(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    for name in set(FILES) - {"figures.json"}:
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


def test_a_coordinators_home_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.record_run(tmp_path, "simulate", SimulationSettings())
    text = (tmp_path / runs.FILE).read_text().replace('"simulate"', '"coordinator"')
    (tmp_path / runs.FILE).write_text(text)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"]["command"] == "coordinator"
    assert told["figures"]["federation"] == "shop"
    page = (tmp_path / "report.html").read_text()
    assert "50.0 %" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert (tmp_path / "figures.csv").read_text().splitlines()[2] == "cam1,online,2,False,"
    assert (tmp_path / "accuracy.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_a_run_that_has_not_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.record_run(tmp_path, "simulate", SimulationSettings())
    assert main(["report", str(tmp_path)]) == 4
    assert "has the run ended?" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
