"""`fedge serve`: answers inference requests over HTTP, and over MQTT from sensors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import ssl
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Final

import click
from msgspec import Meta, structs

from deploy.commands.install import install_bundle
from deploy.inference.engines import (
    BudgetMbOption,
    BudgetMsOption,
    CoverageOption,
    EngineOptions,
    ModeOption,
    ProviderOption,
    ProviderOptions,
    RuntimeOption,
    ThreadsOption,
    make_engine_options,
)
from deploy.inference.runtime import load_runtime
from deploy.serving.batching import Batcher
from deploy.serving.endpoints import Answers, FixedModel, ServedModel
from deploy.serving.feedback import Feedback
from deploy.serving.sensor import SensorEndpoint
from deploy.serving.server import Server
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.link import Link
from deploy.updates.slots import find_inbox_bundle, lock_slots
from edge_agent.samples import SampleStore
from fedge.bundle.manifest import read_bundle
from fedge.errors import ConfigError, FedgeError, StoreError, TransportError
from fedge.identity.tls import HttpCertificate, HttpKey, ListenHost, ListenPort, make_server_tls
from fedge.membership.credentials import Credentials, KeepAlive
from fedge.membership.renewal import Renewal
from fedge.privacy.egress import Door, Rules, RulesFile, read_rules
from fedge.settings import CODE, NAME, Name, Secret, resolve, settings_options
from fedge.steps.contract import Reveals
from fedge.system.background import on_signal, raise_first_failure
from fedge.system.help import Command, json_lines_option
from fedge.system.loading import allow_code
from fedge.system.logs import bind
from fedge.system.stopping import INTERRUPTED
from fedge.system.systemd import notify_ready
from fedge.system.text import Heading
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.connector import SLOW_RETRY_S
from fedge.wire.connection.route import parse_address
from fedge.wire.topics import Topics
from fedge.wire.transport import SHORT_SESSION_S, Transport

log = logging.getLogger("fedge.deploy")

DRAIN_S: Final = 60.0
"""Time limit for answering requests that were accepted before SIGTERM."""
LOCAL: Final = "local"
"""Name of device and federation without a broker, where nobody sees them."""


class ServeSettings(Credentials, frozen=True, kw_only=True):
    """Section [serve] of the configuration."""

    home: Annotated[
        Path | None,
        Heading.FOLDERS,
        "This is the folder of a device, whose installed bundle is served, and each later one.",
    ] = None
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 8000
    max_batch: Annotated[
        int, Meta(ge=1, le=256), Heading.SERVER, "One call takes up to this many samples of several requests."
    ] = 8
    max_delay_ms: Annotated[
        float, Meta(ge=0, le=1000, extra={"unit": "ms"}), Heading.SERVER, "A request waits this long for others."
    ] = 0.0
    max_waiting: Annotated[
        int, Meta(ge=1, le=10000), Heading.SERVER, "This many requests may wait; others get 503."
    ] = 64
    max_body: Annotated[
        float, Meta(gt=0, le=1024, extra={"unit": "MiB"}), Heading.SERVER, "A request has at most this size."
    ] = 8.0
    token: Annotated[
        Secret | None,
        Heading.SERVER,
        "Clients must show this token, except for health checks. It is best set in the environment and used with TLS.",
    ] = None
    http_cert_file: HttpCertificate = None
    http_key_file: HttpKey = None
    runtime: RuntimeOption = "auto"
    mode: ModeOption = "normal"
    threads: ThreadsOption = 1
    provider: ProviderOption = "auto"
    provider_options: ProviderOptions = ""
    budget_ms: BudgetMsOption = None
    budget_mb: BudgetMbOption = None
    coverage: CoverageOption = None
    adapt_prior: Annotated[
        bool,
        Heading.PREDICTION,
        "While inputs or the classes' shares drift, a device's answers follow these without labels (docs/runtime.md).",
    ] = False
    score_with: Annotated[
        str,
        CODE,
        Heading.CODE,
        "Answers to a problem of your own get their scores from this class of it, package.module:Class.",
    ] = ""
    broker: Annotated[
        str | None, Heading.BROKER, "Sensors are answered at this MQTT broker, too; it is named as in `fedge agent`."
    ] = None
    federation: Annotated[Name | None, Heading.BROKER, "With --broker, this is the name of the federation."] = None
    id: Annotated[Name | None, Heading.BROKER, "With --broker, this is the name of the device."] = None
    egress: RulesFile = None
    keepalive_s: KeepAlive = 30


@click.command(cls=Command)
@click.argument("folders", nargs=-1, metavar="[FOLDER|NAME=FOLDER]...")
@settings_options(ServeSettings, "serve")
@json_lines_option("event")
def serve(folders: tuple[str, ...], config: Path | None, as_json: bool, **flags: object) -> int:
    """Answer inference requests: the Open Inference Protocol 2 over HTTP, as Triton and KServe speak it.

    FOLDER is a bundle, whose model has the folder's name, or an agent's home. NAME=FOLDER gives the model another name.
    A home, like --home, serves its installed bundle under its task's name. It switches without a pause when the agent
    writes a newer one or `fedge install` brings it. With --broker, the device also follows its fleet's rollouts in
    --home, and sensors may send samples over MQTT. Before you let other machines in, give it a certificate
    (--http-cert-file) and a token (docs/runtime.md).

    Examples:
      fedge serve cam1/bundles/3
      fedge serve front=cam1/bundles/3 back=cam2/bundles/3 --port 9000
      fedge serve --home cam1
      fedge serve --home cam1 --coverage 0.9
      fedge serve --home cam1 --budget-ms 20 --budget-mb 50
      fedge serve --home cam1 --broker server:1883 --federation shop --id cam1
      fedge serve --home cam1 --host 0.0.0.0 --http-cert-file own.crt --http-key-file own.key --token 3f9c1b7e52a80d46

    Exit codes: 2 wrong configuration, no such bundle, HOME in use, the provider does not run here, 3 the port is taken,
    4 the disk is full or broken, 5 a bundle is not what its manifest says, 130 stopped, after answering open requests.
    It keeps serving while the broker is away or refuses us.
    """
    settings = resolve(ServeSettings, "serve", config, flags)
    bind(federation=settings.federation, device=settings.id)
    rules = read_rules(settings.home, settings.egress, config)
    allow_code([settings.score_with] if settings.score_with else [])
    if settings.home is None and not folders:
        raise ConfigError("name the bundles to serve, or give --home with the folder of a device")
    if settings.home is not None and not settings.home.is_dir():
        raise ConfigError(f"there is no {settings.home}; install a bundle with `fedge install --home HOME BUNDLE`")
    with contextlib.ExitStack() as held:
        models = [] if settings.home is None else [_load_device(settings, None, settings.home, held, rules)]
        models += [_load_model(settings, *_parse_folder(folder), held, rules) for folder in folders]
        if settings.adapt_prior and not any(model.link for model in models):
            raise ConfigError("--adapt-prior is for a device: its validation samples say how its classes are shared")
        if settings.adapt_prior and (
            others := [m for m in models if m.link and not m.answers.runtime.task.problem.SHARED]
        ):
            raise ConfigError(
                f"--adapt-prior is for classification, where classes have shares, and {others[0].name} is "
                f"{others[0].answers.runtime.task.problem.NAME}: leave the option out"
            )
        names = [model.name for model in models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two models are called {twice[0]}; write NAME=FOLDER")
        needed = settings.federation is None or settings.id is None or (settings.home is None and len(models) != 1)
        if settings.broker is not None and needed:
            raise ConfigError("--broker needs --federation, --id, and --home or exactly one model for the sensors")
        if settings.broker is not None:
            parse_address(settings.broker)
            settings.find_proxy()
            settings.with_files()
        tls = make_server_tls(settings.token, settings.http_cert_file, settings.http_key_file)
        asyncio.run(_run(settings, models, rules, tls, as_json))
    return INTERRUPTED


@dataclass(frozen=True, slots=True)
class _Model:
    """A model served under a name. A device's has a `link`, which takes in bundles (agent, `fedge install`, fleet)."""

    name: str
    answers: Answers
    link: Link | None = None
    feedback: Feedback | None = None
    no_store: str = ""


