"""What all contracts of steps have in common (`fedge/steps`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedge.step import Action, Reveals, device_half, installed_steps

ROOT = Path(__file__).parents[3]
OURS = {name: kind for name, kind in installed_steps().items() if kind.__module__.startswith("fedge.steps.")}


def test_the_folders_list_all_that_a_device_can_be_asked() -> None:
    for folder in ("fedge/steps", "edge_agent/steps"):
        assert {path.stem for path in (ROOT / folder).glob("[!_]*.py")} == set(OURS)


@pytest.mark.parametrize("kind", OURS.values(), ids=list(OURS))
def test_a_step_has_one_name_everywhere_and_a_device_half(kind: type[Action]) -> None:
    assert installed_steps()[kind.STEP] is kind
    assert kind.__module__ == f"fedge.steps.{kind.STEP}"
    assert f"edge_agent.steps.{kind.STEP}" == kind.DEVICE
    assert callable(device_half(kind).run)


@pytest.mark.parametrize("kind", OURS.values(), ids=list(OURS))
def test_a_step_says_of_each_field_of_its_result_what_it_lets_out(kind: type[Action]) -> None:
    assert list(kind.RESULT.REVEALS) == list(kind.RESULT.__struct_fields__)
    assert all(isinstance(what, Reveals) for what in kind.RESULT.REVEALS.values())


def test_contracts_need_neither_torch_nor_another_package_of_ours() -> None:
    code = (
        "import sys; from fedge.step import installed_steps; installed_steps();"
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'sklearn', 'edge_agent', 'coordinator'})"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
