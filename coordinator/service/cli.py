"""`fedge coordinator` runs a federation; `fedge status` reports on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import click

from coordinator.fleet.mqtt.presence import explain_outdated
from coordinator.fleet.problems import Problem, describe_reasons, select_reasons
from coordinator.methods.options import method_options, require_method_options, resolve_options
from coordinator.page.cli import UiSettings, make_page
from coordinator.rollout.settings import IntroductionSettings
from coordinator.service.between import Observer, make_event
from coordinator.service.service import serve, serve_role
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.store import Store
from coordinator.watch.accuracy import (
    describe_fleet_accuracy,
    find_accuracy,
    find_figure,
    find_trained,
    name_scores,
    summarise_accuracy,
)
from coordinator.watch.attention import Severity, describe_attention
from coordinator.watch.liveness import show_life
from coordinator.watch.notifying import notify
from coordinator.watch.options import HOME_HELP
from coordinator.watch.state import read_summary
from coordinator.watch.tracking import open_tracking
from coordinator.watch.words import (
    describe_campaign,
    describe_experts,
    describe_progress,
    explain_no_bundle,
    format_age,
    format_devices,
    format_duration,
)
from fedge.data.problems.scores import ACCURACY, Figure
from fedge.errors import ConfigError, ProtocolError, StoreError
from fedge.identity.names import Role, Subject
from fedge.membership.credentials import Credentials
from fedge.membership.signed_messages import make_speaker
from fedge.models.choice import with_network
from fedge.settings import resolve, settings_options
from fedge.system.background import run_until_stopped
from fedge.system.help import Command, json_lines_option, json_option
from fedge.system.logs import bind, is_json, log_event
from fedge.system.stopping import INTERRUPTED
from fedge.system.text import Heading, escape_controls
from fedge.tasks import load_task
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.route import parse_address
from fedge.wire.messages import Status, decode_message, is_outdated
from fedge.wire.retained import collect_retained
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.coordinator")

TIMED_ROUNDS: Final = 3
"""Rounds after which the time left is estimated."""
LAST_ROUNDS: Final = 9
"""Last rounds whose median duration gives the estimate of the time left."""


@click.command(cls=Command)
@settings_options(CoordinatorSettings, "coordinator")
@method_options
@json_lines_option("event")
def coordinator(config: Path | None, options: tuple[str, ...], as_json: bool, **flags: object) -> int:
    """Run a federation, or continue it, and watch it after its last round.

    You may kill it at any time: started again with the same --home, it continues where it was. It writes the task to
    HOME/task.json, for devices that cannot tell it from their own data. It does not train on the samples of --data.
    After the last round it stays, and does the campaigns that --every, --when or people ask for, until Ctrl-C; with
    --once it ends.

    Examples:
      fedge coordinator --broker localhost:1883 --federation shop --home shop --task digits --devices 12
      fedge coordinator --broker localhost:1883 --federation shop --home shop --task image-folder --data samples
      fedge coordinator --config edge_server.toml --rounds 50 --once --json
      fedge coordinator --config edge_server.toml --method ditto --option proximal_lambda=0.3
      fedge coordinator --config edge_server.toml --every 1d --when new-samples=500 --when drift=0.1
      fedge coordinator --config edge_server.toml --role intake

    Exit codes: 0 done (with --once), 2 wrong configuration, 3 the broker refuses us, 4 the disk is full or broken or
    the store's server does not answer, 6 the rounds are over and nothing was learned, or with --once no device has a
    bundle, 130 stopped.
    """
    settings = resolve(CoordinatorSettings, "coordinator", config, flags)
    bind(federation=settings.federation)
    own = resolve_options(config, options)
    require_method_options(settings.method, own)
    task = load_task(settings.task, settings.data, problem=settings.problem, allow=settings.allow.split(","))
    task = with_network(task, settings.model, settings.weights, settings.adapt, settings.augment)
    alone = settings.role == "all"
    opened = Store(
        settings.home, settings.store, blobs=settings.blobs, federation=settings.federation, intake=not alone
    )
    if not alone:
        with contextlib.closing(opened) as store:
            asyncio.run(run_until_stopped(serve_role(settings, task, store)))
        return INTERRUPTED
    with (
        contextlib.closing(opened) as store,
        _open_observer(as_json, task.problem.figure) as show,
        _track_rounds(settings, store, show) as observe,
        show_life(settings.home),
    ):
        staged = resolve(IntroductionSettings, "introduction", config, {})
        work = partial(serve, settings, task, store, observe, own, staged)
        summary = asyncio.run(run_until_stopped(_run_watched(settings, config, work)))
    return INTERRUPTED if summary is None else 0


async def _run_watched(
    settings: CoordinatorSettings, config: Path | None, work: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Run the federation; tell whoever is to be told of what needs attention."""
    async with notify(settings.home, "coordinator", settings.on_attention, settings.attention_webhook):
        return await _run_with_page(settings, config, work)


