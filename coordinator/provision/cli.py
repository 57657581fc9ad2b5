"""`fedge provision`: manages a federation's members and the credentials of its machines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from coordinator.provision import installation
from coordinator.provision.issuer import PARTS, Federation, Issuer
from coordinator.provision.renewals import answer_requests
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.identity import certificates
from fedge.identity.certificates import make_key, read_request
from fedge.identity.names import CRL, Role
from fedge.membership.kit import SUFFIX, refuse_code
from fedge.settings import resolve_given
from fedge.system import systemd
from fedge.system.files import write_atomically
from fedge.system.help import CommandGroup, json_option, option
from fedge.system.text import Heading

FOLDER: Final = Path("/etc/fedge")

_folder = option(
    "--folder",
    heading=Heading.MEMBERS,
    type=click.Path(path_type=Path, file_okay=False),
    default=FOLDER,
    show_default=True,
    help="This folder holds the federation's authority and the server's certificates.",
)
_json = json_option()


@click.group(cls=CommandGroup)
def provision() -> None:
    """Make the certificates of a federation, so that nobody gets in who does not belong.

    FOLDER/ca.key is the federation's authority: who has it can let in anyone. Only these commands read it; broker and
    coordinator do not. docs/security-setup.md goes through it all.

    Examples:
      fedge provision init workshop edge-server.local
      fedge provision broker
      fedge provision device cam1 --to /media/stick
      fedge provision revoke cam1

    Exit codes: 0 done, 2 wrong usage, no such member, or one of that name is there, 3 the broker cannot be reached, 4 a
    file cannot be written.
    """


@provision.command()
@click.argument("federation")
@click.argument("host")
@option(
    "--port",
    heading=Heading.BROKER,
    type=click.IntRange(1, 65535),
    default=8883,
    show_default=True,
    help="The broker listens on this port.",
)
@option(
    "--days",
    heading=Heading.MEMBERS,
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="Certificates are good for this many days.",
)
@option(
    "--topic-prefix",
    heading=Heading.MEMBERS,
    help="This text stands before all topics of the federation; the access list has it, too.",
)
@option("--client-prefix", heading=Heading.MEMBERS, help="This text stands before all client ids of the federation.")
@_folder
@_json
def init(
    federation: str,
    host: str,
    port: int,
    days: int,
    topic_prefix: str | None,
    client_prefix: str | None,
    folder: Path,
    *,
    as_json: bool,
) -> None:
    """Found a federation: its authority, and the certificates of broker, coordinator, `status` and `rollout`.

    HOST is the name or address by which the devices reach the broker; its certificate is for that, and for localhost.
    FOLDER/coordinator.toml is written for `fedge coordinator --config`.

    Examples:
      fedge provision init workshop edge-server.local
      fedge provision init workshop 192.168.1.5 --port 8884 --folder ./workshop

    Exit codes: 0 done, 2 wrong usage, or FOLDER holds a federation, 4 a file cannot be written.
    """
    given_here = {"federation": federation, "host": host, "port": port, "days": days}
    prefixes = {"topic_prefix": topic_prefix, "client_prefix": client_prefix}
    settings = resolve_given(Federation, given_here | prefixes)
    issuer = Issuer.make(folder, settings)
    systemd.write_public(folder / "coordinator.toml", _format_coordinator_toml(issuer))
    _print_result(
        f"{federation} is founded in {folder}", {"federation": federation, "folder": str(folder)}, as_json=as_json
    )


def _format_coordinator_toml(issuer: Issuer) -> str:
    folder = issuer.folder.absolute()
    home = Path("/var/lib/fedge-coordinator") if issuer.folder == FOLDER else folder / "home"
    settings = {
        "broker": issuer.settings.broker,
        "federation": issuer.settings.federation,
        "topic_prefix": issuer.settings.topic_prefix,
        "client_prefix": issuer.settings.client_prefix,
        "identity": str(folder / Role.COORDINATOR),
        "home": str(home),
    }
    lines = ["# Made by `fedge provision init`; `fedge coordinator --help` lists all settings.", "[coordinator]"]
    return "\n".join([*lines, *(f"{name} = {json.dumps(value)}" for name, value in settings.items() if value), ""])


@provision.command()
@click.argument("name", type=click.Choice([role.value for role in PARTS]))
@_folder
@_json
def server(name: str, folder: Path, *, as_json: bool) -> None:
    """Give a part of the server a new key and certificate, in FOLDER/NAME.

    `init` does so for those that each federation has. Afterwards it is for one that was revoked.

    Examples:
      fedge provision server status
      fedge provision revoke coordinator && fedge provision server coordinator

    Exit codes: 0 done, 2 no federation there, or the certificate of that name is good, 4 a file cannot be written.
    """
    issuer = Issuer(folder)
    issuer.equip(Role(name))
    how = f"; {installation.restart_broker(issuer)}" if name == Role.BROKER else ""
    _print_result(f"{folder / name} has a new certificate{how}", {"identity": str(folder / name)}, as_json=as_json)


@provision.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@option(
    "--request",
    "requests",
    heading=Heading.MEMBERS,
    type=click.Path(path_type=Path),
    multiple=True,
    help="This file is what `fedge enrol --request` has made on a device, whose key then never leaves it.",
)
@option(
    "--to",
    heading=Heading.FOLDERS,
    type=click.Path(path_type=Path),
    default=Path(),
    help="The kits are written to this folder.",
)
@option(
    "--task",
    heading=Heading.TASK,
    type=click.Path(path_type=Path),
    help="The kits hold this task.json.",
)
@_folder
@_json
def device(
    ids: tuple[str, ...], requests: tuple[Path, ...], to: Path, task: Path | None, folder: Path, *, as_json: bool
) -> None:
    """Make the start-up kits of devices: one file each, ID.kit, for `fedge enrol`.

    ID is the device's name in the federation. Whoever reads a kit can speak for its device: carry it on a medium of
    your own, and delete it afterwards. A kit that answers a --request holds no key.

    Examples:
      fedge provision device cam1 cam2 --to /media/stick
      fedge provision device cam1 --task /var/lib/fedge-coordinator/task.json
      fedge provision device --request cam3.csr

    Exit codes: 0 done, 2 no federation there, a device cannot be called so, or one of that name has a certificate, 4 a
    file cannot be written.
    """
    if not ids and not requests:
        raise click.UsageError("name the devices, or give their requests")
    if not to.is_dir():
        raise ConfigError(f"there is no folder {to} for the kits")
    issuer = Issuer(folder)
    description = None if task is None else _read_task(task)
    kits = []
    for name, key, public in _iterate_keys(ids, requests):
        subject = certificates.make_device_subject(issuer.settings.federation, name)
        kits.append(to / f"{name}{SUFFIX}")
        write_atomically(kits[-1], issuer.make_kit(issuer.enlist(subject, public), key, description))
    _print_result("\n".join(map(str, kits)), {"kits": list(map(str, kits))}, as_json=as_json)


@provision.command()
@click.argument("site")
@option(
    "--to",
    heading=Heading.FOLDERS,
    type=click.Path(path_type=Path),
    default=Path(),
    help="The folder SITE is made in this folder.",
)
@_folder
@_json
def relay(site: str, to: Path, folder: Path, *, as_json: bool) -> None:
    """Make the identity of a site's relay: the folder SITE, for `fedge relay --identity`.

    Its certificate lets it speak for the devices of its site, and give orders to nobody. The site has an authority of
    its own, by `fedge provision init` on the relay's machine, and the relay is its coordinator. Devices of other sites,
    and those above, take no order from it.

    Examples:
      fedge provision relay north --to /media/stick

    Exit codes: 0 done, 2 no federation there, or one of that name has a certificate, 4 a file cannot be written.
    """
    issuer = Issuer(folder)
    issuer.equip_relay(site, to / site)
    _print_result(f"{to / site} is the identity of relay {site}", {"identity": str(to / site)}, as_json=as_json)


def _iterate_keys(ids: tuple[str, ...], requests: tuple[Path, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over name and public key of each device, and its private key if we make it."""
    for name in ids:
        key = make_key()
        yield name, key, key.public_key()
    for file in requests:
        with raise_as(ConfigError, f"{file} cannot be read"):
            name, public = read_request(file.read_bytes())
        yield name, None, public


