"""The devices of a federation in Home Assistant, through its MQTT discovery.

    homeassistant/device/fedge_FEDERATION/config      the server's entities, retained
    fedge-home/FEDERATION/server                      their values, as JSON, retained
    homeassistant/device/fedge_FEDERATION_ID/config   a device's entities, retained
    fedge-home/FEDERATION/devices/ID                  their values, as JSON, retained
    fedge-home/FEDERATION/available                   online or offline, retained: offline is the last will

Only values that the page shows are published; a value that a device's owner withholds has no entity. Source: Home
Assistant's documentation of MQTT, "Device discovery payload".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import fedge
from coordinator.watch.accuracy import find_figure
from coordinator.watch.liveness import UNKNOWN
from fedge.data.problems.scores import ACCURACY, Figure
from fedge.errors import ConfigError, StoreError, TransportError
from fedge.wire.connection.broker import BrokerSettings, Will
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.ui")

LOOK_S: Final = 2.0
"""Pause between two looks for what has changed."""
GOODBYE_S: Final = 2.0
MAX_TEXT: Final = 255
"""Most characters that Home Assistant takes as a state."""
Read = Callable[[], Awaitable[Mapping[str, Any]]]


def parse_broker(url: str) -> BrokerSettings:
    """Parse the broker of mqtt://USER:PASSWORD@HOST:PORT.

    Raises:
        ConfigError: the text is not such an address.
    """
    with contextlib.suppress(ValueError):
        found = urlsplit(url)
        if found.scheme == "mqtt" and found.hostname and not found.path.strip("/"):
            user, password = (None if word is None else unquote(word) for word in (found.username, found.password))
            return BrokerSettings(found.hostname, found.port or 1883, user, password)
    raise ConfigError("home_assistant: give mqtt://HOST:PORT, or mqtt://USER:PASSWORD@HOST:PORT")


def iterate_messages(state: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Iterate over the retained messages about server and devices, by topic. `state`: from `Watch.get_state`."""
    federation, figure = state["federation"], find_figure(state)
    server = f"fedge_{_encode_name(federation)}"
    yield from _iterate_about(
        federation, server, f"fedge ({federation})", "server", _collect_server_figures(state), figure
    )
    for device in state["devices"]:
        i, name = device["id"], f"{server}_{_encode_name(device['id'])}"
        yield from _iterate_about(
            federation, name, f"{i} ({federation})", f"devices/{i}", _collect_figures(device, figure), figure
        )


def _iterate_about(
    federation: str, name: str, shown: str, topic: str, figures: Mapping[str, Any], figure: Figure
) -> Iterator[tuple[str, bytes]]:
    """Iterate over the messages about one machine: its entities, and their values."""
    config = {
        "device": {"identifiers": [name], "name": shown, "manufacturer": "fedge"},
        "origin": {"name": "fedge", "sw_version": fedge.__version__},
        "components": {f"{name}_{key}": _make_entity(name, key, figure) for key in figures},
        "state_topic": f"{_make_root(federation)}/{topic}",
        "availability_topic": f"{_make_root(federation)}/available",
    }
    yield f"homeassistant/device/{name}/config", json.dumps(config).encode()
    yield f"{_make_root(federation)}/{topic}", json.dumps(figures).encode()


ENTITIES: Final[Mapping[str, Mapping[str, str]]] = {
    "online": {"platform": "binary_sensor", "name": "online", "device_class": "connectivity"},
    "drift": {"platform": "binary_sensor", "name": "inputs drift", "device_class": "problem"},
    "trouble": {"platform": "sensor", "name": "trouble"},
    "release": {"platform": "sensor", "name": "release"},
    "accuracy": {"platform": "sensor", "name": "accuracy", "unit_of_measurement": "%"},
    "measured": {"platform": "sensor", "name": "accuracy measured"},
    "temperature": {
        "platform": "sensor",
        "name": "temperature",
        "device_class": "temperature",
        "unit_of_measurement": "°C",
    },
    "failed": {"platform": "sensor", "name": "failed predictions", "state_class": "total_increasing"},
    "serving": {"platform": "binary_sensor", "name": "fedge serve", "device_class": "running"},
    "coordinator": {"platform": "binary_sensor", "name": "coordinator", "device_class": "running"},
    "broker": {"platform": "binary_sensor", "name": "broker", "device_class": "connectivity"},
    "attention": {"platform": "sensor", "name": "needs attention"},
    "errors": {"platform": "sensor", "name": "errors"},
}


