"""Text for people: made safe for a terminal, suggestions for mistyped words, phrases for codes."""

from __future__ import annotations

import difflib
import functools
import inspect
import time
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from typing import Any, Self, TypeVar, cast

from fedge.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Worded(StrEnum):
    """An enumeration of codes, each with a phrase for people: `CODE = "code", "phrase"`."""

    words: str

    def __new__(cls, value: str, words: str = "") -> Self:
        """Make the member of this value."""
        member = str.__new__(cls, value)
        member._value_, member.words = value, words
        return member


def escape_controls(line: str) -> str:
    """Escape control characters, so that one line can neither control a terminal nor forge another."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def is_text(name: str) -> bool:
    """Return whether a file's name is UTF-8; JSON can hold no other names."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def format_time(at: float) -> str:
    """Format a time, in seconds since the epoch, as 2026-11-27 08:30:00 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def suggest_nearest(word: str, right: Iterable[str]) -> str:
    """Return a hint at the most similar word: " (did you mean X?)", or ""."""
    close = difflib.get_close_matches(word, list(right), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def refuse_unknown_arguments(function: F) -> F:
    """Have a function answer an argument that it does not have with the nearest one, or with all that it has.

    It raises ConfigError, as `fedge.simulate` does for an unknown setting.
    """
    known = [name for name in inspect.signature(function).parameters if name not in ("cls", "self")]

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                hint = suggest_nearest(name.lower(), known) or f": it has {', '.join(known)}"
                raise ConfigError(f"{function.__qualname__} has no argument {name!r}{hint}")
        return function(*given, **named)

    return cast(F, call)


def format_address(host: str, port: int) -> str:
    """Format host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Heading(Enum):
    """Headings of options, in the order of the help."""

    BROKER = "Broker"
    IDENTITY = "Identity"
    MEMBERS = "Members"
    FOLDERS = "Folders"
    TASK = "Task and data"
    PARTITION = "Partition"
    DEVICES = "Devices"
    STREAM = "Stream"
    METHOD = "Method"
    TRAINING = "Training"
    CAMPAIGNS = "Campaigns"
    UPDATES = "Updates"
    PRIVACY = "Privacy"
    EGRESS = "Egress"
    LOAD = "Load"
    CODE = "Code"
    EVALUATION = "Evaluation"
    RUNS = "Runs"
    BUNDLES = "Bundles"
    ROLLOUT = "Rollout"
    PREDICTION = "Prediction"
    SERVER = "Web server"
    SELECTION = "Selection"
    TRACKING = "Tracking"
    OUTPUT = "Output"
    GENERAL = "General"