async def _run_with_page(
    settings: CoordinatorSettings, config: Path | None, work: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Run the federation, with its page if requested; the page's further settings are in section [ui]."""
    if settings.ui is None:
        return await work()
    at = parse_address(settings.ui)
    if at.path is not None:
        raise ConfigError(f"ui: write HOST:PORT, not {settings.ui!r}")
    given = {"home": settings.home, "store": settings.store, "host": at.host, "port": at.port}
    shown = resolve(UiSettings, "ui", config, given)
    async with make_page(shown, settings.federation, config) as running:
        log.info("event=page url=%s token_file=%s", running.url, settings.home / "ui-token")
        return await work()


@contextlib.contextmanager
def _open_observer(as_json: bool, figure: Figure = ACCURACY) -> Iterator[Observer]:
    """Open an observer: JSON lines, events as JSON log lines, a live line on a terminal, or a line per round."""
    if as_json or is_json():

        def print_event(event: str, fields: dict[str, Any]) -> None:
            if as_json:
                click.echo(json.dumps(name_scores({"event": event, **fields}, figure)))
            if is_json():
                _log_event(event, fields)

        yield print_event
        return
    progress = Progress(live=sys.stderr.isatty(), figure=figure)
    try:
        yield progress.observe
    finally:
        progress.close()


def _log_event(event: str, fields: dict[str, Any]) -> None:
    """Log an event with the fields that the store keeps."""
    record = make_event(event, fields, fields.get("round", 0))
    about = {"round": record.round or None, "device": record.device or None}
    log_event(log, event, {name: value for name, value in about.items() if value} | record.fields)


@contextlib.contextmanager
def _track_rounds(settings: CoordinatorSettings, store: Store, show: Observer) -> Iterator[Observer]:
    """Return an observer that also sends each round's figures to TensorBoard and MLflow, if configured."""
    run = store.put_value_once("tracked", uuid.uuid4().hex)
    with open_tracking(settings.tensorboard, settings.mlflow, settings.federation, run) as track:

        def observe(event: str, fields: dict[str, Any]) -> None:
            show(event, fields)
            if event == "round_done":
                last = fields["history"][-1] if fields["history"] else {}
                figures = {name: fields[name] for name in ("bytes_up", "bytes_down", "wall_s")}
                figures |= {name: last.get(name) for name in ("accuracy", "asked", "answered")}
                name = {"accuracy": find_figure(fields).name}
                track(fields["round"], {name.get(n, n): float(v) for n, v in figures.items() if v is not None})

        yield observe


class Progress:
    """Progress for people: rounds, devices, the score, bytes, time left."""

    def __init__(self, *, live: bool, figure: Figure = ACCURACY) -> None:
        self._live, self._figure = live, figure
        self._answers = 0
        self._told = 0
        self._rounds: int | None = None
        self._text = "waiting for devices"

    def observe(self, event: str, fields: dict[str, Any]) -> None:
        """Process an event and redraw."""
        if event == "beginning":
            self._text = "making the first model, and checking the network"
            self._print_line(self._text)
        elif event == "finished":
            more = "start it with more --rounds to go on, or with another --home to begin anew"
            self._print_line(f"finished: {fields['rounds']} rounds, {fields['bundles']} bundles installed; {more}")
        elif event == "resting":
            self._text = "watching the devices, until Ctrl-C; `fedge campaign run` begins the next campaign"
            self._print_line(self._text)
        elif event == "campaign_begun":
            self._told = 0
            self._print_line(f"campaign {fields['number']} begins: {fields['reason']}")
        elif event in {"campaign_skipped", "campaign_refused"}:
            self._print_line(f"no campaign: {fields['reason']}")
        elif event == "waiting":
            self._text = f"round {fields['round']}: waiting until {fields['devices']} devices are there"
            self._print_line(self._text)
        elif event == "round_begun":
            self._answers = 0
            after = self._rounds is not None and fields["round"] > self._rounds
            name = "after the last round" if after else f"round {fields['round']}"
            self._text = f"{name}: {format_devices(fields['devices'])}"
            if self._rounds is None:  # the first round of this process takes longest, since devices load torch
                self._print_line(self._text)
        elif event == "answer":
            self._answers += 1
        elif event == "round_done":
            self._print_line(self._format_round(fields))
            self._told, self._rounds = fields["round"], fields["rounds"]
        if self._live:
            click.echo(f"\r\x1b[2K{self._text}, {self._answers} answers", nl=False, err=True)

    def _format_round(self, summary: dict[str, Any]) -> str:
        number, rounds = summary["round"], summary["rounds"]
        nobody: dict[str, Any] = {"accuracy": None, "answered": 0, "asked": 0}
        history = summary["history"]
        last = history[-1] if history else nobody
        problems = {i: Problem(**problem) for i, problem in summary["problems"].items()}
        devices = f"answered {last['answered']} of {last['asked']}"
        if last["answered"] < last["asked"] and (why := describe_reasons(select_reasons(problems, number))):
            devices += f" ({why})"
        shown = "-" if last["accuracy"] is None else f"{last['accuracy']:.3f}"
        traffic = f"{summary['bytes_up'] / 1e6:.2f} MB up, {summary['bytes_down'] / 1e6:.2f} MB down"
        promise = summary.get("privacy")
        if summary["done"]:
            why = describe_reasons(explain_no_bundle(summary))
            missing = f", NO BUNDLE on {why}" if why else ""
            bundles = f"{len(summary['installed'])} bundles installed{missing}"
            accuracy = describe_fleet_accuracy(summarise_accuracy(summary["fleet"].values(), find_trained(history)))
            how = f", {self._figure.words} {accuracy[0]}" if accuracy else ""
            end = "done" if summary["installed"] else "ended"
            return f"{end}: {bundles}{how}, {traffic}, {summary['wall_s']:.0f} s" + (
                f"; privacy: {promise}" if promise else ""
            )
        if number == self._told:  # a method may have steps after its last round of training
            return f"after round {number}: {devices}, {traffic}"
        return (
            f"round {number}/{rounds}  {devices}  {self._figure.words} in training {shown}  {traffic}"
            f"{describe_time_left(summary)}"
        )

    def _print_line(self, text: str) -> None:
        click.echo(("\r\x1b[2K" if self._live else "") + text, err=True)

    def close(self) -> None:
        """Leave the cursor on a new line."""
        if self._live:
            click.echo("", err=True)


def describe_time_left(summary: Mapping[str, Any]) -> str:
    """Describe how long it takes until devices have bundles, for a round's line; empty if nobody knows yet.

    Rounds take as long as the median of the last rounds. Writing the bundles takes about as long as the longest round,
    mostly the first, because devices load torch in that round and torch's exporter in the end.
    """
    round_s: list[float] = summary["round_s"]
    left = max(summary["rounds"] - summary["round"], 0)
    if len(round_s) < TIMED_ROUNDS:
        return "" if left else "  now the bundles"
    seconds = left * statistics.median(round_s[-LAST_ROUNDS:]) + max(round_s)
    return f"  about {seconds:.0f} s until the bundles are there"


class StatusSettings(Credentials, frozen=True, kw_only=True):
    """Section [status] of the configuration."""

    home: Annotated[Path | None, Heading.FOLDERS, HOME_HELP] = None
    broker: Annotated[
        str | None,
        Heading.BROKER,
        "Instead of a home, this broker is asked, as of `fedge agent`; it knows the devices only.",
    ] = None
    federation: Annotated[str | None, Heading.BROKER, "With --broker, this is the name of the federation."] = None


@click.command(cls=Command)
@settings_options(StatusSettings, "status")
@json_option()
def status(config: Path | None, as_json: bool, **flags: object) -> int:
    """Show how a federation is doing: rounds, devices, accuracy, traffic, refusals.

    With --home it shows first what needs attention, since when, and what to do, then what the coordinator wrote last,
    how long ago, and whether the coordinator still runs.

    Examples:
      fedge status --home shop
      fedge status --broker server:8883 --federation shop --ca-file ca.crt --cert-file status.crt --key-file status.key

    Exit codes: 0, 1 something does not work (an error needs attention, such as a silent coordinator), 2 wrong usage, no
    coordinator's folder or no device of such a federation, 3 the broker refuses us or cannot be reached, 4 what the
    coordinator wrote cannot be read.
    """
    settings = resolve(StatusSettings, "status", config, flags)
    match settings.home, settings.broker, settings.federation:
        case Path() as home, None, None:
            summary = read_summary(home)
            try:
                lines = _format_federation(summary)
            except (KeyError, TypeError, AttributeError) as error:
                raise StoreError(f"{home / 'summary.json'} is damaged or of another version: {error!r}") from error
        case None, str(broker), str(federation):
            devices = asyncio.run(read_presence(settings.make_broker_settings(broker), federation))
            if not devices:
                raise ConfigError(f"the broker at {broker} knows no device of a federation {federation!r}")
            summary = {"federation": federation, "devices": devices}
            lines = [
                f"federation  {federation}, as the broker knows it now",
                *(f"  {device}: {now}" for device, now in sorted(devices.items())),
            ]
        case _:
            raise click.UsageError("give either --home, or --broker and --federation")
    told = name_scores(summary, find_figure(summary))
    click.echo(json.dumps(told) if as_json else "\n".join(map(escape_controls, lines)))
    return int(any(item["severity"] == Severity.ERROR for item in summary.get("attention", ())))


def _format_federation(summary: dict[str, Any]) -> list[str]:
    history, devices, figure = summary["history"], summary["devices"], find_figure(summary)
    experts = describe_experts(summary)
    shared = f"none, but {experts}" if experts else "one global model"
    accuracy = describe_fleet_accuracy(summarise_accuracy(summary["fleet"].values(), find_trained(history)))
    lines = [
        f"federation  {summary['federation']} ({summary['method']}), as it was {format_duration(summary['age_s'])} ago",
        f"rounds      {summary['round']} of {summary['rounds']}, {describe_progress(summary)}",
        *(f"{'' if k else figure.words:<11} {text}" for k, text in enumerate(accuracy or ["-"])),
        f"clusters    {len(summary['clusters']) if summary['split'] else shared}",
        f"traffic     {summary['bytes_up'] / 1e6:.2f} MB up, {summary['bytes_down'] / 1e6:.2f} MB down",
    ]
    if campaign := summary.get("campaign"):
        lines.append(f"campaign    {describe_campaign(campaign)}")
    if text := summary["coordinator"]["text"]:
        lines.insert(1, f"now         {text}")
    lines[:0] = [f"attention   {text}" for text in describe_attention(summary["attention"])]
    if promise := summary.get("privacy"):
        lines.append(f"privacy     {promise}")
    last = {name: f"; the last: {text}" for name, text in summary.get("last_refused", {}).items()}
    refused = [f"{name}, {n} times{last.get(name, '')}" for name, n in summary["refused"].items()]
    lines += [f"refused     {text}" for text in refused or ["nothing"]]
    if second := summary.get("second"):
        lines.append(f"second      {second['where']} came {format_age(second['at'])} as this federation's coordinator")
    problems = summary["problems"]
    was = "" if summary["coordinator"]["state"] == "running" else "was "
    for device in sorted(set(devices) | set(summary["selection"]) | set(problems) | set(summary["quarantined"])):
        bundle = ", bundle installed" if device in summary["installed"] else ""
        bundle = ", NO BUNDLE" if device in summary["without_bundle"] else bundle
        trained = summary["selection"].get(device, 0)
        shown = find_accuracy(summary["fleet"].get(device, {}), None)
        accuracy_text = "" if shown is None else f", {figure.words} {shown.share:.3f} {shown.of}"
        seen_at = summary["fleet"].get(device, {}).get("seen_at")
        heard = f", heard {format_age(seen_at)}" if seen_at else ""
        presence = f"{was}{devices[device]}" if device in devices else "not seen"
        lines.append(f"  {device}: {presence}{heard}, trained {trained} times{bundle}{accuracy_text}")
        if device in summary["clocks"]:
            ahead_s = summary["clocks"][device]
            where = f"{format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"
            lines.append(f"    its clock is {where} the coordinator's: set the wrong one")
        if out := summary["quarantined"].get(device):
            lines.append(f"    in quarantine until round {out['until']}; --readmit {device} ends it")
            lines += [f"      round {e['round']}: {e['name']}, {e['detail']}" for e in out["evidence"]]
        if device in summary["retired"]:
            lines.append("    retired: it gets no more orders")
        if device in problems:
            lines.append(f"    round {problems[device]['round']}: {problems[device]['reason']}")
    return lines


async def read_presence(broker: BrokerSettings, federation: str) -> dict[str, str]:
    """Return the presence of each device as retained by the broker, or advice about one of an earlier version.

    Raises:
        TransportError: the broker refused us for good, or cannot be reached.
    """
    topics = Topics(federation)
    signed = make_speaker(broker, Subject(federation, Role.STATUS, "status"), None)
    transport = Transport(broker, topics.make_client_id("status", uuid.uuid4().hex))
    await signed.follow_revocations(transport, topics)
    async with collect_retained(transport, topics, "status") as said:
        pass
    found: dict[str, str] = {}
    for device, data in said.items():  # only when complete: revocations may come last
        topic = topics.make_agent_topic(device, "status")
        try:
            payload = signed.open(topic, data, Role.DEVICE, name=device)
            found[device] = (
                explain_outdated(device) if is_outdated(payload) else decode_message(payload, Status).presence
            )
        except ProtocolError as error:
            if error.name == "revoked":
                found[device] = "revoked"
            log.warning("event=refused name=%s topic=%s detail=%r", error.name, topic, str(error))
    return found
