"""Every reason that a broker can give is told, and leads to the right action."""

from __future__ import annotations

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedge.wire.connection.reasons import MEANINGS, describe_reason, explain_lacking, find_meaning

ENDS = (0x85, 0x86, 0x87, 0x8A, 0x8C, 0x8F, 0x90, 0x95, 0x99, 0x9A, 0x9B, 0x9D, 0xA1, 0xA2)


def codes(packet: int) -> list[int]:
    return [code for code, names in ReasonCode.names.items() if any(packet in types for types in names.values())]


@pytest.mark.parametrize(
    "packet", [PacketTypes.CONNACK, PacketTypes.SUBACK, PacketTypes.PUBACK, PacketTypes.DISCONNECT]
)
def test_each_code_of_a_failure_has_a_meaning(packet: int) -> None:
    assert {code for code in codes(packet) if code >= 0x80} <= set(MEANINGS)


@pytest.mark.parametrize("code", codes(PacketTypes.CONNACK) + codes(PacketTypes.DISCONNECT))
def test_what_only_a_person_can_change_ends_and_the_rest_is_tried_again(code: int) -> None:
    packet = PacketTypes.CONNACK if code in codes(PacketTypes.CONNACK) else PacketTypes.DISCONNECT
    assert find_meaning(ReasonCode(packet, identifier=code)).final == (code in ENDS)


def test_a_code_of_the_future_is_tried_again() -> None:
    code = ReasonCode(PacketTypes.CONNACK)
    code.value = 0xF0
    assert not find_meaning(code).final


def test_the_brokers_own_words_are_told() -> None:
    moved = Properties(PacketTypes.CONNACK)
    moved.ReasonString, moved.ServerReference = "since May", "other:1883"
    assert describe_reason(ReasonCode(PacketTypes.CONNACK, identifier=0x9D), moved) == (
        "Server moved (0x9d), 'since May', the other one is 'other:1883': give --broker its new address"
    )


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RetainAvailable", 0, "keeps no retained messages"),
        ("MaximumQoS", 0, "knows QoS 0 alone"),
        ("WildcardSubscriptionAvailable", 0, "allows no wildcards"),
        ("MaximumPacketSize", 4095, "takes packets of 4,095 bytes at most, and fedge needs 4,096"),
        ("MaximumPacketSize", 4096, ""),
        ("SharedSubscriptionAvailable", 0, ""),
    ],
)
def test_what_a_broker_announces_that_it_cannot_do(name: str, value: int, told: str) -> None:
    properties = Properties(PacketTypes.CONNACK)
    setattr(properties, name, value)
    found = explain_lacking(properties, 4096)
    assert told in found
    assert bool(told) == bool(found)


def test_a_broker_of_3_1_1_announces_nothing() -> None:
    assert explain_lacking(None, 4096) == ""