def _read_task(file: Path) -> TaskSpec:
    """Read the description of a task for a kit.

    Raises:
        ConfigError: not a task, or it names code.
    """
    with raise_as(ConfigError, f"{file} is no description of a task", on=(OSError, RecursionError, ValueError)):
        task = msgspec.json.decode(file.read_bytes(), type=TaskSpec)
    refuse_code(task)
    return task


@provision.command()
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@_folder
@_json
def revoke(names: tuple[str, ...], folder: Path, *, as_json: bool) -> None:
    """Shut out whose certificate was lost or stolen: a device, or a part of the server.

    The broker starts anew, which cuts all connections; the others are back within seconds. Where Mosquitto is no
    service of systemd you start it anew yourself. The coordinator takes nothing more from the revoked. A new kit enrols
    a device of that name again.

    Examples:
      fedge provision revoke cam1
      fedge provision revoke coordinator

    Exit codes: 0 done, 2 no federation or no such member there, or the broker does not start, 4 a file cannot be
    written.
    """
    issuer = Issuer(folder)
    for name in names:
        issuer.revoke(name)
    how = installation.restart_broker(issuer)
    _print_result(f"revoked: {', '.join(names)}; {how}", {"revoked": names, "broker": how}, as_json=as_json)


@provision.command()
@_folder
@_json
def renew(folder: Path, *, as_json: bool) -> None:
    """Renew what is past two thirds of its life, and answer the devices that ask for it; to be run daily.

    `fedge provision broker` has systemd do so. Agents ask by themselves, over the broker, with the key that they have.
    A device that was off until its certificate expired needs a new kit.

    Examples:
      fedge provision renew

    Exit codes: 0 done, 2 no federation there, 3 the broker cannot be reached: the server's are renewed, the devices'
    not, 4 a file cannot be written.
    """
    issuer = Issuer(folder)
    renewed = issuer.refresh()
    how = f"; {installation.restart_broker(issuer)}" if {Role.BROKER, CRL} & set(renewed) else ""
    devices = asyncio.run(answer_requests(issuer))
    names = ", ".join([*renewed, *devices]) or "nothing was due"
    _print_result(f"renewed: {names}{how}", {"renewed": renewed, "devices": devices}, as_json=as_json)


