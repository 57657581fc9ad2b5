"""A broker for one machine, as a child process: Mosquitto if installed, otherwise amqtt.

The child never outlives us, even after kill -9 (`fedge.system.tether`).

amqtt is only a fallback that needs no installation. It lacks MQTT 5 and redelivery, and formats every payload for a
debug line that cannot be switched off.
"""

from __future__ import annotations

import asyncio
import errno
import getpass
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final, Self

import click

from fedge.errors import ConfigError, TransportError
from fedge.identity.names import CRL, Role, find_subject
from fedge.membership import broker_configuration
from fedge.membership.credentials import CERTIFICATE
from fedge.system import child
from fedge.system.background import on_signal
from fedge.system.files import get_version
from fedge.system.help import Command, json_option, option
from fedge.system.text import Heading
from fedge.wire.streams import open_connection

log = logging.getLogger("fedge.broker")

KINDS: Final = ("auto", "mosquitto", "amqtt")
START_TIMEOUT_S: Final = 60.0
"""Time limit for the start; importing amqtt takes several seconds on a Raspberry Pi, and longer on a busy one."""
STOP_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.02
LOOK_S: Final = 0.5
"""Pause between two looks at the files of the broker's identity."""

_SBIN: Final = ("/usr/sbin", "/usr/local/sbin")
"""Folders in which distributions install Mosquitto, outside a normal user's PATH."""


def find_mosquitto() -> str | None:
    """Return the path of Mosquitto on this machine, or None."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=os.pathsep.join(_SBIN))


def choose_broker(kind: str) -> str:
    """Resolve "auto" to "mosquitto" or "amqtt".

    Raises:
        ConfigError: the kind is unknown, or its program is not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown broker {kind!r}; choose one of {', '.join(KINDS)}")
    if kind == "auto":
        return "mosquitto" if find_mosquitto() else "amqtt"
    if kind == "mosquitto" and find_mosquitto() is None:
        raise ConfigError("mosquitto is not installed (Debian: apt install mosquitto); or choose --kind amqtt")
    return kind


def make_mosquitto_config(listener: str, home: Path | None = None) -> str:
    """Return a Mosquitto configuration with this listener; retained messages are kept in `home`, if given."""
    kept = "persistence false" if home is None else f"persistence true\npersistence_location {home.absolute()}/"
    return f"""\
{listener}
{kept}
# Started as root, Mosquitto would change its user, and the kernel would then not kill it when we end.
user {getpass.getuser()}
log_dest stderr
log_type error
log_type warning
"""


