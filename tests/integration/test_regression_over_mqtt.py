"""Amounts are learned by real processes: the score is told by its name wherever people read it, and bundles answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click import Command
from click.testing import CliRunner

import deploy
from coordinator.page.cli import devices, events, rounds
from coordinator.service.cli import status
from coordinator.simulation.commands.report import report
from fedge.commands.broker import LocalBroker
from fedge.data.problems.scores import compute_r2
from tests.support.federation import Federation
from tests.support.waiting import until

WEIGHTS = np.array([3.0, -2.0, 1.0, 0.0])


def write_samples(file: Path, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    np.savez(file, x=x, y=(50 + 5 * (x @ WEIGHTS) + rng.normal(size=n)).astype(np.float32))


def run(command: Command, *arguments: object) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_amounts_end_in_bundles_and_are_told_by_r2(one_broker: LocalBroker, tmp_path: Path) -> None:
    write_samples(tmp_path / "all.npz", 200, 0)
    async with Federation(one_broker, tmp_path, devices=["a", "b"]) as federation:
        asked = {"task": "arrays", "data": tmp_path / "all.npz", "problem": "regression"}
        coordinator = await federation.coordinator(method="fedavg+ft", rounds=4, local_steps=30, **asked)
        await until((federation.home / "task.json").exists)
        for number, device in enumerate(federation.devices):
            write_samples(tmp_path / f"{device}-own.npz", 80, 1 + number)
            own = {"task": federation.home / "task.json", "data": tmp_path / f"{device}-own.npz"}
            await federation.agent(device, **own)
        assert await coordinator.ended() == 0
        assert "accuracy" not in json.dumps(coordinator.events)
        last = [event for event in coordinator.events if event["event"] == "round_done"][-1]
        assert any(line["score"] is not None for line in last["history"])
    home = ("--home", federation.home)
    for shown in (run(status, *home), run(devices, *home), run(rounds, *home), run(events, *home)):
        assert "R²" in shown
        assert "accuracy" not in shown
    told = json.loads(run(status, *home, "--json"))
    assert (told["score_name"], len(told["installed"])) == ("r2", 2)
    assert "accuracy" not in json.dumps(told)
    assert all("score" in row for row in json.loads(run(rounds, *home, "--json")))
    run(report, federation.home)
    page = (federation.home / "report.html").read_text()
    assert "R² by round" in page
    assert "ccurac" not in page
    write_samples(tmp_path / "new.npz", 100, 9)
    with np.load(tmp_path / "new.npz") as new:
        for device in federation.devices:
            (bundle,) = (tmp_path / device / "bundles").glob("[0-9]*")
            mean, spread = deploy.load(bundle).predict(new["x"]).answers
            r2 = compute_r2(mean, ((new["y"] - 50) / np.std(new["y"]))[:, np.newaxis])
            assert r2 is not None
            assert r2 > 0.5
            assert (spread > 0).all()
