"""`fedge methods` lists all methods, those of other packages, too."""

import json
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from click.testing import CliRunner

from coordinator.methods import cli
from coordinator.methods.baselines.fedprox import FedProx
from coordinator.methods.catalogue import get_installed_methods
from coordinator.methods.cli import describe_method, methods
from coordinator.methods.method import Method
from coordinator.methods.state import ModelState


def test_each_method_has_a_line_with_a_sentence() -> None:
    result = CliRunner().invoke(methods, [])
    assert result.exit_code == 0
    told = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert list(told) == list(get_installed_methods())
    assert told["fedprox"] == "FedProx: FedAvg whose clients are drawn back to the model that they were given."
    assert all(text.endswith(".") and text.count(". ") == 0 for text in told.values())


def test_json_also_has_the_class() -> None:
    found = {each["name"]: each for each in json.loads(CliRunner().invoke(methods, ["--json"]).output)}
    assert found.keys() == get_installed_methods().keys()
    assert found["fedprox"]["path"] == "coordinator.methods.baselines.fedprox:FedProx"
    assert found["fedprox"]["about"] == describe_method(FedProx)


def test_a_method_of_another_package_is_listed_by_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("of_others")  # its file says nothing

    class Theirs(Method[ModelState]):
        """It learns by\n        heart.  And it forgets."""

        name = "theirs"

        async def round(self, state: ModelState, fleet: object) -> ModelState:
            return state

    Theirs.__module__ = module.__name__
    module.Theirs = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = EntryPoint("theirs", "of_others:Theirs", "fedge.methods")
    monkeypatch.setattr(cli, "get_installed_methods", lambda: {"theirs": point})
    monkeypatch.setattr(cli, "load_method_class", lambda _: Theirs)
    assert CliRunner().invoke(methods, []).output == "theirs  It learns by heart.\n"
