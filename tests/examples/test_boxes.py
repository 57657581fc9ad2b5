"""Boxes: a problem of one's own from files to bundles, on a real broker with real programs."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import pytest
from boxes import SIDE, Boxes, compute_overlap, write_cameras

from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError
from fedge.tasks import load_task
from tests.support.federation import ROOT, Federation

CODE = "boxes:Boxes"
PROGRAM = "import sys; sys.argv[0] = 'boxes'; import runpy; runpy.run_module('boxes', run_name='__main__'); "
PROGRAM += "sys.exit('torch' in sys.modules)"


def test_overlaps_by_hand() -> None:
    a = np.array([[0, 0, 2, 2], [0, 0, 1, 1], [0, 0, 2, 2.0]])
    b = np.array([[1, 1, 3, 3], [2, 2, 3, 3], [0, 0, 2, 2.0]])
    assert compute_overlap(a, b) == pytest.approx([1 / 7, 0, 1])


def test_answers_are_boxes_in_pixels() -> None:
    outputs = np.zeros((1, 14))
    outputs[:, :4], outputs[:, 4 + 7] = (-0.1, 0.25, 0.5, 1), 1
    assert Boxes().decode(outputs) == [(7, 0, SIDE / 4, SIDE / 2, SIDE)]


async def test_cameras_learn_boxes_and_their_bundles_answer_without_torch(
    mosquitto: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'examples'}:{ROOT}")
    devices = ("cam0", "cam1", "cam2")
    federation = Federation(mosquitto, tmp_path, devices=devices)
    write_cameras(tmp_path, len(devices), per_camera=150)
    with pytest.raises(ConfigError, match=r"names code that would be run here: boxes:Boxes.*--allow boxes:Boxes"):
        load_task(str(tmp_path / "task.json"))
    async with federation:
        for device in devices:
            await federation.agent(device, allow=CODE)
        coordinator = await federation.coordinator(method="fedge", rounds=4, optimizer="adam", allow=CODE)
        assert await coordinator.ended() == 0
    for device in devices:
        files = tmp_path / f"{device}.npz", tmp_path / device / "bundles" / "1"
        asked = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *map(str, files), stdout=PIPE)
        said = (await asked.communicate())[0].decode()
        assert asked.returncode == 0, "neither an error nor torch"
        assert said.startswith("Box(digit=")
        assert float(said.split()[-1]) > 0.4, "a box drawn blindly in the middle overlaps by 0.32"
