"""The commands of the documents run as they are written, section by section, each in an empty folder."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from export.signing import Repository
from fedge.commands.broker import find_free_port, find_mosquitto
from fedge.tasks import load_pool, load_task
from tests.support import warm
from tests.support.doc_commands import REASONS, ROOT, blocks, script
from tests.support.shop import make_shop
from tests.support.trained_bundles import trained_bundle

BLOCKS = list(blocks())
SECTIONS = {
    name: list(group)
    for name, group in itertools.groupby(
        (block for block in BLOCKS if block.reason is None), lambda block: f"{block.page}: {block.section}"
    )
}
SMOKE = "README.md: A federation by hand"
NEEDS_MOSQUITTO = "docs/security-setup.md: Five commands"


def my_methods(folder: Path) -> None:
    """What the page has the reader write, and a network."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[0]
    network = "\n\ndef Net():\n    from torch import nn\n\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (folder / "my_methods").mkdir()
    (folder / "my_methods" / "median.py").write_text(code + network)


def a_fleet(folder: Path) -> None:
    make_shop(folder / "shop").close()
    (folder / "fleet.toml").write_text('[rollout]\nbroker = "localhost:1883"\nfederation = "shop"\n')
    Repository.make(folder / "releases")


def bundles(folder: Path) -> None:
    samples = load_pool("digits")
    trained_bundle(folder / "home/bundles/3", load_task("digits"), samples.x, samples.y, release=3, steps=50)


BEFORE: dict[str, Callable[[Path], None]] = {
    "CONTRIBUTING.md": my_methods,
    "docs/operating.md": a_fleet,
    "docs/runtime.md": bundles,
}
"""What a page takes for granted."""

SAYS = {
    SMOKE: (r"rounds +5 of 5, done", r" accuracy 0\.[5-9]", r"serving digits .*at http"),
    "docs/tutorials/images.md: Your own images on three devices": (r"rounds +5 of 5", r"  three  "),
    "docs/tutorials/sensors.md: Windows of a sensor on three devices": (
        *(r"2 passed", r"rounds +5 of 5, done"),
        r"dev3-later\.npz: [^#]* accuracy (0\.9|1)",
    ),
}
"""What has to come of it, beside that every command succeeds."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `fedge` whose children are forked, so that only one section waits for all their imports."""
    folder = tmp_path_factory.mktemp("programs")
    address = warm.environment().get(warm.ADDRESS, "")
    places = f'PYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}" {warm.ADDRESS}="{address}"'
    (folder / "fedge").write_text(f'#!/bin/sh\n{places} exec {shlex.join(warm.command(forked=True))} "$@"\n')
    (folder / "fedge").chmod(0o755)
    return folder


@pytest.mark.unit
def test_what_is_not_run_says_why() -> None:
    assert [block for block in BLOCKS if block.reason not in {None, *REASONS}] == []


@pytest.mark.process
@pytest.mark.timeout(1200)  # with a load of ten on two cores the images took 500 s
@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=[pytest.mark.smoke] if name == SMOKE else []) for name in SECTIONS]
)
def test_the_commands_of_a_section_run_as_they_are_written(section: str, programs: Path, tmp_path: Path) -> None:
    if section == NEEDS_MOSQUITTO and find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    BEFORE.get(SECTIONS[section][0].page, lambda _: None)(tmp_path)
    port, http = (find_free_port("127.0.0.1") for _ in range(2))
    places = [programs, Path(sys.executable).parent, os.environ["PATH"]]
    here = {
        "PATH": os.pathsep.join(map(str, places[section == SMOKE :])),
        "HOME": str(tmp_path),
        "FEDGE_SERVE_PORT": str(http),
        "FEDGE_UI_PORT": "0",
    }
    text = script("".join(block.text for block in SECTIONS[section]), port, http)
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", text], cwd=tmp_path, env=os.environ | here, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = shell.wait(1180)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
    said = "".join(file.read_text() for file in sorted(tmp_path.glob("log*")))
    assert code == 0, f"{text}\n{said}"
    assert "Traceback" not in said
    for words in SAYS.get(section, ()):
        assert re.search(words, said), said
