"""What the broker retains; with certificates: test_renewal.py, and tests/coordinator/service/test_cli.py."""

from __future__ import annotations

import pytest

from fedge.commands.broker import LocalBroker
from fedge.errors import TransportError
from fedge.wire import retained as module
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.retained import collect_retained
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

T = Topics("kept")


@pytest.mark.broker
async def test_what_is_retained_is_told_by_device_and_what_was_cleared_is_not(one_broker: LocalBroker) -> None:
    at = BrokerSettings(one_broker.host, one_broker.port)
    async with Transport(at, "teller") as teller:
        for device, payload in (("a", b"1"), ("b", b"2"), ("c", b"3"), ("c", b"")):
            await teller.publish(T.make_agent_topic(device, "status"), payload, retain=True)
        await teller.publish(T.make_agent_topic("d", "status"), b"4")
    async with collect_retained(Transport(at, "asker"), T, "status") as said:
        assert said == {"a": b"1", "b": b"2"}


async def test_a_broker_that_is_not_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REACH_S", 0.3)
    for settings, told in (({}, "cannot be reached$"), ({"ca_file": "/nowhere"}, "or it does not accept")):
        with pytest.raises(TransportError, match=told):
            async with collect_retained(Transport(BrokerSettings("127.0.0.1", 1, **settings), "x"), T, "status"):  # type: ignore[arg-type]
                pass
