"""What a step of one's own imports: both lists, and that the examples need nothing else."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge_agent.steps
import edge_agent.steps.public
import fedge.steps
import fedge.steps.public

ROOT = Path(__file__).parents[3]
LISTS = (fedge.steps.public, edge_agent.steps.public)
ROOMS = (fedge.steps, edge_agent.steps)
OTHERS = {
    "coordinator.clustering.find": {"Features"},
    "coordinator.fleet.fleet": {"AcceptedUpdate", "Fleet"},
    "coordinator.methods.baselines.personal_layers": {"PersonalLayers", "PersonalState"},
    "coordinator.methods.parts.server_optimizer": {"apply"},
    "coordinator.selection.contract": {"Candidates", "Rule"},
    "fedge.tasks": {"load_pool", "load_task", "write_task"},
}
"""What the pages name for those who write a method or bring data: docs/extending.md, CONTRIBUTING.md."""
EXAMPLES = [
    *sorted((ROOT / "examples" / "methods").glob("*.py")),
    ROOT / "tests" / "support" / "asking.py",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "extending.md",
]


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a file takes from our packages; of a page, in its blocks of Python."""
    text = file.read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL) if file.suffix == ".md" else [text]
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            yield from ((str(node.module), alias.name) for alias in node.names)


def is_ours(module: str) -> bool:
    return (
        module.split(".", maxsplit=1)[0] in {"fedge", "edge_agent", "coordinator", "export", "deploy"} and "." in module
    )


def is_public(module: str, name: str) -> bool:
    """Whether one of the lists has it, or methods may have it; by whichever path it is imported."""
    found = getattr(importlib.import_module(module), name, None)
    if any(name in each.__all__ and getattr(each, name) is found for each in LISTS):
        return True
    return (
        name in OTHERS.get(module, ()) or getattr(importlib.import_module("coordinator.methods"), name, None) is found
    )


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_need_nothing_that_is_not_public(file: Path) -> None:
    assert {(module, name) for module, name in imports_of(file) if not is_public(module, name)} == set()


def test_what_is_not_public_is_found() -> None:
    assert not is_public("edge_agent.device.worker", "Worker")
    assert is_public("fedge.steps.training.train", "Train")
    assert is_public("edge_agent.steps", "Learned")


@pytest.mark.parametrize(("room", "names"), [*zip(ROOMS, LISTS, strict=True)], ids=["contract", "device"])
def test_a_room_hands_out_its_list(room: object, names: object) -> None:
    listed = vars(names)["__all__"]
    assert len(listed) == len(set(listed))
    for name in listed:
        assert getattr(room, name) is getattr(names, name)
    with pytest.raises(AttributeError):
        room.nothing_of_this_name  # type: ignore[attr-defined]  # noqa: B018


def test_contracts_are_read_without_torch() -> None:
    """A coordinator reads them, and a device that only predicts."""
    import subprocess
    import sys

    code = "import sys; from fedge.steps import Train; import edge_agent.steps; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
