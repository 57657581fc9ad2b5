"""Notifies systemd that a service is ready and that its loop is still running (sd_notify(3))."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress

log = logging.getLogger("fedge.notify")


def ready() -> None:
    """Tell systemd that we are ready, and feed its watchdog from this event loop from now on.

    Without systemd, or a second time, it does nothing; where nobody listens it says so in the log.
    """
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address:
        return
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    told.setblocking(False)
    try:
        told.connect("\0" + address[1:] if address.startswith("@") else address)
        told.send(b"READY=1")
    except OSError as error:
        log.warning("event=not_notified path=%s reason=%r", address, str(error))
        told.close()
        return
    limit_us = int(os.environ.get("WATCHDOG_USEC", "0"))
    if limit_us:
        _feed(told, asyncio.get_running_loop(), limit_us / 3e6)


def _feed(told: socket.socket, loop: asyncio.AbstractEventLoop, pause_s: float) -> None:
    with suppress(OSError):  # systemd itself is being restarted
        told.send(b"WATCHDOG=1")
    loop.call_later(pause_s, _feed, told, loop, pause_s)
