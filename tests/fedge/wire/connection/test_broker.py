"""Settings of a broker."""

from __future__ import annotations

from fedge.wire.connection.broker import BrokerSettings


def test_password_is_not_shown():
    assert "secret" not in repr(BrokerSettings("h", username="u", password="secret"))
