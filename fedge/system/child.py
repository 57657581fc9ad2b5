"""Calls of functions in a separate process, for code that needs torch or may crash.

The child is `python -m fedge.system.child MODULE:FUNCTION`. Arguments and results travel over a socket in MessagePack,
typed by the function's annotations. The child's log records come the same way and are logged here; its printed output
goes to standard error.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self, TypeVar, get_type_hints

import msgspec
import numpy as np

from fedge.errors import MALFORMED, ConfigError, FedgeError, FruitlessError, StoreError, raise_as
from fedge.system import tether
from fedge.system.loading import load_object
from fedge.system.stopping import Stop, StoppedError, never

R = TypeVar("R")
T = TypeVar("T")

FAILURES: Final = {b"failed": ConfigError, b"broken": StoreError, b"fruitless": FruitlessError}
LOOK_S: Final = 0.05
"""Seconds between two polls of `stop`."""
END_S: Final = 5.0
"""Time in which a child that has broken the connection must end; otherwise it is killed."""


def make_command(module: str, *words: str) -> list[str]:
    """Return the command `python -m MODULE WORDS...`; files in the present folder cannot shadow the module."""
    return [sys.executable, "-P", "-m", module, *words]


def make_tethered_command(*words: str) -> list[str]:
    """Return a command whose process the kernel kills when the thread that started it ends."""
    return [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *words]


def make_environment() -> dict[str, str]:
    """Return our environment with a PYTHONPATH by which a child finds the same modules, also the user's."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class DiedError(ConfigError):
    """The child ended before it answered. `status` is its exit code, negative for a signal, None if we killed it."""

    def __init__(self, status: int | None) -> None:
        if status is None:
            super().__init__("it broke the connection and did not end")
        else:
            super().__init__(f"signal {-status}" if status < 0 else f"exit {status}")
        self.status = status


class Child:
    """A function in a separate process, for one call at a time. Context manager.

    The process ends with the thread that started it, even if that thread is killed. It also ends after a call that
    raises.

    Args:
        function: `module:name`; its annotations may use types known to msgspec, arrays and paths.
        first: arguments of a first call, which counts as part of loading and whose result is dropped.
    """

    def __init__(self, function: str, *first: object) -> None:
        self.loaded = False
        self._first = first
        self._imported = False
        self._wire, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                make_command("fedge.system.child", function, str(theirs.fileno()), str(os.getpid())),
                env=make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def close(self) -> None:
        """Kill the child at once."""
        self._wire.close()
        self._process.kill()
        self._process.wait()

    def load(self, stop: Stop = never, until: float = math.inf) -> None:
        """Wait until the child has loaded its code and finished its first call. If we stop waiting, the child goes on.

        `until` is the time on the monotonic clock at which to give up.

        Raises:
            DiedError, ConfigError, StoppedError, TimeoutError: as for `call`.
        """
        try:
            if not self._imported:
                self._receive(stop, until)
                self._imported = True
                if self._first:
                    self._send(self._first)
            if not self.loaded:
                if self._first:
                    self._receive(stop, until)
                self.loaded = True
        except StoppedError:
            raise
        except BaseException:
            self.close()
            raise

    def call(self, *arguments: object, returns: type[R], stop: Stop = never, timeout_s: float | None = None) -> R:
        """Call the function in the child, and return its result.

        `stop` is polled during the call; when it returns True, the child is killed. `timeout_s` is the time limit; None
        for no limit.

        Raises:
            DiedError: the child ended by itself.
            ConfigError: the function failed; the text is the last line of the reason.
            StoreError, FruitlessError: raised by the function.
            StoppedError: `stop()` was true.
            TimeoutError: the call took longer than `timeout_s`.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.load(stop, until)
            self._send(arguments)
            data = self._receive(stop, until)
            with raise_as(ConfigError, "its result makes no sense", on=MALFORMED):  # such as a number out of range
                return msgspec.msgpack.decode(data, type=returns, dec_hook=_restore)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise

    def _send(self, arguments: tuple[object, ...]) -> None:
        self._try(lambda: self._wire.send_bytes(msgspec.msgpack.encode(arguments, enc_hook=_simplify)))

    def _receive(self, stop: Stop, until: float) -> bytes:
        """Return the child's next message; records that it logs before that are logged here."""
        while True:
            while not self._wire.poll(LOOK_S):
                status = self._process.poll()  # the connection may stay open, held by a process that the child started
                if status is not None and not self._wire.poll():
                    raise DiedError(status)
                if stop():
                    raise StoppedError
                if time.monotonic() > until:
                    raise TimeoutError
            kind, data = self._try(lambda: (self._wire.recv_bytes(), self._wire.recv_bytes()))
            if kind in FAILURES:
                raise FAILURES[kind](data.decode())
            if kind != b"log":
                return data
            name, level, template, values = msgspec.msgpack.decode(data, type=tuple[str, int, str, list[Any]])
            logging.getLogger(name).log(level, template, *values)

    def _try(self, exchange: Callable[[], T]) -> T:
        try:
            return exchange()
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            raise DiedError(self._process.returncode) from error


