"""What tests of the wire share: brokers to choose from, and transports to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedge.broker import LocalBroker, mosquitto_path
from fedge.transport import BrokerSettings, Transport, Will

BROKERS = [
    pytest.param(
        "mosquitto",
        marks=pytest.mark.skipif(mosquitto_path() is None, reason="mosquitto is not installed"),
    ),
    "amqtt",
]


def settings(broker: LocalBroker, **changes: object) -> BrokerSettings:
    """How to reach a broker that a test started."""
    return BrokerSettings(broker.host, broker.port, **changes)


def transport(broker: LocalBroker, client_id: str, will: Will | None = None, **changes: object) -> Transport:
    """A transport to a broker that a test started; not entered yet."""
    return Transport(settings(broker, **changes), client_id, will=will)


def local_broker(kind: str, home: Path) -> LocalBroker:
    """A broker whose files lie in the test's own folder; not entered yet."""
    return LocalBroker(kind, home=home / "broker")