def _parse_folder(text: str) -> tuple[str | None, Path]:
    name, equals, path = text.partition("=")
    if equals and re.match(NAME, name) is None:
        raise ConfigError(f"{name!r} is not a name of a model (letters, digits, dot, dash, underscore): NAME={path}")
    return (name, Path(path)) if equals else (None, Path(text))


def _make_options(settings: ServeSettings) -> EngineOptions:
    how = make_engine_options(
        settings.runtime,
        settings.mode,
        settings.threads,
        settings.provider,
        settings.provider_options,
        coverage=settings.coverage,
        budget_ms=settings.budget_ms,
        budget_mb=settings.budget_mb,
    )
    return structs.replace(how, code=(settings.score_with,) if settings.score_with else ())


def _load_model(
    settings: ServeSettings, name: str | None, folder: Path, held: contextlib.ExitStack, rules: Rules
) -> _Model:
    """Load a bundle, or the one installed in a home."""
    if (folder / "slots.json").exists() or (folder / "bundles").is_dir():
        return _load_device(settings, name, folder, held, rules)
    name = name or folder.resolve().name
    if re.match(NAME, name) is None:
        raise ConfigError(f"{name!r} is not a name of a model (letters, digits, dot, dash, underscore): NAME={folder}")
    return _Model(name, FixedModel(load_runtime(folder, _make_options(settings))))


