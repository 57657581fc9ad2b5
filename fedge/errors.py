"""Every error that fedge raises on purpose, in one tree.

FedgeError
 ├─ ConfigError      the user's: says what to do (exit code 2)
 ├─ ProtocolError    the peer's: the message is logged, counted and dropped; no state changes
 ├─ UpdateRejected   a bundle or an update that must not be trusted; nothing is installed
 ├─ StoreError       durable state could not be written or read: the process stops (exit code 4)
 │   └─ DamagedError   a file that was kept is not what was written: an agent fails the order that needs it
 ├─ TransportError   the broker cannot be reached or refused us (exit code 3)
 │   └─ TooLargeError  a message is larger than this broker takes; nothing else is affected
 └─ FruitlessError   a run came to its end and nothing was learned, or no device has a bundle (exit code 6)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed bytes."""


class FedgeError(Exception):
    """Base of all errors of fedge. The text can be shown to a user; `exit_code` is that of the `fedge` command."""

    exit_code = 1


class ConfigError(FedgeError):
    """A setting, a flag or a data folder is wrong. The text names it and says what to do."""

    exit_code = 2


class TransportError(FedgeError):
    """The broker cannot be reached, or refused the connection; the text holds its reason code."""

    exit_code = 3


class TooLargeError(TransportError):
    """A message is larger than the broker takes. Senders that can split it then send smaller ones."""


class StoreError(FedgeError):
    """Durable state could not be written or read. The process must stop, or it would lose an accepted update."""

    exit_code = 4


class DamagedError(StoreError):
    """A stored file is damaged and cannot be made anew. An agent fails the orders that need it, and goes on."""


class FruitlessError(FedgeError):
    """A run ended, but nothing was learned, or no device has a bundle. The text has the devices' reasons."""

    exit_code = 6


class ProtocolError(FedgeError):
    """A peer violated the contract. `name` is one word of a fixed vocabulary, for logs and counters."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


class UpdateRejected(FedgeError):  # noqa: N818 - what it is, not that it is an error
    """A bundle or one of its parts is not what its manifest says. Nothing was installed."""

    exit_code = 5


@contextmanager
def raise_as(
    kind: Callable[[str], Exception], what: str, on: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Turn the errors `on` that the `with` block raises into errors of this kind; the text is `what`, a colon, theirs.

    with raise_as(StoreError, f"cannot write {path}"):
        path.write_bytes(data)
    """
    try:
        yield
    except on as error:
        raise kind(f"{what}: {error}") from error
