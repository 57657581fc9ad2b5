"""Addresses of brokers, and what answers there."""

from __future__ import annotations

import pytest

from fedge.errors import ConfigError
from fedge.route import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("pi", Address("pi", 1883)),
        ("10.0.0.7:99", Address("10.0.0.7", 99)),
        ("[::1]:8883", Address("::1", 8883)),
        ("[::1]", Address("::1", 1883)),
        ("[fe80::1%eth0]:1883", Address("fe80::1%eth0", 1883)),
        ("ws://pi", Address("pi", 80, "/mqtt")),
        ("ws://pi:8083/", Address("pi", 8083, "/")),
        ("wss://pi", Address("pi", 443, "/mqtt", secure=True)),
        ("wss://[::1]:8084/a/b?c=d", Address("::1", 8084, "/a/b?c=d", secure=True)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1883", "pi:", "pi:0", "pi:65536", "pi:x", "::1", "mqtt://pi", "pi 1", "pi/mqtt", "pi:1883/mqtt"),
        *("http://pi", "ws://", "ws://me@pi", "ws://pi:0", "ws://pi/a b", "[fe80::1%]:1", "[::1%e/0]", "pi%eth0"),
    ],
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text)


def test_the_zone_of_an_address_is_no_part_of_its_name() -> None:
    assert parse_address("[fe80::1%eth0]:1883").name == "fe80::1"
