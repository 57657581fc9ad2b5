"""Mosquitto's configuration, for an open broker on this machine or a broker for the members of a federation.

The broker for members admits clients whose certificate the federation's authority has signed and not revoked, over TLS
1.2 or later, under the name in the certificate. Its access list says who may publish and subscribe to what
(docs/protocol.md). The configuration is for Mosquitto 2.0, which reads the revocation list only at its start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedge.identity.names import CRL
from fedge.membership.credentials import CA, CERTIFICATE, KEY
from fedge.wire.topics import ROOT, add_prefix

ACCESS_LIST: Final = "acl"
MAX_PACKET_BYTES: Final = 2 * 1024 * 1024
"""Largest packet, as announced to clients; chunks are 512 KiB."""
MAX_QUEUED_BYTES: Final = 256 * 1024 * 1024
"""Most bytes queued for a client. Beyond them Mosquitto drops messages silently; a receiver never asks for so much
(`fedge.wire.transfer`)."""
MEMORY_BYTES: Final = 1024 * 1024 * 1024
"""Most memory of the whole broker, enough for four full queues and small enough for 32-bit systems. Beyond it Mosquitto
refuses messages."""
SESSION_LASTS: Final = "7d"
"""Time after which an absent client is forgotten together with its queue; fedge's own clients ask for an hour."""


def _format_limits() -> str:
    return f"""\
set_tcp_nodelay true
max_packet_size {MAX_PACKET_BYTES}
max_queued_messages 0
max_queued_bytes {MAX_QUEUED_BYTES}
# beyond this the broker refuses messages instead of being killed for want of memory
memory_limit {MEMORY_BYTES}
# what waits for a client that stays away goes with its session
persistent_client_expiration {SESSION_LASTS}
"""


def format_open_listener(host: str, port: int) -> str:
    """Return the configuration of a listener that admits everybody without a name."""
    return f"listener {port} {host}\nallow_anonymous true\n{_format_limits()}"


def format_global_settings() -> str:
    """Return the settings that must stand once, before the first listener for members."""
    return f"per_listener_settings true\n{_format_limits()}"


def format_member_listener(identity: Path, rules: Path, port: int, host: str = "") -> str:
    """Return a federation's listener, with its own authority and access list; a broker may have many.

    No `use_username_as_clientid`: a device's agent and runtime share a name, and two clients with one client id
    disconnect each other.

    Args:
        identity: folder of the broker's identity, including the revocation list.
        rules: folder of the access list.
        port: TCP port to listen on.
        host: address to listen on; by default all addresses of the machine.
    """
    return f"""\
{f"listener {port} {host}".rstrip()}
cafile {identity / CA}
crlfile {identity / CRL}
certfile {identity / CERTIFICATE}
keyfile {identity / KEY}
tls_version tlsv1.2
allow_anonymous false
require_certificate true
use_identity_as_username true
acl_file {rules / ACCESS_LIST}
"""


def format_access_list(federation: str, topic_prefix: str = "") -> str:
    """Return the access list of a federation; %u in it stands for the name in a client's certificate."""
    here = add_prefix(topic_prefix, f"{ROOT}/{federation}")
    return f"""\
# A device speaks for itself alone, and hears what is for it or for all.
pattern write {here}/agents/%u/#
pattern read {here}/agents/%u/#
pattern read {here}/coordinator/wants/%u
pattern read {here}/coordinator/beacon
pattern read {here}/blobs/#
pattern read {here}/rollout
pattern read {here}/introduction
pattern read {here}/revocations

user coordinator
topic readwrite {here}/#

# The two below are not devices: what the patterns would grant to devices of their names is denied, which goes first.

# fedge rollout start
user rollout
topic deny {here}/agents/rollout/#
topic deny {here}/coordinator/#
topic deny {here}/introduction
topic write {here}/rollout
topic write {here}/blobs/#
topic read {here}/agents/+/health
topic read {here}/agents/+/release-wants

# fedge status --broker
user status
topic deny {here}/agents/status/#
topic deny {here}/coordinator/#
topic deny {here}/blobs/#
topic deny {here}/rollout
topic deny {here}/introduction
topic read {here}/agents/+/status

# These say and hear nothing at the broker.
user broker
topic deny {here}/#

user relay
topic deny {here}/#

user operator
topic deny {here}/#

# fedge coordinator --role intake, or blobs
user intake
topic deny {here}/agents/intake/#
topic deny {here}/rollout
topic deny {here}/introduction
topic read {here}/agents/+/status
topic read {here}/agents/+/reports
topic read {here}/agents/+/wants
topic read {here}/agents/+/blobs/#
topic write {here}/agents/+/acks
topic write {here}/coordinator/wants/+
topic write {here}/blobs/#
"""
