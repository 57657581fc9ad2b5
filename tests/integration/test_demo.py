"""A small demo as a user runs it: real processes, a real broker, real inference."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedge.commands.broker import LocalBroker
from tests.support import warm

SMALL = ["--devices", "4", "--rounds", "5", "--samples", "400", "--participation", "1"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedge", "demo", *SMALL, *map(str, arguments)]


def quick(*arguments: object) -> dict[str, Any]:
    """The same for `subprocess`, but that children of its programs need not import anything."""
    words = warm.command("demo", *SMALL, *map(str, arguments), forked=True)
    return {"args": words, "cwd": warm.ROOT, "env": warm.environment(), "text": True}


def processes_about(folder: Path) -> list[psutil.Process]:
    """Processes with the folder in their command line: agents, coordinator, inference."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in word for word in p.info["cmdline"] or ())]


@pytest.mark.smoke
async def test_the_whole_demo_over_both_brokers(broker: LocalBroker, tmp_path: Path) -> None:
    out, figures_file = tmp_path / "out", tmp_path / "figures.json"
    address = f"{broker.host}:{broker.port}"
    arguments = command("--broker", address, "--out", out, "--json", figures_file)
    ran = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not processes_about(out)
    figures: dict[str, Any] = json.loads(figures_file.read_bytes())
    assert figures["broker"] == address
    scenario = figures["scenario"]
    assert [scenario[name] for name in ("task", "partition", "devices", "rounds")] == ["digits", "groups", 4, 5]
    assert [run["method"] for run in figures["runs"]] == ["local", "fedavg", "fedavg+ft", "expert", "personal"]
    *_, ours = figures["runs"]
    assert {device["id"]: device["trained"] for device in ours["devices"]} == {f"camera-{i}": 5 for i in range(4)}
    assert ours["bytes_up"] > 0 < ours["bytes_down"]
    assert ours["max_abs_diff"] <= 1e-4
    validated = {run["method"]: list(run["validation"]) for run in figures["runs"]}
    assert validated["personal"] == validated["fedavg"] == ["1", "2", "3", "4", "5"]
    for device in ours["devices"]:
        check_device(device, ours, out)
    for run, method in zip(figures["runs"], figures["methods"], strict=True):
        mean = np.mean([device["score"]["accuracy"] for device in run["devices"]])
        assert method["accuracy"]["mean"] == pytest.approx(mean)
    assert ours["accuracy"] > 0.5, "far above the 10 percent of guessing"
    report = (out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|\ssrc=", report)
    assert "camera-3" in report
    assert "personal" in ran.stdout


async def test_a_secured_demo_lets_nobody_else_in(mosquitto_program: str, tmp_path: Path) -> None:
    out, figures_file = tmp_path / "out", tmp_path / "figures.json"
    arguments = quick("--devices", 2, "--rounds", 1, "--n-groups", 1, "--secure", "--out", out, "--json", figures_file)
    ran = await asyncio.to_thread(subprocess.run, capture_output=True, check=False, **arguments)
    assert ran.returncode == 0, ran.stderr
    *_, ours = json.loads(figures_file.read_bytes())["runs"]
    assert {device["id"]: device["trained"] for device in ours["devices"]} == {"camera-0": 1, "camera-1": 1}
    assert "require_certificate true" in (out / "broker" / "mosquitto.conf").read_text()
    assert not list(out.rglob("*.kit"))


def check_device(device: dict[str, Any], ours: dict[str, Any], out: Path) -> None:
    """Its personalised accuracy is that of its bundle, on its test samples, in a process without torch."""
    answer = json.loads((out / "logs" / f"{device['id']}-infer.out").read_bytes())
    assert answer["imported_torch"] is False
    assert answer["n"] == device["score"]["n"]
    bundle = out / device["id"] / "home" / "bundles" / device["release"]
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    roles = [candidate["role"] for candidate in manifest["candidates"]]
    assert {"private", "global"} <= set(roles)
    assert ("expert" in roles) == any(device["id"] in members for members in ours["clusters"].values())


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(**quick("--rounds", 500, "--out", out), stderr=subprocess.PIPE) as demo:
        wait_for_round(demo, 2)
        running = processes_about(out)
        assert len(running) >= 5
        demo.send_signal(signal.SIGINT)
        assert demo.stderr is not None
        demo.stderr.read()
        assert demo.wait(60) == 130
    assert not processes_about(out)


def test_nothing_is_left_when_the_demo_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(**quick("--rounds", 500, "--out", out), stderr=subprocess.PIPE) as demo:
        wait_for_round(demo, 1)
        running = [*psutil.Process(demo.pid).children(recursive=True)]
        assert len(running) >= 6, "broker, coordinator and four agents"
        os.kill(demo.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(running, timeout=300)
    assert not alive


def test_an_agent_that_dies_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(**quick("--rounds", 500, "--out", out), stderr=subprocess.PIPE) as demo:
        wait_for_round(demo, 1)
        victim = next(p for p in processes_about(out) if "camera-2" in p.cmdline())
        victim.kill()
        assert demo.stderr is not None
        rest = demo.stderr.read()
        assert demo.wait(60) == 1
    assert "error: camera-2 ended with exit code -9" in rest
    assert "event=order_" in rest, "the end of its log"
    assert not processes_about(out)


def wait_for_round(demo: subprocess.Popen[str], number: int) -> None:
    """Until the demo says that this round is done."""
    assert demo.stderr is not None
    said = []
    for line in demo.stderr:
        said.append(line)
        if f"round {number}/" in line:
            return
    pytest.fail("".join(said))
