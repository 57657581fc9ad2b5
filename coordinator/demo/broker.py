"""The broker of a demo: its own, or the user's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from coordinator.simulation.settings import DemoSettings
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError, TransportError
from fedge.wire.connection.route import parse_address
from fedge.wire.streams import connection

REACH_S: Final = 10.0
"""Time limit for connecting to the user's own broker."""


@contextlib.asynccontextmanager
async def broker_of(settings: DemoSettings) -> AsyncIterator[tuple[str, str]]:
    """Address and name of the broker: our own, or the user's.

    Raises:
        ConfigError: it is neither.
        TransportError: it does not start, or cannot be reached.
    """
    if ":" in settings.broker:
        if settings.secure:
            raise ConfigError(f"--secure starts a broker of its own: it cannot use {settings.broker}")
        at = parse_address(settings.broker)
        await reach(at.host, at.port)
        yield settings.broker, settings.broker
    else:
        own = settings.folder / "provision" / "broker" if settings.secure else None
        async with LocalBroker(settings.broker, home=settings.folder / "broker", identity=own) as broker:
            yield f"{broker.host}:{broker.port}", broker.name


async def reach(host: str, port: int) -> None:
    """Check that the broker is listening.

    Raises:
        TransportError: it is not.
    """
    try:
        async with asyncio.timeout(REACH_S), connection(host, port):
            pass
    except OSError as error:  # a timeout is one, too
        why = str(error) or f"no answer within {REACH_S:.0f} s"
        raise TransportError(f"the broker at {host}:{port} cannot be reached: {why}") from error
