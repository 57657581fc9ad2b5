"""Systemd services that run as their own user, which may read little and write only a few folders.

`notify_ready` tells systemd that a service is ready, and then again and again that its event loop is still running
(sd_notify(3)).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from fedge.errors import ConfigError, StoreError, raise_as
from fedge.system.files import write_atomically

log = logging.getLogger("fedge.notify")

USER: Final = "fedge"
UNITS: Final = Path("/etc/systemd/system")
RUNNING: Final = Path("/run/systemd/system")
"""Folder that exists if systemd runs this machine."""

_COMMON: Final = """\
User={user}
# A service is ready when it serves or is connected to the broker, which may take long. A stuck service is restarted.
Type=notify
TimeoutStartSec=infinity
WatchdogSec=120
# SIGTERM ends the service within 5 s; unfinished work is repeated.
TimeoutStopSec=10
StateDirectoryMode=0700
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
"""

AGENT: Final = """\
# A stop on request is a success; a restart does not cure a wrong configuration (2).
SuccessExitStatus=130
Restart=always
RestartSec=10
RestartPreventExitStatus=2
# The agent gets the processor last and is killed first when memory is short, because a restart loses nothing.
Nice=10
CPUSchedulingPolicy=batch
IOSchedulingClass=idle
OOMScoreAdjust=500
# Training runs in a separate process. If the kernel kills that process, the agent goes on and reports this.
OOMPolicy=continue
MemoryMax=75%
StateDirectory=fedge
"""

RUNTIME: Final = """\
# The runtime answers requests, so it gets the processor before the agent. Without a bundle it ends and is restarted.
SuccessExitStatus=130
Restart=always
RestartSec=30
MemoryMax=50%
StateDirectory=fedge
"""

COORDINATOR: Final = """\
# Exit codes 0 (all rounds are done) and 130 (stopped) are final. After any other end the coordinator is restarted, and
# continues from its last durable step, except that a wrong configuration (2) or a broken disk (4) needs a person.
SuccessExitStatus=130
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 4
MemoryMax=50%
StateDirectory=fedge-coordinator
"""


def format_unit(what: str, role: str, arguments: str, name: str, writes: Path | None = None) -> str:
    """Return a systemd unit that runs `fedge ARGUMENTS` as the user fedge.

    Args:
        what: description of the service.
        role: `AGENT`, `RUNTIME` or `COORDINATOR`.
        arguments: arguments of the command.
        name: name of the service. FEDGE_... settings may be in /etc/fedge/NAME.env; only root must be able to read it.
        writes: a folder that the service may write besides its state, such as the identity that an agent renews.
    """
    writable = "" if writes is None else f"ReadWritePaths={writes}\n"
    return f"""\
[Unit]
Description=fedge {what}
# Certificates have dates, so a Pi without a clock chip must first get the time from the network.
Wants=network-online.target time-sync.target
After=network-online.target time-sync.target mosquitto.service

[Service]
ExecStart={format_command(arguments)}
EnvironmentFile=-/etc/fedge/{name}.env
{writable}{role}{_COMMON.format(user=USER)}
[Install]
WantedBy=multi-user.target
"""


def format_daily_units(what: str, arguments: str) -> tuple[str, str]:
    """Return a service unit and a timer unit that run `fedge ARGUMENTS` as root once a day."""
    service = f"[Unit]\nDescription=fedge {what}\n\n[Service]\nType=oneshot\nExecStart={format_command(arguments)}\n"
    timer = f"[Unit]\nDescription=fedge {what}\n\n[Timer]\nOnCalendar=daily\nRandomizedDelaySec=1h\nPersistent=true\n"
    return service, f"{timer}\n[Install]\nWantedBy=timers.target\n"


def format_command(arguments: str) -> str:
    """Return the command line of a service; the service uses this process's Python interpreter."""
    return f"{sys.executable} -m fedge {arguments}"


def make_user() -> pwd.struct_passwd:
    """Return the service user, who can only run services; create the user if necessary.

    Raises:
        ConfigError: the user cannot be created, or may not run this installation of fedge.
    """
    closed = [folder for folder in Path(sys.executable).parents if not folder.stat().st_mode & 0o001]
    if closed:
        raise ConfigError(
            f"a service cannot run {sys.executable}, because {closed[0]} is closed to others: install fedge below /opt"
        )
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        run("useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", USER)
        return pwd.getpwnam(USER)


def give_to(folder: Path, owner: pwd.struct_passwd) -> None:
    """Give a folder of this process's user and its plain files to another owner; only that owner can then read them.

    A folder that already belongs to the new owner is left alone, since the owner could have put links to others' files
    into it. What root writes there belongs to the owner anyway (`fedge.system.files.write_atomically`). The folder
    itself changes its owner last, so that the new owner cannot put links into it before.

    Raises:
        StoreError: the folder belongs to neither this process's user nor the new owner, or cannot be given away.
    """
    with raise_as(StoreError, f"cannot give {folder} to {owner.pw_name}"):
        holder = folder.stat().st_uid
        if holder == owner.pw_uid:
            return
        if holder != os.geteuid():
            raise StoreError(
                f"{folder} belongs to user {holder}, and is for {owner.pw_name}: see what is in it, then "
                f"`chown -R --no-dereference {owner.pw_name} {folder}`"
            )
        folder.chmod(0o700)
        for path in folder.iterdir():
            if stat.S_ISREG(path.lstat().st_mode):
                os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
        os.chown(folder, owner.pw_uid, owner.pw_gid)


def write_public(path: Path, text: str) -> None:
    """Write a world-readable file.

    Raises:
        StoreError: the file cannot be written.
    """
    write_atomically(path, text.encode(), public=True)


def run(*words: str) -> None:
    """Run a system program.

    Raises:
        ConfigError: the program failed or cannot be run.
    """
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"`{' '.join(words)}` cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"`{' '.join(words)}` failed: {error.stderr.strip()}") from error


def restart(name: str) -> bool:
    """Start or restart a service. Return False if there is no systemd; then somebody must start the service by hand.

    Raises:
        ConfigError: the service does not start.
    """
    if there := RUNNING.exists():
        run("systemctl", "restart", name)
    return there


def notify_ready() -> None:
    """Tell systemd that this service is ready, and from then on tell its watchdog that this event loop runs.

    Without systemd, and from the second call on, this does nothing. If nobody listens at the socket, that is logged.
    """
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address:
        return
    service_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    service_socket.setblocking(False)
    try:
        service_socket.connect("\0" + address[1:] if address.startswith("@") else address)
        service_socket.send(b"READY=1")
    except OSError as error:
        log.warning("event=not_notified path=%s reason=%r", address, str(error))
        service_socket.close()
        return
    limit_us = int(os.environ.get("WATCHDOG_USEC", "0"))
    if limit_us:
        _feed_watchdog(service_socket, asyncio.get_running_loop(), limit_us / 3e6)


def _feed_watchdog(service_socket: socket.socket, loop: asyncio.AbstractEventLoop, pause_s: float) -> None:
    with suppress(OSError):  # systemd itself is being restarted
        service_socket.send(b"WATCHDOG=1")
    loop.call_later(pause_s, _feed_watchdog, service_socket, loop, pause_s)
