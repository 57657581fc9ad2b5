"""The broker of a demo, which the demo starts or the user has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from coordinator.simulation.settings import DemoSettings
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError, TransportError
from fedge.wire.connection.route import parse_address
from fedge.wire.streams import open_connection

REACH_S: Final = 10.0
"""Time limit for connecting to the user's own broker."""


@contextlib.asynccontextmanager
async def open_broker(settings: DemoSettings) -> AsyncIterator[tuple[str, str]]:
    """Open the broker, our own or the user's, and yield its address and name.

    Raises:
        ConfigError: --secure does not go with the user's broker, or the name or address is invalid.
        TransportError: the broker does not start, or cannot be reached.
    """
    if ":" in settings.broker:
        if settings.secure:
            raise ConfigError(f"--secure starts a broker of its own: it cannot use {settings.broker}")
        at = parse_address(settings.broker)
        await require_reachable(at.host, at.port)
        yield settings.broker, settings.broker
    else:
        own = settings.folder / "provision" / "broker" if settings.secure else None
        async with LocalBroker(settings.broker, home=settings.folder / "broker", identity=own) as broker:
            yield f"{broker.host}:{broker.port}", broker.name


async def require_reachable(host: str, port: int) -> None:
    """Check that the broker is listening.

    Raises:
        TransportError: it cannot be reached.
    """
    try:
        async with asyncio.timeout(REACH_S), open_connection(host, port):
            pass
    except OSError as error:  # a timeout is one, too
        why = str(error) or f"no answer within {REACH_S:.0f} s"
        raise TransportError(f"the broker at {host}:{port} cannot be reached: {why}") from error
