"""`fedge doctor`: diagnoses problems of an agent, a coordinator or a runtime on this machine and suggests remedies."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Literal

import click
import msgspec
import psutil
from msgspec import Struct

import fedge
from fedge.errors import ConfigError, FedgeError, ProtocolError, TransportError
from fedge.identity.names import Role, Subject
from fedge.identity.tls import make_client_tls
from fedge.membership.credentials import CERTIFICATE, Broker, Credentials, DeviceName, FederationName
from fedge.membership.signed_messages import make_speaker
from fedge.settings import read_section, resolve, settings_options
from fedge.system import child
from fedge.system.help import Command, json_option
from fedge.system.text import Heading, escape_controls, format_address
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.connection.refusals import OTHER_NAME
from fedge.wire.connection.route import ProxyError, open_socket
from fedge.wire.messages import BEACON_S, Beacon, decode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

PATIENCE_S: Final = 10.0
TORCH_S: Final = 60.0
"""Time limit for importing torch; a board with an SD card needs most of a minute for the first import."""
SMALL_DISK: Final = 200e6
AGENT_GB: Final = 0.29
"""Memory of an agent and its process that trains a small network: the sum of their PSS (`benchmarks/at_rest.py`)."""
SLOW_FSYNC_S: Final = 0.5

RETAINED_S: Final = 1.0
"""Time limit within which a broker passes on its retained messages."""
BEHIND_S: Final = 5.0
"""Seconds by which a clock may be behind the coordinator's."""
SILENT_S: Final = 3 * BEACON_S
"""Seconds without a beacon after which the coordinator counts as stopped."""
OUT_OF_DATE: Final = 10
"""OpenSSL's error code for an expired certificate."""
OLDER_RULES: Final = (
    "a broker provisioned by an earlier fedge keeps it from devices: run `fedge provision broker` there again"
)

State = Literal["ok", "warning", "bad", "skipped"]


class Finding(Struct, frozen=True, omit_defaults=True):
    """A finding and what to `do` about it. In state "skipped" nothing was examined, and `found` says why."""

    check: str
    state: State
    found: str
    do: str = ""


class DoctorSettings(Credentials, frozen=True, kw_only=True):
    """Section [doctor] of the configuration."""

    role: Annotated[
        Literal["agent", "coordinator", "serve"], Heading.RUNS, "The section of this role in the configuration counts."
    ] = "agent"
    broker: Broker | None = None
    federation: FederationName | None = None
    id: DeviceName | None = None
    home: Annotated[
        Path | None, Heading.FOLDERS, "This is the folder of the agent, the coordinator or the runtime."
    ] = None


@click.command(cls=Command)
@settings_options(DoctorSettings, "doctor")
@json_option()
def doctor(config: Path | None, as_json: bool, **flags: object) -> int:
    """Find out what is wrong on this machine, and what to do.

    The command checks versions, clock, memory, torch, ONNX Runtime, disk, certificates and broker, and compares clock
    and version with the coordinator's. It changes nothing. What it could not check reads "skipped", with the setting
    that is missing.

    Examples:
      fedge doctor --config /etc/fedge/agent.toml
      fedge doctor --role coordinator --config edge_server.toml
      fedge doctor --broker server:8883 --federation shop --id cam1 --identity /etc/fedge/identity --json

    Exit codes: 0 nothing is bad, 1 something is, 2 wrong usage or configuration.
    """
    own = resolve(DoctorSettings, "doctor", config, flags)
    configured = {k: v for k, v in read_section(config, own.role).items() if k in DoctorSettings.__struct_fields__}
    given = {name: value for name, value in flags.items() if value is not None}
    settings = resolve(DoctorSettings, "doctor", config, configured | given)
    found = [
        *diagnose_machine(),
        *diagnose_home(settings.home),
        *diagnose_certificates(settings),
        *diagnose_broker(settings),
    ]
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        for finding in found:
            click.echo(escape_controls(f"{finding.state:<8}{finding.check:<14}{finding.found}"))
            if finding.do:
                click.echo(escape_controls(f"{'':<22}-> {finding.do}"))
    return 1 if any(finding.state == "bad" for finding in found) else 0


# -------------------------------------------------------------------------------------------------- the machine


def diagnose_machine() -> Iterator[Finding]:
    """Check versions, clock, memory, torch and ONNX Runtime."""
    system = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} processors"
    yield Finding("versions", "ok", f"fedge {fedge.__version__}, {system}")
    yield _diagnose_clock()
    free = psutil.virtual_memory().available
    if free < AGENT_GB * 1e9:
        do = f"training a small network takes {AGENT_GB} GB: end other programs, or take --inference-only"
        yield Finding("memory", "warning", f"{free / 1e9:.2f} GB are free", do)
    else:
        yield Finding("memory", "ok", f"{free / 1e9:.2f} GB are free")
    yield _diagnose_torch()
    yield from _diagnose_onnxruntime()