def call_once(function: str, *arguments: object, returns: type[R], timeout_s: float | None = None) -> R:
    """Call a function in a separate process; raises the same errors as `Child.call`."""
    with Child(function) as child:
        return child.call(*arguments, returns=returns, timeout_s=timeout_s)


# ------------------------------------------------------------------------------------------------------- the child


class _Wire(logging.Handler):
    """The child's side of the connection, which sends log records and the outcome of each call."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._telling = Lock()

    def send(self, kind: bytes, data: bytes) -> None:
        with self._telling:
            self._connection.send_bytes(kind)
            self._connection.send_bytes(data)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record's template and values separately, as `fedge.system.logs` needs them."""
        template, values = str(record.msg), record.args if isinstance(record.args, tuple) else ()
        if record.exc_info:
            template, values = (
                f"{template} exception=%s",
                (*values, logging.Formatter().formatException(record.exc_info)),
            )
        plain = [value if isinstance(value, bool | int | float) else str(value) for value in values]
        self.send(b"log", msgspec.msgpack.encode((record.name, record.levelno, template, plain)))


def _serve(path: str, wire: Connection) -> None:
    """Answer the parent's calls until it closes the wire."""
    to_parent = _Wire(wire)
    logging.basicConfig(handlers=[to_parent])
    logging.getLogger("fedge").setLevel(logging.INFO)
    try:
        function = load_object(path)
        *kinds, _ = get_type_hints(function).values()
        to_parent.send(b"loaded", b"")
        while True:
            given = msgspec.msgpack.decode(wire.recv_bytes(), type=list[msgspec.Raw])
            arguments = [
                msgspec.msgpack.decode(g, type=kind, dec_hook=_restore) for g, kind in zip(given, kinds, strict=True)
            ]
            to_parent.send(b"done", msgspec.msgpack.encode(function(*arguments), enc_hook=_simplify))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the parent decides
        named = isinstance(error, FedgeError | ValueError)
        reason = str(error) if named else f"{type(error).__name__}: {error}"
        kind = next((kind for kind, raised in FAILURES.items() if isinstance(error, raised)), b"failed")
        to_parent.send(kind, (reason.splitlines() or [""])[-1].encode())


def _simplify(value: object) -> object:
    """Convert an array or a path to values that MessagePack can hold."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _restore(kind: Any, value: Any) -> Any:
    """Convert such values back to an array or a path."""
    if issubclass(getattr(kind, "__origin__", kind), np.ndarray):
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    return Path(value)


if __name__ == "__main__":
    function, descriptor, parent = sys.argv[1:]
    tether.die_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent ends the child
        signal.signal(number, signal.SIG_IGN)
    _serve(function, Connection(int(descriptor)))
