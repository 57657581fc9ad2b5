"""The shape of the repository: each module has its test file, and imports go the way that the design says."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.dealing import SLOWEST, deal

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedge", "edge_agent", "coordinator", "export", "deploy")

BATTERY = "tests/fedge/data/problems/test_problem.py"
"""What all problems must do, in all their files."""
WITHOUT_TESTS_OF_THEIR_OWN = {
    "coordinator/methods/baselines/personal/gpfl.py": "tests/coordinator/methods/baselines/personal/test_fedcp.py",
    "coordinator/methods/settings.py": "tests/coordinator/simulation/test_settings.py",
    "coordinator/methods/papers/fedcoe_newcomers.py": "tests/coordinator/methods/papers/test_fedcoe.py",
    "coordinator/methods/papers/fedge_experts.py": "tests/coordinator/methods/papers/test_fedge.py",
    "coordinator/methods/papers/fedge_groups.py": "tests/coordinator/methods/papers/test_fedge.py",
    "coordinator/methods/papers/fedge_mixture.py": "tests/coordinator/methods/papers/test_fedge.py",
    "coordinator/methods/papers/fedge_state.py": "tests/coordinator/methods/papers/test_fedge.py",
    "coordinator/service/between.py": "tests/coordinator/service/test_service.py",
    "coordinator/service/running.py": "tests/coordinator/service/test_service.py",
    "coordinator/store/requests.py": "tests/coordinator/watch/test_state.py",
    "coordinator/page/tables.py": "tests/coordinator/watch/test_state.py",
    "coordinator/page/cli.py": "tests/coordinator/watch/test_state.py",
    "coordinator/fleet/mqtt/following.py": "tests/coordinator/fleet/mqtt/test_fleet.py",
    "coordinator/fleet/mqtt/presence.py": "tests/coordinator/fleet/mqtt/test_fleet.py",
    "coordinator/demo/baselines.py": "tests/coordinator/demo/test_run.py",
    "coordinator/demo/broker.py": "tests/coordinator/demo/test_run.py",
    "coordinator/page/answers.py": "tests/coordinator/page/test_server.py",
    "coordinator/page/logins.py": "tests/coordinator/page/test_server.py",
    "coordinator/page/news.py": "tests/coordinator/page/test_server.py",
    "coordinator/page/metrics.py": "tests/coordinator/page/test_server.py",
    "edge_agent/agent/carrier.py": "tests/edge_agent/agent/test_loop.py",
    "edge_agent/agent/events.py": "tests/edge_agent/agent/test_loop.py",
    "edge_agent/agent/identity.py": "tests/edge_agent/agent/test_loop.py",
    "edge_agent/agent/models.py": "tests/edge_agent/agent/test_loop.py",
    "edge_agent/agent/speech/ears.py": "tests/edge_agent/agent/test_loop.py",
    "edge_agent/agent/speech/voice.py": "tests/edge_agent/agent/test_loop.py",
    "edge_agent/device/files.py": "tests/edge_agent/device/test_device.py",
    "edge_agent/samples/reading.py": "tests/edge_agent/samples/test_collecting.py",
    "fedge/steps/public.py": "tests/edge_agent/steps/test_public.py",
    "edge_agent/agent/settings.py": "tests/edge_agent/agent/test_cli.py",
    "fedge/identity/tls.py": "tests/deploy/commands/test_serve.py",
    "coordinator/simulation/rounds.py": "tests/coordinator/fleet/simulated/test_fleet.py",
    "coordinator/fleet/masked_group.py": "tests/coordinator/fleet/test_masked.py",
    "coordinator/fleet/simulated/evidence.py": "tests/coordinator/fleet/simulated/test_fleet.py",
    "coordinator/fleet/simulated/memory.py": "tests/coordinator/fleet/simulated/test_fleet.py",
    "coordinator/store/writer.py": "tests/coordinator/store/test_store.py",
    "coordinator/store/database.py": "tests/coordinator/store/test_store.py",
    "coordinator/provision/extensions.py": "tests/coordinator/provision/test_issuer.py",
    "coordinator/provision/renewals.py": "tests/fedge/membership/test_renewal.py",
    "deploy/serving/metrics.py": "tests/deploy/serving/test_server.py",
    "deploy/updates/decision.py": "tests/deploy/updates/test_link.py",
    "export/mixture.py": "tests/export/test_graph.py",
    "export/graph_nodes.py": "tests/export/test_graph.py",
    "fedge/data/problems/results.py": "tests/deploy/commands/test_infer.py",
    "fedge/data/problems/names.py": "tests/deploy/serving/test_feedback.py",
    "deploy/inference/prediction.py": "tests/deploy/inference/test_runtime.py",
    "fedge/system/stopping.py": "tests/edge_agent/device/test_worker.py",
    "fedge/wire/connection/refusals.py": "tests/fedge/wire/connection/test_connector.py",
    "fedge/wire/transfer/sender.py": "tests/fedge/wire/transfer/test_receiver.py",
    "fedge/identity/names.py": "tests/fedge/identity/test_authority.py",
    "fedge/models/build.py": "tests/fedge/models/test_network.py",
    "fedge/models/choice.py": "tests/fedge/models/test_weights.py",
    "fedge/tensors/rounding.py": "tests/fedge/tensors/test_codecs.py",
    "fedge/tasks/shares.py": "tests/fedge/tasks/test_partition.py",
    "coordinator/service/findings.py": "tests/coordinator/service/test_checks.py",
    "coordinator/simulation/reports/comparison.py": "tests/coordinator/simulation/test_compare.py",
    "coordinator/store/records.py": "tests/coordinator/fleet/test_fleet.py",
    "coordinator/watch/words.py": "tests/coordinator/watch/test_state.py",
    "coordinator/watch/options.py": "tests/coordinator/watch/test_state.py",
    **{
        f"{room}/problems/{kind}.py": BATTERY
        for room in ("fedge/data", "fedge/models", "export")
        for kind in ("classification", "multi_label", "own", "reconstruction", "regression", "segmentation")
    },
    **{f"fedge/data/problems/{part}.py": BATTERY for part in ("calibration", "formulas", "maths", "scores")},
    "fedge/models/problems/losses.py": BATTERY,
    **{f"export/problems/{part}.py": BATTERY for part in ("answers", "fusion")},
}
"""Module -> the test that covers it. Short modules that others' tests run whole."""


