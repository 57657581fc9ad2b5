"""Devices whose clocks are a year wrong: a Raspberry Pi has no clock chip, and nobody may have set the server's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation

DAY_S = 86400
YEAR_S = 365 * DAY_S


async def test_rounds_go_on_though_clocks_are_a_year_apart(
    mosquitto: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = {"cam0": YEAR_S, "cam1": 0, "cam2": -YEAR_S}
    async with Federation(mosquitto, tmp_path, devices=tuple(ahead), forked=False) as federation:
        for device, ahead_s in ahead.items():
            (folder := tmp_path / f"clock of {device}").mkdir()
            (folder / "sitecustomize.py").write_text(
                f"import time\nright = time.time\ntime.time = lambda: right() + {ahead_s}\n"
            )
            with monkeypatch.context() as patched:
                patched.setenv("PYTHONPATH", str(folder))
                await federation.agent(device, context_interval_s=0.5)
        coordinator = await federation.coordinator(method="fedavg", rounds=2)
        assert await coordinator.ended() == 0
    summary = json.loads((federation.home / "summary.json").read_bytes())
    assert summary["installed"].keys() == ahead.keys()
    assert summary["problems"] == {}
    wrong = {device: pytest.approx(ahead_s, abs=DAY_S) for device, ahead_s in ahead.items() if ahead_s}
    assert summary["clocks"] == wrong