def _collect_server_figures(state: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the server's values by entity; the broker is unknown without a coordinator."""
    running, items = state["coordinator"]["state"] == "running", state["attention"]
    connected = (state.get("broker") or {"connected": True})["connected"]
    texts = [f"{item['device']}: {item['text']}" if item["device"] else item["text"] for item in items]
    return {
        "coordinator": _format_switch(on=running),
        "broker": _format_switch(on=connected) if running else None,
        "attention": "; ".join(texts)[:MAX_TEXT] or "nothing",
        "errors": sum(item["severity"] == "error" for item in items),
        **_format_score(next(iter(state["shown"]), None), find_figure(state)),
    }


def _format_switch(*, on: bool) -> str:
    return "ON" if on else "OFF"


def _collect_figures(device: Mapping[str, Any], figure: Figure) -> dict[str, Any]:
    """Collect a device's values by entity; None if unknown yet."""
    health, context, shown = device["health"] or {}, device["context"] or {}, device["shown"]
    figures = {
        "online": None if device["presence"] == UNKNOWN else _format_switch(on=device["presence"] == "online"),
        "trouble": ("; ".join(device["attention"]) or device["why"])[:MAX_TEXT] or "none",
        "release": device["release"],
    }
    if (serving := device.get("serving", "none")) != "none":
        figures["serving"] = None if serving == UNKNOWN else _format_switch(on=serving == "serving")
    by_kind = {
        "loss": {} if shown else _format_score(None, figure),
        "load": {"temperature": context.get("temperature_c")},
        "use": {"drift": "ON" if health.get("drift") else "OFF", "failed": health.get("n_failed", 0)} if health else {},
    }
    for kind, values in by_kind.items():
        if kind not in device["withholds"]:
            figures |= values
    return figures | (_format_score(shown, figure) if shown else {})


def _format_score(shown: Mapping[str, Any] | None, figure: Figure) -> dict[str, Any]:
    """Format the score that is shown first, shares in percent, and what it is of."""
    if not shown:
        return {figure.name: None}
    value = round(100 * shown["share"], 1) if figure.share else round(shown["share"], 4)
    return {figure.name: value, "measured": shown["of"]}


def _make_entity(name: str, key: str, figure: Figure) -> dict[str, str]:
    entity = dict(ENTITIES["accuracy" if key == figure.name else key])
    if key in {figure.name, "measured"}:
        entity["name"] = entity["name"].replace(ACCURACY.name, figure.words)
    if key == figure.name and not figure.share:
        del entity["unit_of_measurement"]
    return {**entity, "unique_id": f"{name}_{key}", "value_template": f"{{{{ value_json.{key} }}}}"}


def _make_root(federation: str) -> str:
    return f"fedge-home/{federation}"


def _encode_name(name: str) -> str:
    """Encode a name in the characters of an object id; distinct names stay distinct."""
    return name.replace("_", "__").replace(".", "_-")


async def publish_devices(read: Read, url: str, federation: str) -> None:
    """Keep Home Assistant's broker informed until cancelled; a refusal is logged once."""
    available = f"{_make_root(federation)}/available"
    ours = f"fedge-home:{federation}:{secrets.token_hex(4)}"  # others may tell of the same federation
    transport = Transport(parse_broker(url), ours, will=Will(available, b"offline"))
    said: dict[str, bytes] = {}

    async def forget() -> None:
        said.clear()  # for a broker that lost its state

    transport.on_connect(forget)
    try:
        async with transport:
            try:
                while True:
                    said.pop(available, None)  # another process that ended has published offline
                    try:
                        await _publish_changes(
                            transport, said, {available: b"online"} | dict(iterate_messages(await read()))
                        )
                    except StoreError as error:
                        log.warning("event=cannot_read reason=%r", str(error))
                    await asyncio.sleep(LOOK_S)
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await transport.publish(available, b"offline", retain=True)
    except TransportError as error:
        log.error("event=home_assistant_ended reason=%r", str(error))  # noqa: TRY400 - the text is all


async def _publish_changes(transport: Transport, said: dict[str, bytes], now: Mapping[str, bytes]) -> None:
    """Publish what is new, and clear what is gone."""
    for topic in [*now, *(said.keys() - now.keys())]:
        payload = now.get(topic, b"")
        if said.get(topic) != payload:
            await transport.publish(topic, payload, retain=True)
            said[topic] = payload
            if not payload:
                del said[topic]
