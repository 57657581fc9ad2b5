"""`fedge devices`, `rounds`, `why`, `events`: a federation as seen from its coordinator's home.

`fedge retire`, `pause`, `resume` and `finish` send requests to the coordinator; `fedge ui` offers all of this in a
browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import click
from msgspec import Struct

from coordinator.page.tables import print_table
from coordinator.store.requests import request_action
from coordinator.store.store import Store
from coordinator.watch.accuracy import find_figure, name_scores
from coordinator.watch.attention import describe_attention
from coordinator.watch.notifying import notify
from coordinator.watch.options import (
    HOME,
    HOME_HELP,
    JSON,
    STORE,
    STORE_HELP,
    AttentionWebhook,
    OnAttention,
    open_store,
)
from coordinator.watch.state import Watch, read_summary
from coordinator.watch.words import format_age, make_event_values
from fedge.errors import ConfigError
from fedge.identity.tls import HttpCertificate, HttpKey, ListenHost, ListenPort, make_server_tls
from fedge.membership.credentials import CA
from fedge.settings import Secret, resolve, settings_options
from fedge.system.background import run_until_stopped
from fedge.system.help import Command, json_lines_option, json_option, last_option, option
from fedge.system.stopping import INTERRUPTED
from fedge.system.text import Heading, escape_controls

if TYPE_CHECKING:
    from coordinator.page.server import Page

LOOK_S: Final = 0.5
"""Pause between two looks for new events."""


@contextlib.contextmanager
def _open_watch(home: Path, store: str | None) -> Iterator[Watch]:
    with contextlib.closing(open_store(home, store)) as found:
        yield Watch(home, found)


def _format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _format_shown(shown: Mapping[str, Any] | None, withholds: Sequence[str]) -> str:
    """Format the accuracy that is shown first, with what it is of."""
    if shown is None:
        return "not told" if "loss" in withholds else "-"
    return f"{shown['share']:.3f} {shown['of']}" + ("" if shown["n"] is None else f" ({shown['n']})")


@click.command(cls=Command)
@HOME
@STORE
@JSON
def devices(home: Path, store: str | None, as_json: bool) -> int:
    """List the devices of a federation: state, bundle, accuracy, outliers, what is wrong, and why it takes no part.

    The column *heard* says when a device was last known to be connected, *serve* whether its `fedge serve` runs.
    *Accuracy* is of the bundle that answers: at work, on answers labelled later, or on its validation samples, with
    their number; if neither is told, of the model in training. What is wrong with the server comes before.

    Examples:
      fedge devices --home shop

    Exit codes: 0, 2 no coordinator's folder, 4 what the coordinator wrote cannot be read.
    """
    with _open_watch(home, store) as watch:
        state = watch.get_state()
    found, figure = state["devices"], find_figure(state)
    if text := state["coordinator"]["text"]:
        click.echo(text, err=True)
    for line in describe_attention([item for item in state["attention"] if not item["device"]]):
        click.echo(escape_controls(line), err=True)
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "device": itemgetter("id"),
        "state": lambda d: "in quarantine" if d["quarantine"] else d["presence"],
        "heard": lambda d: format_age(d["seen_at"]),
        "serve": lambda d: "-" if d["serving"] == "none" else d["serving"],
        "release": lambda d: d["release"] or "-",
        "samples": lambda d: "-" if d["n_samples"] is None else d["n_samples"],
        "trained": itemgetter("trained"),
        figure.words: lambda d: _format_shown(d["shown"], d["withholds"]),
        "outliers": lambda d: "not told" if "use" in d["withholds"] else _format_share(d["outliers"]),
        "why": lambda d: "; ".join([*d["attention"], *([d["why"]] if d["why"] else [])]),
    }
    return print_table(name_scores(found, figure) if as_json else found, as_json, columns)


@click.command(cls=Command)
@HOME
@STORE
@JSON
@last_option(20)
def rounds(home: Path, store: str | None, as_json: bool, last: int) -> int:
    """List the rounds: who was asked, how many answered, were late or failed, accuracy.

    Examples:
      fedge rounds --home shop
      fedge rounds --home shop --last 100 --json

    Exit codes: 0, 2 no coordinator's folder, 4 what the coordinator wrote cannot be read.
    """
    with _open_watch(home, store) as watch:
        state = watch.get_state()
    found, figure = state["rounds_list"][-last:], find_figure(state)
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "round": itemgetter("round"),
        "began": lambda r: _format_clock(r["begun_at"]),
        "seconds": lambda r: f"{r['done_at'] - r['begun_at']:.1f}" if r["done_at"] else "under way",
        **{name: itemgetter(name) for name in ("asked", "answered", "late", "failed")},
        figure.words: lambda r: _format_share(r["accuracy"]),
    }
    return print_table(name_scores(found, figure) if as_json else found, as_json, columns)


def _format_clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@click.command(cls=Command)
@click.argument("device")
@click.argument("round_", metavar="[ROUND]", type=click.IntRange(0), required=False)
@HOME
@STORE
@JSON
def why(device: str, round_: int | None, home: Path, store: str | None, as_json: bool) -> int:
    """Explain the state of a device, and what it did in a round.

    Examples:
      fedge why cam7 --home shop
      fedge why cam7 12 --home shop

    Exit codes: 0, 2 no coordinator's folder or nobody has heard of such a device, 4 the store cannot be read.
    """
    with _open_watch(home, store) as watch:
        lines = watch.explain_device(device, round_)
    click.echo(
        json.dumps({"device": device, "round": round_, "why": lines})
        if as_json
        else "\n".join(map(escape_controls, lines))
    )
    return 0


@click.command(cls=Command)
@HOME
@STORE
@json_lines_option("event")
@option(
    "--follow",
    "-f",
    is_flag=True,
    heading=Heading.SELECTION,
    help="The command shows events as they come, until Ctrl-C.",
)
@option("--device", heading=Heading.SELECTION, help="Only events of this device are shown.")
@option(
    "--round",
    "round_",
    heading=Heading.SELECTION,
    type=click.IntRange(0),
    help="Only events of this round are shown.",
)
@last_option(50)
def events(
    home: Path, store: str | None, as_json: bool, follow: bool, device: str | None, round_: int | None, last: int
) -> int:
    """List what has happened, oldest first.

    Examples:
      fedge events --home shop --follow
      fedge events --home shop --device cam7 --last 200

    Exit codes: 0, 2 no coordinator's folder, 4 the store cannot be read, 130 stopped.
    """
    with contextlib.closing(open_store(home, store)) as found:
        new = found.get_events(device=device, round=round_, last=last)
        after = 0
        try:
            while True:
                for event in new:
                    after = event.number
                    click.echo(
                        json.dumps(make_event_values(event)) if as_json else _format_event(make_event_values(event))
                    )
                if not follow:
                    return 0
                time.sleep(LOOK_S)
                new = found.get_events(after=after, device=device, round=round_)
        except KeyboardInterrupt:
            return INTERRUPTED


def _format_event(event: dict[str, Any]) -> str:
    device = f"  {event['device']}" if event["device"] else ""
    name = event["name"].replace("_", " ")
    return escape_controls(f"{_format_clock(event['at'])}  round {event['round']}  {name}{device}  {event['text']}")


def _make_request_command(name: str, about: str, arguments: str = "") -> click.Command:
    """Make a command for one request to the coordinator, which checks for it before each round."""

    def send_request(home: Path, store: str | None, as_json: bool, device: str = "") -> int:
        with contextlib.closing(open_store(home, store)) as found:
            text = request_action(found, name, device)
        click.echo(json.dumps({"asked": name, "device": device, "text": text}) if as_json else text)
        return 0

    command: Any = HOME(STORE(JSON(send_request)))
    if arguments:
        command = click.argument("device")(command)
    codes = "Exit codes: 0, 2 no coordinator's folder or no such name, 4 the store cannot be written."
    text = f"{about}\n\nExamples:\n  fedge {name}{arguments} --home shop\n\n{codes}"
    return click.command(name, cls=Command, help=text)(command)


retire = _make_request_command(
    "retire",
    "Retire a device: from the next round on it gets no more orders. Its bundle goes on answering; `fedge provision "
    "revoke` locks it out.",
    " cam7",
)
readmit = _make_request_command("readmit", "Give a retired device orders again, from the next round on.", " cam7")
pause = _make_request_command("pause", "Begin no further round; the present one is finished.")
resume = _make_request_command("resume", "Begin rounds again.")
finish = _make_request_command(
    "finish", "End training with the present round: devices get bundles of what was learned until then."
)


class UiSettings(Struct, frozen=True, kw_only=True):
    """Section [ui] of the configuration."""

    home: Annotated[Path, Heading.FOLDERS, HOME_HELP]
    store: Annotated[Secret | None, Heading.FOLDERS, STORE_HELP] = None
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 8700
    token: Annotated[
        Secret | None,
        Heading.SERVER,
        "Who acts must show this token; by default it is that of HOME/ui-token, which is made.",
    ] = None
    rollouts: Annotated[
        str,
        Heading.SERVER,
        "The page shows the rollouts of these repositories of `fedge release`, comma-separated.",
    ] = ""
    http_cert_file: HttpCertificate = None
    http_key_file: HttpKey = None
    home_assistant: Annotated[
        Secret | None,
        Heading.SERVER,
        "The devices show up in Home Assistant, whose broker is at mqtt://USER:PASSWORD@HOST:PORT.",
    ] = None
    on_attention: OnAttention = None
    attention_webhook: AttentionWebhook = None
    members: Annotated[
        Path | None,
        Heading.SERVER,
        "By ca.crt, crl.pem and members.json of this folder, such as the coordinator's identity, `operator` acts and "
        "`status` looks with certificates.",
    ] = None


@click.command(cls=Command)
@settings_options(UiSettings, "ui")
@json_option()
def ui(config: Path | None, as_json: bool, **flags: object) -> int:
    """Show a federation in a browser, live: devices, clusters, rounds, accuracy, rollouts, events; and control it.

    The coordinator need not be running. On this machine everybody may look. To change anything, or to look from another
    machine, log in with the token in HOME/ui-token. /metrics is for Prometheus. A rollout that the page starts, by
    section [rollout] of --config, continues when the page ends.

    Examples:
      fedge ui --home shop
      fedge ui --home shop --rollouts releases --config fleet.toml
      fedge ui --home shop --host 0.0.0.0 --http-cert-file own.crt --http-key-file own.key --members server/coordinator

    Exit codes: 2 wrong usage, 3 the port is taken, 130 stopped.
    """
    settings = resolve(UiSettings, "ui", config, flags)
    asyncio.run(run_until_stopped(_serve_page(settings, as_json, config)))
    return INTERRUPTED


async def _serve_page(settings: UiSettings, as_json: bool, config: Path | None) -> None:
    async with make_page(settings, read_summary(settings.home)["federation"], config) as shown:
        text = f"{shown.url} shows the federation; the token to act is in {settings.home / 'ui-token'}"
        click.echo(json.dumps({"event": "page", "url": shown.url}) if as_json else text)
        async with notify(settings.home, "ui", settings.on_attention, settings.attention_webhook):
            await asyncio.Event().wait()


def make_page(settings: UiSettings, federation: str, config: Path | None) -> Page:
    """Make the page by the settings, not listening yet. `config`: of the rollouts that are started from it.

    Raises:
        ConfigError: fedge[ui] is not installed, or the certificate, the token or a repository is unusable.
    """
    try:
        from coordinator.page.certificates import Certificates
        from coordinator.page.logins import read_token
        from coordinator.page.server import Page
        from coordinator.rollout.overview import Overview
    except ModuleNotFoundError as error:
        raise ConfigError(f"a page needs {error.name}: pip install 'fedge[ui]'") from error
    members = settings.members
    ca_file = None if members is None else members / CA
    tls = make_server_tls(settings.token, settings.http_cert_file, settings.http_key_file, ca_file)
    return Page(
        settings.home,
        partial(Store, settings.home, settings.store, federation=federation, intake=True),
        host=settings.host,
        port=settings.port,
        token=read_token(settings.home, settings.token),
        tls=tls,
        rollouts=Overview(
            [Path(repo.strip()) for repo in settings.rollouts.split(",") if repo.strip()], config, settings.home
        ),
        certificates=None if members is None else Certificates(members, federation),
        home_assistant=settings.home_assistant,
    )
