"""The examples of containers: their YAML is read, their commands are those of `fedge`, their extras are ours.

No container is built: docker is not at hand where the tests run.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedge.commands.cli import command

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "examples" / "docker"


@pytest.mark.parametrize("name", ["server.yaml", "device.yaml"])
def test_a_compose_file_runs_commands_that_there_are(name: str) -> None:
    document: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    assert document.keys() == {"name", "x-fedge", "services", "volumes"}
    for service in document["services"].values():
        words = service["command"]
        group: Any = command
        found = group.get_command(None, words[0])
        assert found is not None
        with found.make_context(words[0], list(words[1:])):
            pass
        build = service["build"]
        assert (DOCKER / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(build["args"]["EXTRA"].split(",")) <= extras.keys()
        named = {volume.partition(":")[0] for volume in service["volumes"]}
        assert {volume for volume in named if not volume.startswith(".")} <= document["volumes"].keys()
        assert set(service.get("depends_on", ())) <= document["services"].keys()


def test_the_image_is_made_of_instructions_that_there_are() -> None:
    text = re.sub(r"\\\n", "", (DOCKER / "Dockerfile").read_text())
    instructions = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert instructions[:2] == ["ARG", "FROM"]
    assert set(instructions) <= {"ARG", "FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT"}
    assert instructions.index("RUN") < instructions.index("USER"), "the rest is installed as root, and run as nobody"


def test_nothing_but_the_packages_gets_into_the_image() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name for name in found if "." not in name}
    assert copied == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    comment, everything, *rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert (comment[0], everything) == ("#", "*")
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert {"**/*.key", "**/*.npz"} <= set(rules[len(copied) :])
