"""Devices whose clocks are a year wrong: a Raspberry Pi has no clock chip, and nobody may have set the server's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation

DAY_S = 86400
YEAR_S = 365 * DAY_S


@pytest.mark.parametrize("ahead_s", [YEAR_S, -YEAR_S], ids=["device ahead", "coordinator ahead"])
async def test_rounds_go_on_though_clocks_are_a_year_apart(
    mosquitto: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    shifted = tmp_path / "shifted"
    shifted.mkdir()
    (shifted / "sitecustomize.py").write_text(
        f"import time\nright = time.time\ntime.time = lambda: right() + {ahead_s}\n"
    )
    async with Federation(mosquitto, tmp_path, devices=("cam0", "cam1"), forked=False) as federation:
        await federation.agent("cam1", context_interval_s=0.5)
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", str(shifted))
            await federation.agent("cam0", context_interval_s=0.5)
        coordinator = await federation.coordinator(method="fedavg", rounds=2)
        assert await coordinator.ended() == 0
    summary = json.loads((federation.home / "summary.json").read_bytes())
    assert summary["installed"].keys() == {"cam0", "cam1"}
    assert summary["problems"] == {}
    assert summary["clocks"] == {"cam0": pytest.approx(ahead_s, abs=DAY_S)}