def _diagnose_clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if shutil.which("timedatectl") is None:
        return Finding("clock", "ok", f"{now}; without timedatectl it is unknown whether the network sets it")
    asked = subprocess.run(
        ["timedatectl", "show", "-p", "NTPSynchronized", "--value"], capture_output=True, text=True, check=False
    )
    if asked.stdout.strip() == "no":
        do = "run `timedatectl set-ntp true` and wait, since certificates are not valid by a wrong clock"
        return Finding("clock", "warning", f"{now}; not set by the network", do)
    return Finding("clock", "ok", now)


def _diagnose_torch() -> Finding:
    if find_spec("torch") is None:
        return Finding("torch", "ok", "not installed: this device predicts, and does not train")
    try:
        return Finding(
            "torch",
            "ok",
            child.call_once("fedge.models.torchvision_ops:describe_torch", returns=str, timeout_s=TORCH_S),
        )
    except (ConfigError, TimeoutError) as error:
        do = "see docs/devices.md for the torch that runs on this board; install it with -c constraints.txt"
        return Finding("torch", "bad", f"cannot be imported: {error}", do)


def _diagnose_onnxruntime() -> Iterator[Finding]:
    if find_spec("onnxruntime") is None:
        yield Finding("onnxruntime", "bad", "not installed", "pip install 'fedge[deploy]'")
        return
    try:
        works, fails, wheels = child.call_once(
            "fedge.commands.doctor:find_providers", returns=tuple[list[str], list[str], list[str]], timeout_s=TORCH_S
        )
    except (ConfigError, TimeoutError) as error:
        yield Finding("onnxruntime", "bad", f"cannot be run: {error}", "reinstall it: pip install 'fedge[deploy]'")
        return
    if len(wheels) > 1:
        do = "keep one: pip uninstall both, install one (docs/devices.md)"
        yield Finding("onnxruntime", "bad", f"two wheels overwrite each other's files: {', '.join(wheels)}", do)
    yield Finding("onnxruntime", "ok", f"{', '.join(wheels)}; runs on {', '.join(works)}")
    if fails:
        do = "its libraries are missing (CUDA, cuDNN, TensorRT), or there is no such device"
        yield Finding("onnxruntime", "warning", f"does not run on {', '.join(fails)}, which this build has", do)


def find_providers() -> tuple[list[str], list[str], list[str]]:
    """Return the execution providers that work, those that do not, and the installed wheels."""
    from fedge.bundle.runtime import find_active_providers, find_wheels, make_session_options, onnxruntime

    there = [p for p in onnxruntime.get_available_providers() if p != "AzureExecutionProvider"]  # an online service
    options = make_session_options(Path())
    works = [
        p
        for p in there
        if p in find_active_providers(onnxruntime.InferenceSession(_make_relu(), options, providers=[p]))
    ]
    return works, [p for p in there if p not in works], list(find_wheels())