def modules() -> list[Path]:
    """Source files that hold more than a docstring and names of others."""
    files = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return [file for file in files if "def " in (ROOT / file).read_text() or "class " in (ROOT / file).read_text()]


def test_file_of(module: Path) -> Path:
    """tests/<room>/test_<module>.py. Contracts of steps have one test; those of the device halves use them."""
    if module.parent.parent == Path("fedge/steps"):
        return Path("tests/fedge/steps/test_init.py")
    return Path("tests", module.parent, f"test_{module.stem.strip('_')}.py")


test_file_of.__test__ = False  # type: ignore[attr-defined]


def test_every_module_has_its_test_file() -> None:
    files = {module: WITHOUT_TESTS_OF_THEIR_OWN.get(str(module)) or test_file_of(module) for module in modules()}
    assert [f"{module}: {file}" for module, file in files.items() if not (ROOT / file).is_file()] == []


def test_exceptions_are_needed() -> None:
    for module in WITHOUT_TESTS_OF_THEIR_OWN:
        assert (ROOT / module).is_file()
        assert not (ROOT / test_file_of(Path(module))).exists()


def test_test_files_are_of_modules_that_exist() -> None:
    expected = {test_file_of(file.relative_to(ROOT)) for p in PACKAGES for file in (ROOT / p).rglob("*.py")}
    found = {f.relative_to(ROOT) for p in PACKAGES for f in (ROOT / "tests" / p).rglob("test_*.py")}
    assert found <= expected


ROOMS = sorted(p.parent for package in PACKAGES for p in (ROOT / package).rglob("__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_few_entries_and_a_page_that_says_what_is_in_it(room: Path) -> None:
    inside = [p for p in room.iterdir() if not p.name.startswith("__")]
    entries = [p for p in inside if p.suffix == ".py" or (p / "__init__.py").is_file()]
    assert len(entries) <= 14
    page = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert page is not None
    assert len(page.splitlines()) <= 9


def test_imports_go_the_way_the_design_says() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_wheels_hold_the_five_packages_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(patterns) == {name for package in PACKAGES for name in (package, f"{package}.*")}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_that_it_is_typed_and_ships_the_file_that_says_so(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]


def test_wheels_hold_every_file_of_the_packages_that_is_no_module() -> None:
    """And every module: each lies in a package, whose folders all have an `__init__`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]
    files = {f for p in PACKAGES for f in (ROOT / p).rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    rooms = {folder.parent for folder in files if folder.name == "__init__.py"}
    data = {file for file in files if file.suffix != ".py"}
    shipped = {
        file
        for package, own in patterns.items()
        for room in (rooms if package == "*" else rooms & {ROOT.joinpath(*package.split("."))})
        for pattern in own
        for file in room.glob(pattern)
    }
    assert data - shipped == set()
    assert {file for file in files - data if file.parent not in rooms} == set()


def test_the_hooks_before_a_commit_run_what_make_lint_runs() -> None:
    entries = re.findall(r"entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2]
    run = [command.removesuffix(" .").replace(" --check", "") for command in re.findall(r"\$\(BIN\)/(.*)", lint)[1:]]
    assert entries == run


def test_torch_has_one_thread_as_each_worker_of_the_tests_has_one_processor() -> None:
    """Two workers with two threads each need ten times the processor time, which they spend on waiting."""
    import torch

    assert torch.get_num_threads() == 1


def test_the_slowest_tests_are_dealt_to_the_workers_first_and_every_test_once() -> None:
    first, second, *_ = SLOWEST
    names = ["a", "b", second, "c", "d", first, "e", second, "f"]
    assert deal(names, 1) == [5, 2, 7, 0, 1, 3, 4, 6, 8]
    assert deal(names, 2) == [5, 7, 0, 1, 2, 3, 4, 6, 8], "xdist's parts are the first 4 and the last 5"
    for workers in range(1, 12):
        assert sorted(deal(names, workers)) == list(range(len(names)))


def test_the_slowest_tests_exist() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in SLOWEST if f"def {name}(" not in tests] == []
