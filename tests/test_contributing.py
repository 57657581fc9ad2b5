"""The method of CONTRIBUTING.md runs as it stands there, by its path alone."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.aggregation.protection import Protection
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.service.proof import prove_round
from coordinator.simulation.commands.simulate import simulate
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from tests.support.simulation import digits

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with the method, on the path."""
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "median.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_methods.median:FedMedian"


def test_the_method_learns_and_ends_in_bundles(package: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--method", package, "--task", "digits", "--devices", "4", "--rounds", "3", "--out", str(out)]
    result = CliRunner().invoke(simulate, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run = json.loads((out / "figures.json").read_text())
    assert run["accuracy"] > 0.5
    assert run["bundles"] == 4


def test_it_says_what_it_heeds_before_that_is_set(package: str) -> None:
    with pytest.raises(ConfigError, match="fedmedian does not heed --participation"):
        make_method(package, MethodSettings(participation=0.25))


async def test_it_trains_a_cohort_and_keeps_its_promises(package: str, tmp_path: Path) -> None:
    heeds = re.findall(r"add the line `(HEEDS = .*?)`", TEXT)[0]
    code = (tmp_path / "my_methods" / "median.py").read_text()
    (tmp_path / "my_methods" / "heeding.py").write_text(code.replace("    name =", f"    {heeds}\n    name ="))
    package = "my_methods.heeding:FedMedian"
    fleet, layout, first, _ = digits(tmp_path, n=8, limit=240)
    method = make_method(package, MethodSettings(participation=0.25, min_reports=3, sgd=Sgd(steps=1)))
    fleet.round = 1
    state = await prove_round(method, method.init(layout, first), fleet)
    assert len(fleet.asked) == 2, "a quarter of 8"
    assert state.model == first, "2 updates are too few"
    with pytest.raises(ConfigError, match="fedmedian does not heed --average"):
        make_method(package, MethodSettings(protection=Protection(average="median")))