def _make_relu() -> bytes:
    """Build a minimal ONNX graph, encoded in protobuf: y = Relu(x) for one number x."""

    def encode_part(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    kind = encode_part(1, b"\x08\x01" + encode_part(2, encode_part(1, b"\x08\x01")))  # float32, shape (1,)
    ends = [encode_part(1, name) + encode_part(2, kind) for name in (b"x", b"y")]
    node = encode_part(1, b"x") + encode_part(2, b"y") + encode_part(4, b"Relu")
    graph = encode_part(1, node) + encode_part(2, b"g") + encode_part(11, ends[0]) + encode_part(12, ends[1])
    return b"\x08\x08" + encode_part(7, graph) + encode_part(8, b"\x10\x11")


# ----------------------------------------------------------------------------------------------------- the home


def diagnose_home(home: Path | None) -> Iterator[Finding]:
    """Check whether the home's disk accepts writes, and how fast."""
    if home is None:
        yield Finding("disk", "skipped", "no home is given", "give --home")
        return
    if not home.is_dir():
        yield Finding("disk", "bad", f"{home} is no folder", "give the --home that the service has, or start it once")
        return
    disk = os.statvfs(home)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_files and disk.f_favail < max(100, disk.f_files // 100):
        do = "delete small files there: `du --inodes -d1` tells where they are"
        yield Finding("disk", "bad", f"{home} has room for {disk.f_favail} more files", do)
    if free < SMALL_DISK:
        do = "delete what is not needed or take a larger disk, since nothing is accepted that cannot be kept"
        yield Finding("disk", "bad", f"{free / 1e6:.0f} MB are free in {home}", do)
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(bytes(100_000))
            began = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
    except OSError as error:
        do = "run the doctor as the user of the service; mount it for writing; a disk that turned read-only is worn out"
        yield Finding("disk", "bad", f"{home} cannot be written: {error.strerror}", do)
        return
    text = f"{free / 1e9:.1f} GB are free in {home}; 0.1 MB are safe after {1e3 * seconds:.0f} ms"
    slow = "each order and each report waits for it; take another SD card, or an SSD" if seconds > SLOW_FSYNC_S else ""
    yield Finding("disk", "warning" if slow else "ok", text, slow)


# ---------------------------------------------------------------------------------------------- the certificates


def diagnose_certificates(settings: DoctorSettings) -> Iterator[Finding]:
    """Check validity, authority and name of our certificate, and the revocation list's age."""
    if settings.identity is None and settings.cert_file is None:
        yield Finding("certificates", "skipped", "none are given", "give --identity, if the federation has any")
        return
    try:
        files = settings.with_files()
        assert files.ca_file is not None
        assert files.cert_file is not None
        make_client_tls(files.ca_file, files.cert_file, files.key_file)
        yield from _diagnose_certificates(settings, Path(files.ca_file), Path(files.cert_file))
    except ConfigError as error:
        do = f"{CERTIFICATE} and the others come from `fedge enrol` or `fedge provision`"
        yield Finding("certificates", "bad", str(error), do)


def _diagnose_certificates(settings: DoctorSettings, ca_file: Path, cert_file: Path) -> Iterator[Finding]:
    from fedge.identity.certificates import get_time, get_validity, is_issued_by, list_overdue, load_certificate
    from fedge.identity.names import find_subject

    own, at = load_certificate(cert_file), get_time()
    begin, end = get_validity(own)
    if not is_issued_by(own, load_certificate(ca_file)):
        yield Finding(
            "certificates", "bad", f"{cert_file} is not of the authority in {ca_file}", "enrol this machine anew"
        )
    if at < begin:
        do = "set the clock of this machine: it is behind that of the authority"
        yield Finding(
            "clock", "bad", f"the certificate counts from {begin:%Y-%m-%d %H:%M} UTC on, which is to come", do
        )
    subject = find_subject(own)
    if subject is not None and settings.federation not in {None, subject.federation}:
        do = f"set federation = {subject.federation!r}, or enrol this machine in the other one"
        yield Finding("certificates", "bad", f"{cert_file} is of {subject}, not of {settings.federation}", do)
    if subject is not None and settings.role == "agent" and settings.id not in {None, subject.name}:
        yield Finding(
            "certificates", "bad", f"{cert_file} names {subject.name}, not {settings.id}", f"set id = {subject.name!r}"
        )
    for text in list_overdue(ca_file, cert_file, at):
        problem, _, do = text.rpartition(": ")
        yield Finding("certificates", "bad" if "expired on" in problem else "warning", problem, do)
    yield Finding("certificates", "ok", f"{cert_file}: {subject or 'somebody'}, until {end:%Y-%m-%d}")


# ---------------------------------------------------------------------------------------------------- the broker


def diagnose_broker(settings: DoctorSettings) -> Iterator[Finding]:
    """Check that the broker is reachable, authentic and lets us work, and compare us with the coordinator."""
    if settings.broker is None:
        yield Finding("broker", "skipped", "no broker is given", "give --broker")
        return
    try:
        broker = settings.make_broker_settings(settings.broker)
    except ConfigError as error:
        yield Finding("broker", "bad", str(error))
        return
    where = format_address(broker.host, broker.port)
    try:
        _try_connection(broker)
    except ssl.SSLCertVerificationError as error:
        do = "give --ca-file the authority that made the broker's certificate"
        if error.verify_code in OTHER_NAME:
            do = "call the broker by a name that its certificate has, or provision it with this one (--host)"
        elif error.verify_code == OUT_OF_DATE:
            do = "its certificate is out of date, or this clock is wrong: `fedge provision renew` on the server"
        yield Finding("broker", "bad", f"{where} is not who it should be: {error.verify_message}", do)
        return
    except ssl.SSLError as error:
        do = "is it the port for TLS (8883)? Without certificates take 1883, and no --identity"
        yield Finding("broker", "bad", f"{where} does not speak TLS with us: {error.reason or error}", do)
        return
    except ProxyError as error:
        yield Finding("broker", "bad", f"{where} cannot be reached: {error}", "see --proxy, and who runs it")
        return
    except OSError as error:
        do = "is it started, is the address right, does a firewall stand between?"
        yield Finding("broker", "bad", f"{where} cannot be reached: {error.strerror or error}", do)
        return
    yield from asyncio.run(_try_messages(settings, broker, where))


def _try_connection(broker: BrokerSettings) -> None:
    at = broker.address
    with open_socket(at.host, at.port, broker.proxy, PATIENCE_S) as tcp:
        if (context := broker.make_tls()) is not None:
            context.wrap_socket(tcp, server_hostname=at.name).close()


async def _try_messages(settings: DoctorSettings, broker: BrokerSettings, where: str) -> list[Finding]:
    """Log in under an unused client id, subscribe, publish to an unused topic, and wait for the beacon."""
    topics, me = Topics(settings.federation or "doctor"), settings.id or "doctor"
    listen, speak = ("orders", "predictions") if settings.role != "coordinator" else ("status", "acks")
    do = "see there, the broker's log, and docs/operating.md, Brokers of others; is our certificate revoked?"
    transport = Transport(broker, topics.make_client_id("status", f"doctor-{me}"), session_expiry_s=0)
    try:
        async with asyncio.timeout(PATIENCE_S), transport:
            do = "see the access list of the broker: docs/security-setup.md has what each role needs"
            if settings.federation is not None:
                await transport.subscribe(topics.make_agent_topic(me, listen), _ignore_message)
                await transport.publish(topics.make_agent_topic(me, speak), b"")
            heard = await _diagnose_coordinator(settings, broker, transport)
    except TimeoutError:
        return [Finding("broker", "bad", f"{where} does not answer in MQTT", "is it a broker, and this its port?")]
    except (FedgeError, BaseExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(first, TransportError):
            raise
        return [Finding("broker", "bad", str(first), do)]
    rights = ", and our topics are open to us" if settings.federation is not None else ""
    return [Finding("broker", "ok", f"{where} lets us in, MQTT {transport.protocol}{rights}"), *heard]


async def _ignore_message(_: object) -> None:
    """Ignore a message."""


# ----------------------------------------------------------------------------------------------- the coordinator


async def _diagnose_coordinator(
    settings: DoctorSettings, broker: BrokerSettings, transport: Transport
) -> list[Finding]:
    """Compare our time and version with those in the coordinator's retained beacon."""
    if settings.role == "coordinator":
        return []
    if settings.federation is None or settings.id is None:
        return [Finding("coordinator", "skipped", "federation or id is not given", "give --federation and --id")]
    topics = Topics(settings.federation)
    heard: asyncio.Future[Inbound] = asyncio.get_running_loop().create_future()

    async def handle_beacon(inbound: Inbound) -> None:
        if not heard.done():
            heard.set_result(inbound)

    try:
        signed = make_speaker(broker, Subject(settings.federation, Role.DEVICE, settings.id), None)
        await transport.subscribe(topics.beacon, handle_beacon)
        async with asyncio.timeout(RETAINED_S):
            inbound = await heard
        payload = signed.open(topics.beacon, inbound.payload, Role.COORDINATOR)
        return [*compare_beacon(decode_message(payload, Beacon), time.time())]
    except TimeoutError:
        text = f"nothing was heard of one of {settings.federation}, so clock and version are not compared"
        return [Finding("coordinator", "warning", text, f"start it, or update it; {OLDER_RULES}")]
    except TransportError as error:
        return [Finding("coordinator", "warning", f"the broker does not let us hear it: {error}", OLDER_RULES)]
    except (ConfigError, ProtocolError) as error:
        do = "see the certificates above; somebody else may speak in its name"
        return [Finding("coordinator", "bad", f"what it says cannot be trusted: {error}", do)]


def compare_beacon(beacon: Beacon, now: float) -> Iterator[Finding]:
    """Compare the coordinator's clock and version with ours at `now`, in seconds since the epoch.

    The beacon may be a minute old, so a clock that is ahead by less than a minute is not found.
    """
    age_s = now - beacon.at
    if age_s < -BEHIND_S:
        do = "set the wrong one by the network (`timedatectl set-ntp true`)"
        yield Finding("clock", "bad", f"this clock is {-age_s:.0f} s or more behind the coordinator's", do)
    elif age_s > SILENT_S:
        do = "start the coordinator; if it runs, this clock is ahead: set it by the network"
        yield Finding("coordinator", "warning", f"it spoke {age_s:.0f} s ago by this clock, for the last time", do)
    else:
        yield Finding("coordinator", "ok", f"it spoke {max(age_s, 0):.0f} s ago by this clock")
    if beacon.fedge_version != fedge.__version__:
        do = "update the older one; versions from 0.2.0 on understand one another"
        text = f"the coordinator has fedge {beacon.fedge_version}, this machine {fedge.__version__}"
        yield Finding("versions", "warning", text, do)
