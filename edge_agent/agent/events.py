"""What an agent reports on its own device: log lines, and events for observers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from fedge.errors import ProtocolError
from fedge.system.logs import Lines, log_event
from fedge.wire.messages import Order

log = logging.getLogger("fedge.agent")

Observe = Callable[[str, dict[str, object]], None]
"""A function that receives the name of an event and its fields."""


def ignore_event(event: str, fields: dict[str, object]) -> None:
    """Ignore the event."""


class Events:
    """A reporter of a device's events, to the log and to the observer."""

    def __init__(self, device_id: str, observe: Observe) -> None:
        self._device_id = device_id
        self._observe = observe
        self._lines = Lines()
        self.refused: Counter[str] = Counter()  # messages, by the rule that they violated

    def log_event(self, event: str, level: int = logging.INFO, /, **fields: object) -> None:
        """Log an event and pass it to the observer; if there are many warnings of a kind, only a few are logged."""
        if level >= logging.WARNING:
            untold = self._lines.count_suppressed(f"{event} {fields.get('name', '')}", time.monotonic())
            if untold is None:
                return
            fields |= {"untold": untold} if untold else {}
        log_event(log, event, {"device": self._device_id, **fields}, level)
        self._observe(event, fields)

    def record_refusal(self, error: ProtocolError, topic: str) -> None:
        """Count and log a message that violates the contract."""
        self.refused[error.name] += 1
        self.log_event("refused", logging.WARNING, name=error.name, topic=topic, detail=str(error))

    def warn(self, template: str, *args: object) -> None:
        """Log a warning, without the observer; if there are many from one template, only a few are logged."""
        self._lines.warning(log, template, *args)


def get_order_fields(order: Order) -> dict[str, object]:
    """Return the fields of events about an order."""
    return {"order": order.id, "round": order.round, "step": order.step}