def _load_device(
    settings: ServeSettings, name: str | None, home: Path, held: contextlib.ExitStack, rules: Rules
) -> _Model:
    """Load the bundle installed in a home, and lock the home until `held` closes."""
    slots = held.enter_context(lock_slots(home))
    if slots.running is None and (first := find_inbox_bundle(home, 0, slots.state.refused)) is not None:
        install_bundle(home, slots, read_bundle(first))
    answering = ActiveBundle(slots, Limits(), _make_options(settings), adapts_prior=settings.adapt_prior)
    waits = settings.broker is not None and home == settings.home
    task, store, no_store = answering.runtime.task, None, ""
    try:
        store = held.enter_context(SampleStore(home, task))
    except FedgeError as error:  # the device answers all the same
        no_store = f"the device's samples cannot be kept: {error}"
        log.error("event=no_store reason=%r", str(error))  # noqa: TRY400 - the text is all
    federation, device = settings.federation or LOCAL, settings.id or LOCAL
    link = Link(device, federation, home, slots, answering, rules, waits=waits, store=store)
    feedback = None if store is None else Feedback(answering, store)
    return _Model(name or task.name, answering, link, feedback, no_store)


async def _run(
    settings: ServeSettings, models: Sequence[_Model], rules: Rules, tls: ssl.SSLContext | None, as_json: bool
) -> None:
    stopped = asyncio.Event()
    on_signal(stopped.set, within_s=DRAIN_S)
    with ThreadPoolExecutor(1, "graph") as graph, ThreadPoolExecutor(1, "pictures") as pictures:
        delay_s, batch, waiting = settings.max_delay_ms / 1000, settings.max_batch, settings.max_waiting
        gather = partial(Batcher, pool=graph, max_batch=batch, max_delay_s=delay_s, max_waiting=waiting)
        served = [
            ServedModel(m.name, m.answers, gather(m.answers.answer), pictures, m.feedback, m.no_store) for m in models
        ]
        limit = int(settings.max_body * 2**20)
        server = Server(served, settings.host, settings.port, max_body_bytes=limit, tls=tls, token=settings.token)
        async with server:
            _print_serving(server.url, served, as_json)
            notify_ready()
            beside = [model.link.follow() for model in models if model.link is not None]
            if settings.broker is not None:
                link = models[0].link if settings.home else None
                beside.append(_serve_broker(settings, settings.broker, served[0], link, rules))
            await _run_background(stopped, beside)


async def _run_background(stopped: asyncio.Event, beside: Sequence[Coroutine[None, None, None]]) -> None:
    """Run background work beside the port; the first failure ends everything."""
    with raise_first_failure():  # so that the user sees one line, as without tasks
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in beside]
            await stopped.wait()
            for task in running:
                task.cancel()


async def _serve_broker(
    settings: ServeSettings, address: str, served: ServedModel, link: Link | None, rules: Rules
) -> None:
    """Do all of this device's MQTT work, until cancelled.

    HTTP continues without a broker, and with certificates that are damaged, expired or refused. Such a failure is
    logged once, and the connection is tried again, as somebody may put it right.
    """
    topics, failed_at = Topics(settings.federation or LOCAL), -math.inf
    while True:
        began = time.monotonic()
        try:
            broker = settings.make_broker_settings(address, keepalive_s=settings.keepalive_s)
            with contextlib.closing(Door(rules, settings.home, topics, lambda _: None)) as door:
                await _serve_transport(settings, broker, served, link, door)
        except (ConfigError, StoreError, TransportError) as error:
            again = began - failed_at < 2 * SLOW_RETRY_S
            level = logging.DEBUG if again else logging.ERROR
            log.log(level, "event=no_broker again_in_s=%.0f reason=%r", SLOW_RETRY_S, str(error))
            failed_at = time.monotonic()
        await asyncio.sleep(SLOW_RETRY_S)


async def _serve_transport(
    settings: ServeSettings, broker: BrokerSettings, served: ServedModel, link: Link | None, door: Door
) -> None:
    """Do this device's MQTT work over one transport, which reconnects by itself once the broker has let it in."""
    assert settings.federation is not None
    assert settings.id is not None
    topics = Topics(settings.federation)
    client = topics.make_client_id("serve", f"{settings.id}:{token_hex(8)}")
    will = None if link is None else link.make_last_will(broker)
    transport = Transport(broker, client, will=will, session_expiry_s=SHORT_SESSION_S, door=door)
    sensor = SensorEndpoint(served, transport, settings.federation, settings.id)
    if Reveals.ANSWERS in door.rules.allowed:
        await transport.subscribe(sensor.topic, sensor.handle)
        await transport.subscribe(sensor.feedback_topic, sensor.handle)
    if link is not None:
        await link.attach(transport)
    await Renewal(transport, topics, settings.id).attach()
    async with transport, sensor:
        await (asyncio.Event().wait() if link is None else link.publish_health())


def _print_serving(url: str, served: Sequence[ServedModel], as_json: bool) -> None:
    if as_json:
        providers = {model.name: list(model.runtime.providers) for model in served}
        names = [model.name for model in served]
        click.echo(json.dumps({"event": "serving", "url": url, "models": names, "providers": providers}))
    else:
        names = [f"{model.name} ({', '.join(model.runtime.providers)})" for model in served]
        click.echo(f"serving {', '.join(names)} at {url}/v2/models/ (Ctrl-C to stop)")
