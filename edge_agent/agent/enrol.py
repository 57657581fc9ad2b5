"""`fedge enrol`: turns a machine into the device named in its start-up kit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import click
import msgspec
from cryptography import x509

from fedge.errors import ConfigError, raise_as
from fedge.identity import certificates
from fedge.identity.certificates import (
    encode_key,
    encode_pem,
    load_certificate,
    load_key,
    make_certificate_request,
    make_key,
)
from fedge.identity.names import find_subject
from fedge.membership.credentials import CA, CERTIFICATE, KEY
from fedge.membership.kit import MAX_BYTES, Kit, unseal_kit
from fedge.settings import read_section
from fedge.system import systemd
from fedge.system.files import write_atomically
from fedge.system.help import Command, json_option, option
from fedge.system.loading import find_code
from fedge.system.text import Heading

FOLDER: Final = Path("/etc/fedge")
HOME: Final = Path("/var/lib/fedge")
"""Folder of an agent that runs as a service."""
IDENTITY: Final = "identity"
CONFIG: Final = "agent.toml"
TASK: Final = "task.json"


@click.command(cls=Command)
@click.argument("kit", type=click.Path(path_type=Path), required=False)
@option(
    "--request",
    "device_id",
    heading=Heading.MEMBERS,
    metavar="ID",
    help="The command makes a key here, and ID.csr for `fedge provision device --request`.",
)
@option(
    "--data",
    heading=Heading.TASK,
    type=click.Path(path_type=Path),
    help="These are the agent's samples: an .npz or a folder.",
)
@option(
    "--task",
    heading=Heading.TASK,
    help="The agent has this task, as for `fedge agent`; by default it is that of the kit.",
)
@option(
    "--folder",
    heading=Heading.MEMBERS,
    type=click.Path(path_type=Path, file_okay=False),
    default=FOLDER,
    show_default=True,
    help="This folder gets identity and configuration. Only with the default folder the agent becomes a service.",
)
@json_option()
def enrol(
    kit: Path | None, device_id: str | None, data: Path | None, task: str | None, folder: Path, *, as_json: bool
) -> None:
    """Make this machine the device that a start-up kit names (`fedge provision device`); "-" reads it from a pipe.

    The command writes FOLDER/identity and FOLDER/agent.toml, the configuration of `fedge agent`; an existing one stays
    unchanged. As root under systemd it also makes the agent a service of the user fedge, and starts it. A kit names no
    code.

    Examples:
      fedge enrol /media/stick/cam1.kit --task digits --data /srv/cam1.npz
      fedge enrol cam1.kit --folder ./cam1 --data photos
      fedge enrol --request cam1

    Exit codes: 0 done, 2 there is no DATA, or the kit is damaged, expired, of another federation or another device than
    this one, or for a key that is not here, 4 a file cannot be written.
    """
    if (kit is None) == (device_id is None):
        raise click.UsageError("give a start-up kit, or --request ID")
    if device_id is not None:
        request = make_request(folder / IDENTITY, device_id)
        return _print_result(
            f"take it to the server: fedge provision device --request {request}", {"request": str(request)}, as_json
        )
    assert kit is not None
    if data is not None and not data.exists():
        raise ConfigError(f"there is no {data}: bring the samples first, or leave out --data")
    with raise_as(ConfigError, str(kit), on=ConfigError):
        found = unseal_kit(_read(kit))
        write_identity(found, folder / IDENTITY)
    config = configure_agent(found, folder, data, task)
    missing = {"task", "data"} - read_section(config, "agent").keys()
    command = f"agent --config {config}"
    if code := find_code(task or ""):  # a file may name it only if the command line allows it
        command += f" --allow {','.join(code)}"
    started = folder == FOLDER and systemd.RUNNING.exists() and not missing and start_services(folder, command)
    how = "the agent runs: journalctl -u fedge-agent" if started else f"now: fedge {command}"
    how = f"write {' and '.join(sorted(missing))} into {config}" if missing else how
    fields = {"id": found.id, "federation": found.federation, "config": str(config), "started": started}
    return _print_result(f"this is {found.id} of {found.federation}; {how}", fields, as_json)


def _read(kit: Path) -> bytes:
    try:
        with sys.stdin.buffer if str(kit) == "-" else kit.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from error


def make_request(identity: Path, device_id: str) -> Path:
    """Make a key, or reuse the key of an earlier request, and write ID.csr into the current folder.

    Raises:
        ConfigError: the machine is a device already, or the name is not allowed.
    """
    certificates.make_device_subject("", device_id)
    if (identity / CERTIFICATE).exists():
        raise ConfigError(f"{identity} holds a certificate already: its agent renews it by itself")
    if not (identity / KEY).exists():
        write_atomically(identity / KEY, encode_key(make_key()))
    file = Path(f"{device_id}.csr")
    write_atomically(file, encode_pem(make_certificate_request(device_id, load_key(identity / KEY))))
    return file


def write_identity(kit: Kit, identity: Path) -> None:
    """Write the identity in a kit.

    Raises:
        ConfigError: the machine is another device, its certificate is newer, or the kit is for another key.
    """
    certificate = x509.load_pem_x509_certificate(kit.certificate.encode())
    if (identity / CERTIFICATE).exists():
        _refuse_other(kit, certificate, identity)
    key = kit.key.encode() if kit.key is not None else None
    there = (identity / KEY).exists()
    if key is None and not (there and load_key(identity / KEY).public_key() == certificate.public_key()):
        raise ConfigError(f"it answers the request of a key that is not in {identity}: enrol where that was made")
    write_atomically(identity / CA, kit.ca.encode())
    if key is not None:
        write_atomically(identity / KEY, key)
    write_atomically(identity / CERTIFICATE, kit.certificate.encode())


def _refuse_other(kit: Kit, certificate: x509.Certificate, identity: Path) -> None:
    """Refuse to make a machine another device, unless its owner deletes the folder."""
    present = load_certificate(identity / CERTIFICATE)
    subject = find_subject(present)
    otherwise = f"to make it another one, delete {identity} first"
    if subject != find_subject(certificate):
        raise ConfigError(f"this machine is {subject}, and the kit is for {kit.id} of {kit.federation}; {otherwise}")
    if (identity / CA).read_bytes() != kit.ca.encode():
        raise ConfigError(
            f"it is by another authority of the name {kit.federation} than this machine trusts; {otherwise}"
        )
    if certificates.get_validity(present)[1] > certificates.get_validity(certificate)[1]:
        raise ConfigError(f"the certificate in {identity} is newer; {otherwise}")


def configure_agent(kit: Kit, folder: Path, data: Path | None, task: str | None) -> Path:
    """Write the agent's configuration unless there is one; return its file.

    Raises:
        StoreError: the configuration cannot be written.
    """
    file = folder / CONFIG
    if kit.task is not None and task is None:
        systemd.write_public(folder / TASK, msgspec.json.format(msgspec.json.encode(kit.task)).decode())
        task = str((folder / TASK).absolute())
    settings = {
        "broker": kit.broker,
        "federation": kit.federation,
        "topic_prefix": kit.topic_prefix,
        "client_prefix": kit.client_prefix,
        "id": kit.id,
        "identity": str((folder / IDENTITY).absolute()),
        "home": str(HOME if folder == FOLDER else (folder / "home").absolute()),
        "task": task,
        "data": None if data is None else str(data.absolute()),
    }
    if not file.exists():
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if value is not None]
        head = ["# Made by `fedge enrol`; `fedge agent --help` lists all settings.", "[agent]"]
        systemd.write_public(file, "\n".join([*head, *lines, ""]))
    return file


def start_services(folder: Path, command: str) -> bool:
    """Install agent and runtime as services and start the agent; the runtime has no bundle to serve yet.

    `command`: the agent's command, after "fedge".

    Raises:
        ConfigError, StoreError: a service cannot be set up.
    """
    identity = folder / IDENTITY
    systemd.give_to(identity, systemd.make_user())
    unit = systemd.format_unit("agent", systemd.AGENT, command, "agent", identity)
    systemd.write_public(systemd.UNITS / "fedge-agent.service", unit)
    runtime = systemd.format_unit("runtime", systemd.RUNTIME, f"serve --home {HOME}", "serve")
    systemd.write_public(systemd.UNITS / "fedge-serve.service", runtime)
    systemd.run("systemctl", "daemon-reload")
    systemd.run("systemctl", "enable", "fedge-agent")
    systemd.run("systemctl", "restart", "--no-block", "fedge-agent")  # ready only after the broker has let it in
    return True


def _print_result(text: str, record: dict[str, object], as_json: bool) -> None:
    click.echo(json.dumps(record) if as_json else text)
