"""What Home Assistant is told, over a real broker."""

from __future__ import annotations

import contextlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.page import home_assistant
from coordinator.page.home_assistant import iterate_messages, parse_broker
from coordinator.page.server import Page
from coordinator.store.store import Store
from coordinator.watch.state import Watch, read_summary
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError
from fedge.wire.connection.broker import Inbound
from tests.support.broker import transport
from tests.support.shop import EVIL, device, make_shop
from tests.support.waiting import until


def told(home: Path) -> dict[str, Any]:
    with contextlib.closing(make_shop(home)) as store:
        return {topic: json.loads(payload) for topic, payload in iterate_messages(Watch(home, store).get_state())}


def test_a_device_has_an_entity_for_all_that_its_owner_tells(tmp_path: Path) -> None:
    found = told(tmp_path)
    config = found["homeassistant/device/fedge_shop_cam4/config"]
    entities = {name.removeprefix("fedge_shop_cam4_"): entity for name, entity in config["components"].items()}
    assert [*entities] == [*("online", "trouble", "release", "temperature", "drift", "failed", "accuracy", "measured")]
    assert all({"platform", "unique_id", "value_template"} <= entity.keys() for entity in entities.values())
    assert {"device", "origin"} < config.keys()
    assert found[config["state_topic"]] == {
        "online": "ON", "trouble": "its inputs are unlike those that its bundle learned",
        "release": 1, "accuracy": 66.0, "measured": "in training", "temperature": 51.0, "drift": "ON",
        "failed": 3,
    }  # fmt: skip
    first = found["fedge-home/shop/devices/cam1"]
    assert (first["accuracy"], first["measured"]) == (93.0, "of its bundle")
    assert (found["fedge-home/shop/server"]["accuracy"], found["fedge-home/shop/server"]["measured"]) == (
        93.0,
        "of its bundle",
    )
    assert [*found["fedge-home/shop/devices/cam2"]] == ["online", "trouble", "release"]
    assert found["fedge-home/shop/devices/cam3"]["online"] == "OFF"


def test_names_and_reasons_of_devices_make_no_other_topic_and_no_template(tmp_path: Path) -> None:
    fleet = {name: device() for name in ("a.b", "a_b", "a_-b", "a__b", "a")}
    problems = {"a": {"round": 1, "reason": f"{{{{ states }}}}{EVIL}" * 20}}
    with contextlib.closing(make_shop(tmp_path, fleet=fleet, problems=problems, selection={})) as store:
        found = dict(iterate_messages(Watch(tmp_path, store).get_state()))
    configs = [topic for topic in found if topic.startswith("homeassistant/")]
    assert len(configs) == len(set(configs)) == 6  # the server has one, too
    assert all(re.fullmatch(r"homeassistant/device/[a-zA-Z0-9_-]+/config", topic) for topic in configs)
    assert all(b"states" not in found[topic] for topic in configs)
    assert len(json.loads(found["fedge-home/shop/devices/a"])["trouble"]) == 255


@pytest.mark.parametrize("url", ["localhost:1883", "mqtts://h", "mqtt://", "mqtt://h:x", "mqtt://h/path"])
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="home_assistant: give mqtt://"):
        parse_broker(url)


def test_an_address_with_a_user() -> None:
    found = parse_broker("mqtt://fedge:p%40ss@ha.local")
    assert (found.host, found.port, found.username, found.password) == ("ha.local", 1883, "fedge", "p@ss")


async def test_it_is_told_at_once_when_something_changes_and_when_the_page_ends(
    mosquitto: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(home_assistant, "LOOK_S", 0.05)
    caplog.set_level("INFO")
    home = tmp_path / "home"
    make_shop(home).close()
    retained: dict[str, bytes] = {}

    async def note(inbound: Inbound) -> None:
        retained[inbound.topic] = inbound.payload

    url = f"mqtt://{mosquitto.host}:{mosquitto.port}"
    listener = transport(mosquitto, "home-assistant")
    await listener.subscribe("homeassistant/#", note)
    await listener.subscribe("fedge-home/#", note)
    page = Page(home, lambda: Store(home, intake=True), host="127.0.0.1", port=0, token="t" * 16, home_assistant=url)
    async with listener:
        async with page:
            another = Page(
                home, partial(Store, home, intake=True), host="127.0.0.1", port=0, token="t", home_assistant=url
            )
            async with another:
                await until(lambda: caplog.text.count("event=connected client=fedge-home:shop") == 2)
            assert "event=disconnected" not in caplog.text  # neither throws the other off
            await until(lambda: len(retained) == 27)  # twelve devices, the server, and whether all that still holds
            await until(lambda: retained["fedge-home/shop/available"] == b"online")
            whole = (home / "summary.json").read_bytes()
            (home / "summary.json").write_bytes(b"{")
            await until(lambda: "event=cannot_read" in caplog.text)
            (home / "summary.json").write_bytes(whole)
            summary = read_summary(home)
            summary["fleet"]["cam1"]["presence"] = "offline"
            del summary["fleet"]["cam9"], summary["selection"]["cam9"]
            (home / "summary.json").write_text(json.dumps(summary))
            await until(lambda: retained["homeassistant/device/fedge_shop_cam9/config"] == b"")
            await until(lambda: json.loads(retained["fedge-home/shop/devices/cam1"])["online"] == "OFF")
        await until(lambda: retained["fedge-home/shop/available"] == b"offline")