@provision.command()
@_folder
@_json
def broker(folder: Path, *, as_json: bool) -> None:
    """Have this machine's Mosquitto serve the federation, as it is installed on Debian; run it as root.

    The command writes /etc/mosquitto/conf.d/fedge-FEDERATION.conf and FOLDER/broker/acl, and starts Mosquitto anew with
    its key. Under systemd it also makes the coordinator a service of the user fedge (systemctl start
    fedge-coordinator), and has `fedge provision renew` run daily. Otherwise you start Mosquitto anew yourself, or use
    `fedge broker --identity FOLDER/broker`.

    Examples:
      fedge provision broker

    Exit codes: 0 done, 2 no federation there, Mosquitto is not installed or does not start, 4 a file cannot be written.
    """
    issuer = Issuer(folder)
    file = installation.configure_broker(issuer)
    if systemd.RUNNING.exists():
        installation.install_services(issuer)
    how = installation.restart_broker(issuer)
    settings = issuer.settings
    fields = {"broker": settings.broker, "conf": str(file)}
    _print_result(f"{file} is for {settings.federation} at {settings.broker}; {how}", fields, as_json=as_json)


def _print_result(text: str, record: Mapping[str, object], *, as_json: bool) -> None:
    click.echo(json.dumps(record) if as_json else text)
