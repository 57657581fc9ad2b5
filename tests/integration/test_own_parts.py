"""Selections and clusterings of one's own, by entry point, by path and in Python; those of docs/extending.md run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fedge
from coordinator.aggregation.protection import Protection
from coordinator.clustering import find
from coordinator.methods.catalogue import make_method
from coordinator.methods.cli import methods
from coordinator.methods.option_values import PARTS, list_code, parse_options
from coordinator.methods.options import parse_method, require_method_options, resolve_options
from coordinator.methods.papers.fedepc import FedEpc
from coordinator.methods.settings import MethodSettings
from coordinator.selection import contract
from coordinator.simulation.commands.simulate import simulate
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.system.loading import find_entry_points
from tests.support.simulation import digits

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
EXAMPLES = [block for block in BLOCKS if block.startswith("import numpy")]
WORDS = ["--task", "digits", "--devices", "4", "--samples", "200", "--rounds", "2", "--local-steps", "2"]


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The examples as a module of one's own, on the path, under a name that no other test has imported."""
    name = f"rules_of_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / f"{name}.py").write_text("\n\n".join(EXAMPLES))
    monkeypatch.syspath_prepend(folder)
    return name


@pytest.fixture
def distribution(rules: str, tmp_path: Path) -> Iterator[str]:
    """The same as an installed package with entry points."""
    (metadata := tmp_path / "path" / "theirs-1.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    selections = f"[fedge.selections]\nlargest = {rules}:largest\npatient = {rules}:Patient\n"
    (metadata / "entry_points.txt").write_text(f"{selections}[fedge.clusterings]\nspread = {rules}:spread\n")
    find_entry_points.cache_clear()
    yield rules
    find_entry_points.cache_clear()


def simulated(out: Path, *words: str) -> dict[str, object]:
    result = CliRunner().invoke(simulate, [*words, *WORDS, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures: dict[str, object] = json.loads((out / "figures.json").read_text())
    return figures


def test_the_examples_import_public_names_alone_and_are_short() -> None:
    assert len(EXAMPLES) == 3
    for block in EXAMPLES:
        tree = ast.parse(block)
        for each in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            assert not any(name.name.startswith("_") for name in each.names)
            assert each.module in {"coordinator.selection.contract", "coordinator.clustering.find"}
        assert len(ast.unparse(tree.body[-1]).splitlines()) <= 10


@pytest.mark.parametrize("selection", ["largest", "Patient"])
@pytest.mark.parametrize("method", ["fedavg", "fedepc", "cfic", "fedper"])
def test_a_selection_by_path_chooses_in_a_simulation(selection: str, method: str, rules: str, tmp_path: Path) -> None:
    words = ["--participation", "0.5", "--option", f"selection={rules}:{selection}"]
    assert simulated(tmp_path / "out", "--method", method, *words)["bundles"] == 4


@pytest.mark.parametrize("method", ["fedepc:warm_up=1", "cfic", "scmoe-pfl", "fedge:split=always"])
def test_a_clustering_by_path_clusters_in_a_simulation(method: str, rules: str, tmp_path: Path) -> None:
    assert simulated(tmp_path / "out", "--method", f"{method}:clustering={rules}:spread")["bundles"] == 4


def test_installed_ones_go_by_their_names_and_do_the_same(distribution: str, tmp_path: Path) -> None:
    words = ["--method", "fedepc:warm_up=0", "--participation", "0.5", "--option"]
    by_path = simulated(
        tmp_path / "a", *words, f"selection={distribution}:largest", "--option", f"clustering={distribution}:spread"
    )
    by_name = simulated(tmp_path / "b", *words, "selection=largest", "--option", "clustering=spread")
    assert by_name["accuracy"] == by_path["accuracy"]
    told = json.loads(CliRunner().invoke(methods, ["--parts", "--json"]).output)
    found = {each["name"]: each["about"] for each in told}
    assert found["selection=largest"] == "Devices with many samples are chosen, at random among equals."
    assert {f"selection={name}" for name in PARTS["selection"].ours} <= found.keys()
    assert {f"clustering={name}" for name in PARTS["clustering"].ours} <= found.keys()
    assert all(about.endswith(".") for about in found.values())


def test_in_python_an_option_may_be_the_function(tmp_path: Path) -> None:
    seen = []

    def first(devices: contract.Candidates, n: int, rng: np.random.Generator) -> list[int]:
        seen.append((devices.ids, n, devices.n_samples.shape))
        return list(range(n))

    small: dict[str, Any] = {"task": "digits", "devices": 4, "samples": 200, "rounds": 2, "participation": 0.5}
    fedge.simulate(method="fedavg", options={"selection": first}, **small)
    ids = tuple(f"device-{k}" for k in range(4))
    assert seen == [(ids, 2, (4,))] * 2


async def test_what_a_rule_learns_is_stored_and_decides_the_next_round(rules: str, tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=240)
    fleet.unresponsive = frozenset({"d00"})
    selection = f"{rules}:Patient"
    method = make_method(
        "fedavg", MethodSettings(rounds=2, participation=0.5, sgd=Sgd(steps=1), options={"selection": selection})
    )
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.participations) == {"d01", "d02"}, "d00 failed in round 1, and d03 has failed as rarely"
    rule = contract.load_rule(selection)
    assert isinstance(rule, contract.Rule)
    assert rule.load(state.bandit.learned).failures == {"d00": 1}  # type: ignore[attr-defined]


def test_ours_are_those_that_the_package_names() -> None:
    for part in PARTS.values():
        assert set(part.ours) <= find_entry_points(part.group).keys()


def test_a_file_names_code_only_where_the_command_line_does(rules: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[method]\nselection = "{rules}:largest"\n')
    with pytest.raises(ConfigError, match=f"--option selection={rules}:largest"):
        resolve_options(config, [])
    assert resolve_options(config, [f"selection={rules}:largest"]) == {"selection": f"{rules}:largest"}
    config.write_text('[method]\nselection = "ccmab"\n')
    assert resolve_options(config, []) == {"selection": "ccmab"}
    config.write_text(f'[simulate]\nmethod = "fedavg:selection={rules}:largest"\n')
    refused = CliRunner().invoke(simulate, ["--config", str(config), *WORDS])
    assert f"names code that would be run here: {rules}:largest" in str(refused.exception)


def test_the_code_in_options_is_that_of_parts() -> None:
    assert list_code({"selection": "a.b:c", "clustering": "k-means", "other": "a:b"}) == ("a.b:c",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fedavg:selection=unifrom", "did you mean 'uniform'"),
        ("fedavg:selection=nothing", "one of uniform, fastest, ccmab, package.module:name"),
        ("fedavg:selection=no_such_module:rule", "cannot load no_such_module:rule"),
        ("fedavg:selection=json:JSONDecoder", "json:JSONDecoder is no selection: it must be a function"),
        ("fedepc:clustering=k-meens", "did you mean 'k-means'"),
        ("fedepc:clustering=json:JSONDecoder", "is no clustering: it must be a function"),
        ("fedavg:selection=coordinator.selection.select:Stratified", "here are none: take cfic, fedepc or fedge"),
        ("local:selection=json:loads", "every device learns alone"),
        ("fedavg:clustering=json:loads", "all devices share one model"),
    ],
)
def test_errors_say_what_is_possible(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_method_options(*parse_method(text))
    assert reason in str(refused.value)


def test_an_installed_name_is_the_nearest_too(distribution: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'largest'"):
        parse_options(FedEpc, {"selection": "largset"})


def test_differential_privacy_refuses_rules_that_nothing_accounts_for(rules: str) -> None:
    settings = MethodSettings(protection=Protection(dp_noise=1.0), options={"selection": f"{rules}:largest"})
    with pytest.raises(ConfigError, match="nothing accounts for what a rule of your own learns"):
        make_method("fedavg", settings)


def test_a_clustering_must_number_the_devices(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = find.Directions(vectors=np.eye(3))
    rng = np.random.default_rng(0)
    assert find.find_clusters(f"{rules}:spread", seen, rng=rng, n_clusters=3).clusters == ((0,), (1,), (2,))
    for told in ([0, 1], [0.5, 1.0, 2.0], None):
        monkeypatch.setattr(f"{rules}.spread", lambda *_, told=told: told)
        with pytest.raises(ConfigError, match=r"gave .* for 3 devices"):
            find.find_clusters(f"{rules}:spread", seen, rng=rng)
    monkeypatch.setattr(f"{rules}.spread", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match="failed: ZeroDivisionError"):
        find.find_clusters(f"{rules}:spread", seen, rng=rng)
