"""`fedge serve`: answer inference requests over HTTP, and those of sensors over MQTT."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

import click
from msgspec import Meta

from deploy.answering import Answering
from deploy.batching import Batcher
from deploy.engines import EngineChoice
from deploy.examination import Limits
from deploy.install_cli import install_in
from deploy.link import Link
from deploy.runtime import load
from deploy.sensor import Sensor
from deploy.server import Server
from deploy.serving import Answers, Fixed, Served
from deploy.slots import Slots, newest_in_inbox, owned
from fedge.background import INTERRUPTED, first_failure, on_signal
from fedge.bundle import read
from fedge.config import NAME, Name, Secret, resolve, settings_options
from fedge.credentials import Credentials
from fedge.egress import Door, Rules, rules_of, without_figures
from fedge.errors import ConfigError, StoreError
from fedge.https import server_tls
from fedge.logs import bind
from fedge.renewal import Renewal
from fedge.step import Reveals
from fedge.topics import Topics
from fedge.transport import BrokerSettings, Transport

log = logging.getLogger("fedge.deploy")

DRAIN_S: Final = 60.0
"""Requests that were accepted before SIGTERM are answered, if it takes no longer."""
LOCAL: Final = "local"
"""Name of device and federation where there is no broker to tell them to."""


class ServeSettings(Credentials, frozen=True, kw_only=True):
    """Section [serve] of the configuration."""

    home: (
        Annotated[Path, Meta(description="Folder of a device: serve what is installed there, as it is updated.")] | None
    ) = None
    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0: everybody in the network may ask.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: a free one.")] = 8000
    max_batch: Annotated[int, Meta(ge=1, le=256, description="Samples of several requests in one call.")] = 8
    max_delay_ms: Annotated[
        float, Meta(ge=0, le=1000, description="A request waits so long for others.", extra={"unit": "ms"})
    ] = 0.0
    max_waiting: Annotated[int, Meta(ge=1, le=10000, description="Requests that wait; more are told to come back.")] = (
        64
    )
    max_body: Annotated[float, Meta(gt=0, le=1024, description="Of a request.", extra={"unit": "MiB"})] = 8.0
    token: (
        Annotated[
            Secret,
            Meta(description="Who asks must show it, for all but health; better in the environment, and with TLS."),
        ]
        | None
    ) = None
    http_cert_file: Annotated[str, Meta(description="Certificate of this server for HTTPS; turns it on.")] | None = None
    http_key_file: Annotated[str, Meta(description="Its private key.")] | None = None
    threads: Annotated[int, Meta(ge=1, le=256, description="Threads of ONNX Runtime.")] = 1
    runtime: Annotated[
        EngineChoice,
        Meta(description="How bundles are run (docs/runtime.md); lazy and int8 are approximate."),
    ] = "auto"
    broker: (
        Annotated[str, Meta(description="MQTT broker, HOST:PORT: also answer the samples of sensors there.")] | None
    ) = None
    federation: Annotated[Name, Meta(description="With a broker: the federation's name.")] | None = None
    id: Annotated[Name, Meta(description="With a broker: the name of this device.")] | None = None
    egress: (
        Annotated[Path, Meta(description="The owner's file of what may leave; HOME/egress.toml without it.")] | None
    ) = None
    keepalive_s: Annotated[
        int, Meta(ge=1, le=3600, description="The broker misses us after 1.5 times this.", extra={"unit": "s"})
    ] = 30


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundles", nargs=-1, metavar="[BUNDLE|NAME=BUNDLE]...")
@settings_options(ServeSettings, "serve")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event on standard output.")
def serve(bundles: tuple[str, ...], config: Path | None, as_json: bool, **flags: object) -> int:
    """Answer inference requests: the Open Inference Protocol 2 over HTTP, as Triton and KServe speak it.

    BUNDLE is a folder; its model is called like the folder, or NAME. With --home the bundle that is installed on the
    device answers, under its task's name, and is switched while it is served when the agent writes a newer one or
    `fedge install` brings it; with --broker too, the device follows the fleet's rollouts. With --broker, sensors may
    also send samples over MQTT. Before other machines may ask, give it a certificate (--http-cert-file) and a token
    (docs/runtime.md).

    \b
    Examples:
      fedge serve cam1/bundles/3
      fedge serve front=cam1/bundles/3 back=cam2/bundles/3 --port 9000
      fedge serve --home cam1
      fedge serve --home cam1 --broker server:1883 --federation shop --id cam1
      fedge serve --home cam1 --host 0.0.0.0 --http-cert-file own.crt --http-key-file own.key --token 3f9c1b7e52a80d46

    \b
    Exit codes: 2 wrong configuration, no such bundle, HOME in use, 3 the port is taken or the broker refuses us, 4 the
    disk is full or broken, 5 a bundle is not what its manifest says, 130 stopped; requests that came before are
    answered.
    """  # noqa: D301 - click wants the backspace character itself
    settings = resolve(ServeSettings, "serve", config, flags)
    bind(federation=settings.federation, device=settings.id)
    rules = rules_of(settings.home, settings.egress, config)
    if settings.home is not None:
        rules = without_figures(rules, settings.home)
    if (settings.home is None) == (not bundles):
        raise ConfigError("name the bundles to serve, or give --home with the folder of a device")
    if settings.home is None:
        return _serve(settings, bundles, None, rules, as_json)
    if not settings.home.is_dir():
        raise ConfigError(f"there is no {settings.home}; install a bundle with `fedge install --home HOME BUNDLE`")
    with owned(settings.home) as slots:
        if slots.running is None and (first := newest_in_inbox(settings.home, 0, slots.state.refused)) is not None:
            install_in(settings.home, slots, read(first))
        return _serve(settings, bundles, slots, rules, as_json)


def _serve(settings: ServeSettings, bundles: Sequence[str], slots: Slots | None, rules: Rules, as_json: bool) -> int:
    """Until a signal; `slots`: those of the device that is served, None where bundles are named."""
    if slots is None:
        models: dict[str, Answers] = {
            name: Fixed(load(path, settings.threads, engine=settings.runtime)) for name, path in _named(bundles).items()
        }
    else:
        answering = Answering(slots, Limits(), settings.threads, engine=settings.runtime)
        models = {answering.runtime.task.name: answering}
    if settings.broker is not None and (settings.federation is None or settings.id is None or len(models) != 1):
        raise ConfigError("--broker needs --federation, --id and exactly one model, which the sensors mean")
    broker = settings.at(settings.broker, keepalive_s=settings.keepalive_s) if settings.broker else None
    asyncio.run(
        _run(
            settings,
            models,
            slots,
            broker,
            rules,
            server_tls(settings.token, settings.http_cert_file, settings.http_key_file),
            as_json,
        )
    )
    return INTERRUPTED


def _named(bundles: Sequence[str]) -> dict[str, Path]:
    """Folder by name, of FOLDER and NAME=FOLDER."""
    found: dict[str, Path] = {}
    for text in bundles:
        name, equals, path = text.partition("=")
        folder = Path(path if equals else text)
        name = name if equals else folder.resolve().name
        if re.match(NAME, name) is None:
            raise ConfigError(f"{name!r} is no name of a model (letters, digits, dot, dash, underscore): NAME={folder}")
        if name in found:
            raise ConfigError(f"two bundles are called {name}; write NAME={folder}")
        found[name] = folder
    return found


async def _run(
    settings: ServeSettings,
    models: dict[str, Answers],
    slots: Slots | None,
    broker: BrokerSettings | None,
    rules: Rules,
    tls: ssl.SSLContext | None,
    as_json: bool,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    on_signal(stopped.set, within_s=DRAIN_S)
    with ThreadPoolExecutor(1, "graph") as graph, ThreadPoolExecutor(1, "pictures") as pictures:
        served = [
            Served(
                name,
                model,
                Batcher(
                    model.answer,
                    graph,
                    max_batch=settings.max_batch,
                    max_delay_s=settings.max_delay_ms / 1000,
                    max_waiting=settings.max_waiting,
                ),
                pictures,
            )
            for name, model in models.items()
        ]
        server = Server(
            served,
            settings.host,
            settings.port,
            max_body_bytes=int(settings.max_body * 2**20),
            tls=tls,
            token=settings.token,
        )
        async with server:
            _say(server.url, [model.name for model in served], as_json)
            answering = next((model for model in models.values() if isinstance(model, Answering)), None)
            beside: list[Coroutine[None, None, None]] = []
            if broker is not None:
                beside.append(_on_broker(settings, broker, served[0], slots, answering, rules))
            elif slots is not None and answering is not None:
                assert settings.home is not None
                beside.append(Link(LOCAL, LOCAL, settings.home, slots, answering, Limits()).follow())
            await _until(stopped, beside)


async def _until(stopped: asyncio.Event, beside: Sequence[Coroutine[None, None, None]]) -> None:
    """Run what goes on beside the port; the first of it that fails ends all."""
    with first_failure():  # one line for the user, as without tasks
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in beside]
            await stopped.wait()
            for task in running:
                task.cancel()


async def _on_broker(
    settings: ServeSettings,
    broker: BrokerSettings,
    model: Served,
    slots: Slots | None,
    answering: Answering | None,
    rules: Rules,
) -> None:
    """All that this device does over MQTT, until cancelled; HTTP goes on while the broker is away."""
    assert settings.federation is not None
    assert settings.id is not None
    topics = Topics(settings.federation)
    door = Door(rules, settings.home, topics, lambda _: None)
    transport = Transport(broker, topics.client_id("serve", settings.id), door=door)
    sensor = Sensor(model, transport, settings.federation, settings.id)
    if Reveals.ANSWERS in rules.allowed:
        await transport.subscribe(sensor.topic, sensor.handle)
    beside: Callable[[], Awaitable[object]] = asyncio.Event().wait
    if settings.home is not None and slots is not None and answering is not None:
        link = Link(settings.id, settings.federation, settings.home, slots, answering, Limits(), rules)
        beside = link.run
        try:
            await link.attach(transport)
        except StoreError as error:  # it can answer all the same
            log.error("event=no_rollouts reason=%r", str(error))  # noqa: TRY400 - the text is all
            beside = link.follow
    await Renewal(transport, topics, settings.id).attach()
    async with transport, sensor:
        await beside()


def _say(url: str, names: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"event": "serving", "url": url, "models": names}))
    else:
        click.echo(f"serving {', '.join(names)} at {url}/v2/models/ (Ctrl-C to stop)")
