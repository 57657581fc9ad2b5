"""The meaning of a broker's reason codes (MQTT 5, 2.4), whether trying again may help, and what to do.

paho translates the codes of MQTT 3.1.1: those of a CONNACK into 0x84 to 0x88, that of a SUBACK into 0x80.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paho.mqtt.reasoncodes import ReasonCode

TAKEN_OVER: Final = 0x8E
TOO_LARGE: Final = 0x95
NO_QOS: Final = 0x9B
NO_SHARES: Final = 0x9E


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a reason code and what to do.

    `final` is True if trying again does not help, because somebody must change something. `older` is True if the broker
    may know only MQTT 3.1.1, which is tried next.
    """

    do: str
    final: bool = False
    older: bool = False


LOG: Final = "the broker's log may say more"
BUSY: Final = "we come again; if it lasts, the broker has too much to do, or a limit that is too low for this fleet"
FORBIDDEN: Final = "see the broker's access list, and user name and password or the certificate"
MEANINGS: Final = {
    0x04: Meaning(LOG),
    0x80: Meaning(LOG, older=True),
    0x81: Meaning(f"it could not read what we sent; {LOG}", older=True),
    0x82: Meaning(f"one of us does not keep to MQTT; {LOG}", older=True),
    0x83: Meaning(f"a rule of this broker alone; {LOG}", older=True),
    0x84: Meaning("it knows neither MQTT 5 nor 3.1.1", older=True),
    0x85: Meaning(
        "it takes no such client id: see its rules, and --client-prefix; in MQTT 3.1.1 some say so of a keep-alive "
        "that is too long for them (--keepalive-s)",
        final=True,
    ),
    0x86: Meaning("see --username and --password", final=True),
    0x87: Meaning(FORBIDDEN, final=True),
    0x88: Meaning(BUSY),
    0x89: Meaning(BUSY),
    0x8A: Meaning(f"it has excluded this client: ask who runs it; {LOG}", final=True),
    0x8B: Meaning("it is being stopped; we come again"),
    0x8C: Meaning("it wants another way to log in than a password or a certificate", final=True),
    0x8D: Meaning("it had heard nothing from us for 1.5 times the keep-alive: the network or this machine hangs"),
    TAKEN_OVER: Meaning("another process connected with our client id"),
    0x8F: Meaning("it allows no such subscription: see its rules for topics, and --topic-prefix", final=True),
    0x90: Meaning("it allows no such topic: see its rules for topics, and --topic-prefix", final=True),
    0x91: Meaning("we come again"),
    0x92: Meaning(LOG),
    0x93: Meaning(f"we sent more at once than it takes; {LOG}"),
    0x94: Meaning(LOG),
    TOO_LARGE: Meaning("raise its limit (Mosquitto: max_packet_size, message_size_limit)", final=True),
    0x96: Meaning(BUSY),
    0x97: Meaning(BUSY),
    0x98: Meaning(f"somebody has ended the connection at the broker; {LOG}"),
    0x99: Meaning(f"it looks into payloads, and wants others than fedge's; {LOG}", final=True),
    0x9A: Meaning(
        "it keeps no retained messages, which fedge needs: allow them (Mosquitto: retain_available)", final=True
    ),
    NO_QOS: Meaning("it knows QoS 0 alone, and fedge needs QoS 1: allow it (Mosquitto: max_qos)", final=True),
    0x9C: Meaning("we come again; give --broker the other one's address if it lasts"),
    0x9D: Meaning("give --broker its new address", final=True),
    NO_SHARES: Meaning("it knows no shared subscriptions"),
    0x9F: Meaning(BUSY),
    0xA0: Meaning("the broker lets nobody stay longer; we come again"),
    0xA1: Meaning(LOG, final=True),
    0xA2: Meaning("it allows no wildcards in subscriptions, which fedge needs", final=True),
}
"""Meaning of every code that says that something is wrong."""
AGAIN: Final = frozenset({0x91, 0x96, 0x97})
"""Codes after which the broker may accept the same message or subscription a little later."""


def find_meaning(code: ReasonCode) -> Meaning:
    """Return the meaning of a reason code; an unknown code is not final."""
    return MEANINGS.get(code.value, Meaning(LOG))


def describe_reason(code: ReasonCode, properties: Any = None) -> str:
    """Describe a reason code: its name, its number, what the broker adds (`properties` of its packet), and advice."""
    said = [f"{code} (0x{code.value:02x})"]
    if words := getattr(properties, "ReasonString", ""):
        said.append(f"{words[:200]!r}")
    if elsewhere := getattr(properties, "ServerReference", ""):
        said.append(f"the other one is {elsewhere[:200]!r}")
    return f"{', '.join(said)}: {find_meaning(code).do}"


def explain_lacking(properties: Any, least_packet_bytes: int) -> str:
    """Return what fedge needs and a broker lacks by its CONNACK (MQTT 5), with advice, or ""."""
    if getattr(properties, "RetainAvailable", 1) == 0:
        return MEANINGS[0x9A].do
    if getattr(properties, "MaximumQoS", 1) == 0:
        return MEANINGS[NO_QOS].do
    if getattr(properties, "WildcardSubscriptionAvailable", 1) == 0:
        return MEANINGS[0xA2].do
    if (most := getattr(properties, "MaximumPacketSize", least_packet_bytes)) < least_packet_bytes:
        return (
            f"it takes packets of {most:,} bytes at most, and fedge needs {least_packet_bytes:,}: "
            f"{MEANINGS[TOO_LARGE].do}"
        )
    return ""
