"""Explanations of why there is no connection or why it ended, with advice on what to check."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import paho.mqtt.client as paho

from fedge.errors import ConfigError
from fedge.identity.authority import explain_certificate_fault
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.reasons import TAKEN_OVER
from fedge.wire.connection.route import ProxyError, explain_outage
from fedge.wire.connection.window import Publish

CLOSED_EARLY: Final = "the broker closed the connection before it let us in"
CHECK_TLS: Final = (
    "over TLS a broker does so when it requires a client certificate (require_certificate) and gets none, or one that "
    "is expired or not signed by the CA that it trusts (cafile): check cert_file and key_file here and its own log"
)
CHECK_WEB: Final = (
    "check that this port speaks HTTP, which carries WebSockets (a port for plain MQTT is given without ws://), that "
    "the broker has room for one more (max_connections), and its log"
)
CHECK_REVOKED: Final = (
    "the federation's authority has revoked the certificate in cert_file: ask for a new start-up kit (fedge provision "
    "device), and enrol this machine with it"
)
CHECK_PLAIN: Final = (
    "check that this port speaks MQTT without TLS (with TLS, ca_file is needed), that the broker has room for one more "
    "(max_connections), and its log"
)
CHECK_TWICE: Final = (
    "a broker closes at once on one of two that have one client id: look for another process that speaks as this one, "
    "such as two devices of one --id, or one that was started twice"
)
CHECK_SENT: Final = (
    "a broker also hangs up, in place of an answer, on a message that its access list forbids or that is too large for "
    "it. See its log; unanswered were"
)
MAX_NAMED: Final = 3
"""Most messages that a log line names."""
UNTOLD: Final = frozenset({0, 0x80, 0x81, 0x82, 0x83})
"""Reason codes of a connection's end that do not tell its cause."""
LOST: Final = "the connection broke"
NO_ANSWER: Final = "nobody answered within the keep-alive: the network between us and the broker is gone, or it hangs"
NOT_MQTT: Final = "what came is neither MQTT 5 nor 3.1.1"
SILENT: Final = "nothing answers in MQTT (no CONNACK)"
REVOKED: Final = "certificate revoked"
OTHER_NAME: Final = frozenset({62, 64})
"""OpenSSL's error codes for a certificate without this name or address."""


class RefusedError(Exception):
    """The broker refused us, or there is none.

    `final` is whether it always will; `older` whether it may know only MQTT 3.1.1; `closed_early` whether it gave no
    reason; `alien` whether what answers may be no broker.
    """

    def __init__(
        self, reason: str, *, final: bool = False, older: bool = False, closed_early: bool = False, alien: bool = False
    ) -> None:
        super().__init__(reason)
        self.final = final
        self.older = older or closed_early
        self.closed_early = closed_early
        self.alien = alien or closed_early


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a connection ended. `code` is that of the broker's DISCONNECT (MQTT 5), or 0 without one."""

    reason: str
    code: int = 0
    final: bool = False


def make_refusal(error: RefusedError | OSError | ConfigError, settings: BrokerSettings) -> RefusedError:
    """Return a refusal that says in words why there is no connection."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"certificate: {error.verify_message}"
        if error.verify_code in OTHER_NAME:
            reason += f" (the broker's certificate does not name {settings.host}: call it as its certificate does)"
        return RefusedError(reason, final=True)
    if isinstance(error, ProxyError):
        return RefusedError(str(error), final=error.final)
    if isinstance(error, OSError):
        alien = isinstance(error, ssl.SSLError | paho.WebsocketConnectionError)
        return RefusedError(explain_outage(error, settings.host), alien=alien)
    return RefusedError(str(error))


def explain_hang_up(settings: BrokerSettings) -> str:
    """Return why a broker may have hung up without a reason, such as a fault of our certificate."""
    if settings.path is not None:
        return CHECK_WEB
    if settings.ca_file is None:
        return CHECK_PLAIN
    return (
        "" if settings.cert_file is None else explain_certificate_fault(settings.cert_file, settings.ca_file)
    ) or CHECK_TLS


def explain_endings(ending: Ending, unanswered: Sequence[Publish]) -> str:
    """Return what usually causes several connections in a row to end at once."""
    if ending.reason == NO_ANSWER or ending.code not in UNTOLD | {TAKEN_OVER}:
        return ending.reason
    if ending.code == TAKEN_OVER or not unanswered:
        return CHECK_TWICE
    sent = [f"{p.topic} ({len(p.payload)} bytes{', retained' if p.retain else ''})" for p in unanswered[:MAX_NAMED]]
    return f"{CHECK_TWICE}. {CHECK_SENT} {', '.join(sent)}"
