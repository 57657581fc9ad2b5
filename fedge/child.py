"""Work for a process of its own: what needs torch where none shall be held, or what may bring its process down.

The child is `python -m fedge.child MODULE:FUNCTION`. Arguments go to its standard input and the result comes back on
its standard output, in MessagePack, each as the function's annotations say. What the work prints goes to standard
error, whose last line is the reason where it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
import numpy as np

from fedge.errors import MALFORMED, ConfigError, FedgeError
from fedge.loading import load_object

R = TypeVar("R")


def command(module: str, *words: str) -> list[str]:
    """`python -m MODULE WORDS...`; a file in the present folder shadows no module of ours."""
    return [sys.executable, "-P", "-m", module, *words]


def environment() -> dict[str, str]:
    """Ours, by which a child finds the modules that this process finds, those of the user too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def call(function: str, *arguments: object, returns: type[R], timeout_s: float | None = None) -> R:
    """The result of a function in a process of its own.

    Args:
        function: `module:name`; its annotations say what it takes: what msgspec knows, arrays, and paths.
        arguments: by position.
        returns: type of the result.
        timeout_s: when to give up; None: never.

    Raises:
        ConfigError: it failed; the text is the last line of what it said, or the signal that ended it.
        TimeoutError: it took longer; it has been killed.
    """
    try:
        done = subprocess.run(
            command("fedge.child", function),
            env=environment(),
            input=msgspec.msgpack.encode(arguments, enc_hook=_plain),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from error
    if done.returncode < 0:
        raise ConfigError(f"signal {-done.returncode}")
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(said[-1] if said else f"exit {done.returncode}")
    try:
        return msgspec.msgpack.decode(done.stdout, type=returns, dec_hook=_rich)
    except MALFORMED as error:  # such as a number beyond its range
        raise ConfigError(f"its result makes no sense: {error}") from error


def _serve(path: str) -> None:
    """The child's side."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function = load_object(path)
    *kinds, _ = get_type_hints(function).values()
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[msgspec.Raw])
    arguments = [msgspec.msgpack.decode(g, type=kind, dec_hook=_rich) for g, kind in zip(given, kinds, strict=True)]
    with answer:
        answer.write(msgspec.msgpack.encode(function(*arguments), enc_hook=_plain))


def _plain(value: object) -> object:
    """What MessagePack has for an array or a path."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _rich(kind: Any, value: Any) -> Any:
    """The reverse of `_plain`."""
    if issubclass(getattr(kind, "__origin__", kind), np.ndarray):
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    return Path(value)


if __name__ == "__main__":
    try:
        _serve(sys.argv[1])
    except (FedgeError, ValueError) as error:
        sys.exit(str(error))