def find_free_port(host: str) -> int:
    """Return a TCP port that is free now, outside the range from which Linux gives out ports by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # Linux itself gives out ports from 32768
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


class LocalBroker:
    """A broker as a child of this process; an async context manager. It may be killed and restarted.

    Start it from a thread that lives as long as the broker should (normally the main thread).

    identity: folder of the broker's identity, from `fedge provision`; Mosquitto then admits only members of its
        federation.
    topic_prefix: prefix of that federation's topics, if it has one.
    """

    def __init__(
        self,
        kind: str = "auto",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        home: Path | None = None,
        identity: Path | None = None,
        topic_prefix: str = "",
    ) -> None:
        self.name = choose_broker("mosquitto" if identity is not None and kind == "auto" else kind)
        if identity is not None and self.name != "mosquitto":
            raise ConfigError(f"{self.name} knows no certificates: --identity needs --kind mosquitto")
        self._identity = identity
        self._topic_prefix = topic_prefix
        self.host = host
        self.port = port or find_free_port(host)
        self._temporary = tempfile.TemporaryDirectory(prefix="fedge-broker-") if home is None else None
        self._home = Path(self._temporary.name) if self._temporary is not None else home
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        """Start the broker and wait until it accepts connections; raises the same errors as `start`."""
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the child and wait until it accepts connections.

        Raises:
            TransportError: the port is taken, or the child ended or did not listen in time (with the end of its log).
        """
        assert self._home is not None
        if await self._is_listening():
            raise TransportError(
                f"somebody already listens on {self.host}:{self.port}: if it is a broker, such as Debian's Mosquitto, "
                "use that one; otherwise take another port (--port)"
            )
        self._home.mkdir(parents=True, exist_ok=True)
        with (self._home / "broker.log").open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._make_command(self._home),
                env=child.make_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C then reaches only us; we stop the child after its users
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._process.returncode is None and not await self._is_listening():  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise TransportError(
                f"{self.name} did not listen on {self.host}:{self.port}: {self._read_log_end()}"
            ) from error
        if self._process.returncode is not None:
            raise TransportError(f"{self.name} ended at once ({self._process.returncode}): {self._read_log_end()}")
        log.info("event=broker_started kind=%s host=%s port=%d", self.name, self.host, self.port)

    def _make_command(self, home: Path) -> list[str]:
        if self.name == "amqtt":
            return child.make_tethered_command(*child.make_command("fedge.commands.broker", self.host, str(self.port)))
        config = home / "mosquitto.conf"
        if self._identity is None:
            text = make_mosquitto_config(broker_configuration.format_open_listener(self.host, self.port))
        else:
            rules = broker_configuration.format_access_list(_read_federation(self._identity), self._topic_prefix)
            (home / broker_configuration.ACCESS_LIST).write_text(rules)
            folder = self._identity.absolute()
            listener = broker_configuration.format_member_listener(folder, home.absolute(), self.port, self.host)
            text = make_mosquitto_config(broker_configuration.format_global_settings() + listener, home)
        config.write_text(text, encoding="utf-8")
        program = find_mosquitto() or "mosquitto"
        return child.make_tethered_command(program, "-c", str(config))

    async def _is_listening(self) -> bool:
        try:
            async with open_connection(self.host, self.port):
                return True
        except OSError:
            return False

    def _read_log_end(self) -> str:
        assert self._home is not None
        lines = (self._home / "broker.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])

    @property
    def pid(self) -> int | None:
        """Process id of the broker, or None while it does not run."""
        return self._process.pid if self._process is not None else None

    async def wait(self) -> int:
        """Wait until the broker exits; returns its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def follow_identity(self) -> None:
        """Restart the broker whenever its identity files change; never returns.

        Mosquitto reads the certificate revocation list only at its start, and clients already admitted stay until then.

        Raises:
            TransportError: the broker does not start, or has exited.
        """
        assert self._identity is not None
        files = self._identity / CRL, self._identity / CERTIFICATE
        known = [get_version(file) for file in files]
        while True:
            await asyncio.sleep(LOOK_S)
            if self._process is not None and self._process.returncode is not None:
                raise TransportError(
                    f"{self.name} ended with status {self._process.returncode}: {self._read_log_end()}"
                )
            if (found := [get_version(file) for file in files]) != known:
                known = found
                log.info("event=broker_restarts reason=%r", f"the files in {self._identity} have changed")
                await self._send_signal(signal.SIGTERM)
                await self.start()

    async def kill(self) -> None:
        """Kill the broker (kill -9), as in a power cut; `start` restarts it on the same port, without its state."""
        await self._send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the broker cleanly, or by force if it does not exit. No effect if it is not running."""
        await self._send_signal(signal.SIGTERM)
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _send_signal(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(number)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _read_federation(identity: Path) -> str:
    from fedge.identity.certificates import load_certificate

    subject = find_subject(load_certificate(identity / CERTIFICATE))
    if subject is None or subject.role is not Role.BROKER:
        raise ConfigError(f"{identity} is not a broker's identity: that is FOLDER/broker of `fedge provision`")
    return subject.federation


# ------------------------------------------------------------------------------------------------------- the child


async def _serve_amqtt(host: str, port: int) -> None:
    """Run amqtt until SIGTERM, open to everybody and without its logging plugins."""
    from amqtt.broker import Broker

    config = {
        "listeners": {"default": {"type": "tcp", "bind": f"{host}:{port}"}},
        "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    }
    stop = asyncio.Event()
    on_signal(stop.set)
    server = Broker(config)
    await server.start()
    await stop.wait()
    await server.shutdown()


# -------------------------------------------------------------------------------------------------- `fedge broker`


async def _run(running: LocalBroker, *, follow: bool, as_json: bool) -> None:
    stop = asyncio.Event()
    on_signal(stop.set)
    async with running:
        if as_json:
            listening = {"event": "listening", "kind": running.name, "host": running.host, "port": running.port}
            click.echo(json.dumps(listening))
        else:
            click.echo(f"{running.name} listens on {running.host}:{running.port}; Ctrl-C ends it")
        stopped = asyncio.ensure_future(stop.wait())
        ended = asyncio.ensure_future(running.follow_identity() if follow else running.wait())
        await asyncio.wait((stopped, ended), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not stop.is_set():
            raise TransportError(f"{running.name} ended with status {ended.result()}")
        ended.cancel()


@click.command(cls=Command)
@option(
    "--kind",
    heading=Heading.BROKER,
    type=click.Choice(KINDS),
    default="auto",
    show_default=True,
    help="The broker is of this kind; auto is Mosquitto if it is installed.",
)
@option(
    "--host", heading=Heading.BROKER, default="127.0.0.1", show_default=True, help="The broker listens on this address."
)
@option(
    "--port",
    heading=Heading.BROKER,
    type=click.IntRange(0, 65535),
    default=1883,
    show_default=True,
    help="The broker listens on this TCP port; 0 is a free one.",
)
@option(
    "--identity",
    heading=Heading.IDENTITY,
    type=click.Path(path_type=Path),
    help="This folder, FOLDER/broker of `fedge provision`, admits only members of its federation, over TLS.",
)
@option(
    "--topic-prefix",
    heading=Heading.IDENTITY,
    default="",
    help="With --identity, this is the prefix of the federation's topics, if it has one.",
)
@option(
    "--home",
    heading=Heading.FOLDERS,
    type=click.Path(path_type=Path),
    help="This folder gets the broker's configuration and log.",
)
@json_option("The command prints a JSON object with kind, host and port, once the broker listens.")
def broker(
    kind: str, host: str, port: int, home: Path | None, identity: Path | None, topic_prefix: str, *, as_json: bool
) -> None:
    """Run a broker on this machine until Ctrl-C: Mosquitto if it is installed, otherwise amqtt.

    It admits everybody who can reach the address, so keep it on this machine or a closed network. With an identity
    (`fedge provision`), Mosquitto admits members only, and restarts itself when a certificate is revoked.

    Examples:
      fedge broker
      fedge broker --host 0.0.0.0 --port 1884 --kind mosquitto --home ./broker
      fedge broker --host 0.0.0.0 --port 8883 --identity /etc/fedge/broker
      fedge broker --port 0 --json

    Exit codes: 0 stopped, 2 wrong usage, 3 it does not start or ends by itself.
    """
    local = LocalBroker(kind, host=host, port=port, home=home, identity=identity, topic_prefix=topic_prefix)
    asyncio.run(_run(local, follow=identity is not None, as_json=as_json))


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(_serve_amqtt(sys.argv[1], int(sys.argv[2])))
