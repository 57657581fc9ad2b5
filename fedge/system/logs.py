"""Log lines on standard error, one per event, as text or as JSON with fixed names (docs/operating.md).

A line is logged as `log.info("event=order_refused order=%s reason=%r", order, reason)`. Field names come from the
template and values from the arguments, so a peer's text can never become a name, a second line or a terminal command.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from fedge.system.text import escape_controls

Format = Literal["text", "json"]
LINES_PER_MINUTE: Final = 60
"""Most lines of one kind in a minute (`Lines`). Further lines are counted, and the next minute's first line gives the
count."""
_NAME: Final = re.compile(r"(?:^|\s)(\w+)=")
_PLACE: Final = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_bound: dict[str, object] = {}
"""Fields that say what this process is and does, added to every JSON line whose template lacks them."""


def bind(**fields: object) -> None:
    """Add fields such as federation, device or round to all further JSON lines; the value None removes a field."""
    _bound.update(fields)
    for name in [name for name, value in _bound.items() if value is None]:
        del _bound[name]


@contextmanager
def set_level(name: str, level: int) -> Iterator[None]:
    """Set the level of a logger inside the `with` block; an empty `name` means the root logger."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def bind_temporarily(**fields: object) -> Iterator[None]:
    """Set fields of JSON lines as `bind` does, but only inside the `with` block."""
    before = {name: _bound.get(name) for name in fields}
    bind(**fields)
    try:
        yield
    finally:
        bind(**before)


def log_event(log: logging.Logger, event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
    """Log an event whose field names are known only at run time; the names must come from our own code."""
    template = "".join(f" {name}={'%r' if ' ' in str(value) else '%s'}" for name, value in fields.items())
    log.log(level, f"event=%s{template}", event, *fields.values())


class Lines:
    """Limits the lines of each kind that peers can cause, since a flood of messages must not fill the disk."""

    def __init__(self) -> None:
        self._minute = 0
        self._counted: Counter[str] = Counter()

    def count_suppressed(self, kind: str, now: float) -> int | None:
        """Count a line at `now` (s); return how many the last minute suppressed, or None to suppress this one."""
        untold = 0
        if int(now // 60) != self._minute:
            self._minute = int(now // 60)
            untold = sum(max(n - LINES_PER_MINUTE, 0) for n in self._counted.values())
            self._counted.clear()
        self._counted[kind] += 1
        return untold if self._counted[kind] <= LINES_PER_MINUTE else None

    def warning(self, log: logging.Logger, template: str, *args: object) -> None:
        """Log a warning, or only count it if there are too many with this template."""
        self.log(log, logging.WARNING, template, *args)

    def log(self, log: logging.Logger, level: int, template: str, *args: object, traceback: bool = False) -> None:
        """Log a line at any level, or only count it; `traceback` adds the present exception's traceback."""
        if (untold := self.count_suppressed(template, time.monotonic())) is not None:
            counted = [untold] if untold else []
            log.log(level, f"{template} untold=%d" if untold else template, *args, *counted, exc_info=traceback)


def parse_fields(template: str) -> dict[str, str]:
    """Return the placeholder of each name in a template; words after the last placeholder are `detail`."""
    _, *parts = _NAME.split(template)
    found: dict[str, str] = {}
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        first, _, rest = (value, "", "") if value.startswith("'") else value.partition(" ")
        found[name] = first
        if rest:
            found["detail"] = rest
    return found


class LineFormatter(logging.Formatter):
    """Formats a line as `2026-01-31T12:00:00.123Z INFO event=... key=value`, with control characters escaped."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Format the line with control characters escaped, so that no peer's text forges a second line."""
        return escape_controls(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # noqa: N802 - logging's name
        """Format the traceback, indented and escaped in the same way."""
        return "\n".join(f"  {escape_controls(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(LineFormatter):
    """Formats each line as a JSON object: time, level, logger, the fields of `bind`, and those of the template."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line of ASCII; line breaks and control characters are escaped."""
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_bound,
            **_collect_fields(record),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter.formatException(self, record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", r"\u007f")


def _collect_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a record of ours; for other records, only the message."""
    if not str(record.msg).startswith("event="):
        return {"message": record.getMessage()}
    arguments = iter(record.args if isinstance(record.args, tuple) else ())
    said: dict[str, object] = {}
    for name, value in parse_fields(str(record.msg)).items():
        given = tuple(next(arguments) for _ in _PLACE.findall(value))
        said[name] = _simplify(given[0]) if _PLACE.fullmatch(value) else (value % given).strip("'")
    return said


def _simplify(value: object) -> object:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, bool | int) else str(value)


def configure(level: str, how: Format) -> None:
    """Send the log lines of this process to standard error: ours from `level`, those of libraries from WARNING."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if how == "json" else LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fedge").setLevel(level.upper())
    logging.captureWarnings(how == "json")


def is_json() -> bool:
    """Return whether log lines are JSON, so that nothing else may go to standard error."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
