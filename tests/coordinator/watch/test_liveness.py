"""What is shown of a fleet is the present only while its coordinator lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from coordinator.page.home_assistant import iterate_messages
from coordinator.page.metrics import iterate_metrics
from coordinator.watch import liveness
from coordinator.watch.liveness import SILENT_S, show_life
from coordinator.watch.state import Watch, read_summary
from fedge.commands.cli import main
from tests.support.shop import NOW, device, make_shop, set_last_sign


def states_in(metrics: list[Metric]) -> dict[str, float]:
    """Devices by state, and whether the coordinator is up."""
    found = {metric.name: metric for metric in metrics}
    by_state = {sample.labels["state"]: sample.value for sample in found["fedge_devices"].samples if sample.value}
    return by_state | {"up": found["fedge_coordinator_up"].samples[0].value}


def entities_in(state: dict[str, Any]) -> set[str | None]:
    """What Home Assistant is told of the devices' presence."""
    return {json.loads(data)["online"] for topic, data in iterate_messages(state) if "/devices/" in topic}


def server_in(state: dict[str, Any]) -> dict[str, Any]:
    """What Home Assistant is told of the server."""
    found: dict[str, Any] = json.loads(dict(iterate_messages(state))["fedge-home/shop/server"])
    return found


def test_while_it_lives_devices_are_as_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(make_shop(tmp_path)) as store:
        set_last_sign(tmp_path, SILENT_S - 4)
        state = Watch(tmp_path, store).get_state()
        assert (state["coordinator"]["state"], state["coordinator"]["text"]) == ("running", "")
        assert states_in([*iterate_metrics(state)]) == {"online": 11.0, "offline": 1.0, "up": 1.0}
        assert entities_in(state) == {"ON", "OFF"}
        assert server_in(state)["coordinator"] == server_in(state)["broker"] == "ON"
    assert main(["status", "--home", str(tmp_path)]) == 0
    assert "silent" not in capsys.readouterr().out


def test_a_connected_device_that_says_nothing_is_heard_all_the_same(tmp_path: Path) -> None:
    make_shop(tmp_path).close()
    set_last_sign(tmp_path, 3)
    fleet = read_summary(tmp_path)["fleet"]
    assert time.time() - fleet["cam1"]["seen_at"] == pytest.approx(3, abs=2)
    assert fleet["cam3"]["seen_at"] == NOW  # it is offline
    set_last_sign(tmp_path, 46 * 60)
    assert read_summary(tmp_path)["fleet"]["cam1"]["seen_at"] == NOW


def test_once_it_is_silent_nobody_is_online(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(make_shop(tmp_path)) as store:
        set_last_sign(tmp_path, 46 * 60)
        watch = Watch(tmp_path, store)
        state = watch.get_state()
        assert state["coordinator"]["state"] == "silent"
        assert {d["presence"] for d in state["devices"]} == {"unknown"}
        assert states_in([*iterate_metrics(state)]) == {"unknown": 12.0, "up": 0.0}
        assert entities_in(state) == {None}
        assert (server_in(state)["coordinator"], server_in(state)["broker"]) == ("OFF", None)
        assert "gives no sign of life" in server_in(state)["attention"]
        assert watch.explain_device("cam3")[0].startswith("cam3 was offline when the coordinator was last heard")
    assert main(["status", "--home", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "now         the coordinator has been silent for 46 min" in told
    assert "cam1: was online" in told
    assert main(["devices", "--home", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "silent for 46 min" in told.err
    assert "online" not in told.out
    assert main(["status", "--home", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["coordinator"]["state"] == "silent"


def test_the_end_of_a_run_is_no_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_shop(tmp_path, ended=True, done=True, installed={}).close()
    summary = read_summary(tmp_path)
    assert summary["coordinator"]["state"] == "ended"
    assert {device["presence"] for device in summary["fleet"].values()} == {"unknown"}
    assert main(["status", "--home", str(tmp_path)]) == 0
    assert "the run ended" in capsys.readouterr().out


def test_a_broker_that_is_away_is_told_everywhere_in_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"connected": False, "since": time.time() - 60, "address": "edge:1883"}
    with contextlib.closing(make_shop(tmp_path, broker=lost)) as store:
        state = Watch(tmp_path, store).get_state()
    assert (state["broker"], state["coordinator"]["state"]) == (lost, "running")
    assert {d["presence"] for d in state["devices"]} == {"unknown"}
    metrics = {metric.name: metric for metric in iterate_metrics(state)}
    assert metrics["fedge_broker_up"].samples[0].value == 0.0
    assert metrics["fedge_attention"].samples[0].labels["kind"] == "broker-unreachable"
    assert (server_in(state)["coordinator"], server_in(state)["broker"]) == ("ON", "OFF")
    for command, code in (("status", 1), ("devices", 0)):
        assert main([command, "--home", str(tmp_path)]) == code
        told = capsys.readouterr()
        assert "the coordinator does not reach the broker edge:1883" in told.out + told.err
        assert "(since 1 min)" in told.out + told.err


def test_a_runtime_that_is_down_is_told_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = {"cam1": device(serving="down", since={"serving": time.time() - 60}), "cam2": device(serving="serving")}
    with contextlib.closing(make_shop(tmp_path, fleet=fleet, problems={}, selection={})) as store:
        state = Watch(tmp_path, store).get_state()
    assert [d["serving"] for d in state["devices"]] == ["down", "serving"]
    down, up = (json.loads(data)["serving"] for topic, data in iterate_messages(state) if "/devices/" in topic)
    assert (down, up) == ("OFF", "ON")
    found = {
        m.name: {s.labels["state"]: s.value for s in m.samples} for m in iterate_metrics(state) if "runtimes" in m.name
    }
    assert found["fedge_runtimes"] == {"serving": 1.0, "down": 1.0, "unknown": 0.0, "none": 0.0}
    for command, code in (("status", 1), ("devices", 0)):
        assert main([command, "--home", str(tmp_path)]) == code
        assert "its fedge serve is down" in capsys.readouterr().out


async def test_a_running_coordinator_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.02)
    make_shop(tmp_path).close()
    assert json.loads((tmp_path / "summary.json").read_bytes())["at"] == NOW  # the summary alone is long silent
    set_last_sign(tmp_path, 46 * 60)
    with show_life(tmp_path):
        for _ in range(2):
            async with asyncio.timeout(30):
                while read_summary(tmp_path)["coordinator"]["state"] != "running":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            set_last_sign(tmp_path, 46 * 60)
    set_last_sign(tmp_path, 46 * 60)
    await asyncio.sleep(0.1)
    assert read_summary(tmp_path)["coordinator"]["state"] == "silent"
