"""Names of the MQTT topics, which message each carries, and names of the clients (docs/protocol.md).

fedge/1/{federation}/agents/{id}/status            Status, retained, last will      agent -> all
fedge/1/{federation}/agents/{id}/context           Context                          agent -> coordinator
fedge/1/{federation}/agents/{id}/orders            Order                            coordinator -> agent
fedge/1/{federation}/agents/{id}/reports           Report                           agent -> coordinator
fedge/1/{federation}/agents/{id}/acks              Ack                              coordinator -> agent
fedge/1/{federation}/agents/{id}/wants             Want                             agent -> coordinator
fedge/1/{federation}/coordinator/wants/{id}        Want                             coordinator -> agent
fedge/1/{federation}/agents/{id}/health            Health, retained                 runtime -> all
fedge/1/{federation}/agents/{id}/release-wants     Want                             runtime -> rollout
fedge/1/{federation}/agents/{id}/renewal           request for a certificate, PEM, retained    agent -> authority
fedge/1/{federation}/agents/{id}/certificate       certificate, PEM, retained       authority -> agent
fedge/1/{federation}/agents/{id}/predict           a sample                         sensor -> runtime
fedge/1/{federation}/agents/{id}/feedback          a sample's true label            sensor -> runtime
fedge/1/{federation}/agents/{id}/predictions       the answer to either             runtime -> sensor
fedge/1/{federation}/agents/{id}/introduced        Health, retained                 runtime -> coordinator
fedge/1/{federation}/rollout                       Announcement, retained           rollout -> all
fedge/1/{federation}/introduction                  Rollout, retained                coordinator -> runtimes
fedge/1/{federation}/revocations                   list of the authority, retained  coordinator -> all
fedge/1/{federation}/coordinator/beacon            Beacon, retained                 coordinator -> all
fedge/1/{federation}/coordinator/claims            Claim, retained                  coordinator -> coordinator
fedge/1/{federation}/blobs/{digest}/{offset}       bytes of a model from offset on  coordinator -> agents
fedge/1/{federation}/agents/{id}/blobs/{digest}/{offset}  bytes of an update        agent -> coordinator
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

ROOT = "fedge/1"
"""The root of all topics. If a broker gives us only a part of its topics, `fedge.wire.transport` adds a prefix."""
MAX_CLIENT_ID: Final = 100
"""Most characters of a client id; VerneMQ takes no more by default, AWS IoT takes 128."""
MAX_CLIENT_PREFIX: Final = 28
"""Most characters of a prefix before the client id."""

OUTSIDE: Final = "$outside/"
"""Prefix that marks a topic that cannot be ours, since it is not below the topic prefix."""

INTAKES: Final = "intakes"
MODELS: Final = "models"
"""Names of the groups of subscribers to reports, and to Wants of models. Each message goes to one member (MQTT 5)."""

ClientRole = Literal["agent", "serve", "coordinator", "intake", "introduction", "rollout", "status", "renewal"]


@dataclass(frozen=True, slots=True)
class Topics:
    """All topic names of one federation. `device_id` may be "+" to build a subscription."""

    federation: str

    @property
    def prefix(self) -> str:
        """Common start of all topics, without the final slash."""
        return f"{ROOT}/{self.federation}"

    def make_agent_topic(self, device_id: str, leaf: str) -> str:
        """Return a topic of one device; `leaf` is the topic's last level in the list above."""
        return f"{self.prefix}/agents/{device_id}/{leaf}"

    def make_shared_filter(self, group: str, secret: str, topic_filter: str) -> str:
        """Return the shared filter by which dispatcher, intakes or model servers divide messages among themselves.

        Only they know `secret`. A broker gives each message to one member of a group before it checks whether that
        member may read it. So anybody who can name the group could make messages vanish.
        """
        return f"$share/{group}-{secret}/{topic_filter}"

    @property
    def rollout(self) -> str:
        """The topic that announces the fleet's rollout."""
        return f"{self.prefix}/rollout"

    @property
    def introduction(self) -> str:
        """The topic that announces how far the personal bundles of a campaign may go."""
        return f"{self.prefix}/introduction"

    @property
    def revocations(self) -> str:
        """The topic of certificates that the federation's authority revoked (CRL, DER)."""
        return f"{self.prefix}/revocations"

    @property
    def beacon(self) -> str:
        """The topic of the coordinator's time and version."""
        return f"{self.prefix}/coordinator/beacon"

    @property
    def claims(self) -> str:
        """The topic where coordinators hear of each other."""
        return f"{self.prefix}/coordinator/claims"

    def make_wants_topic(self, device_id: str) -> str:
        """Return the topic of the coordinator's requests to a device for an update's bytes."""
        return f"{self.prefix}/coordinator/wants/{device_id}"

    def make_model_topic(self, digest: str, offset: int | str = "+") -> str:
        """Return the topic of a model's bytes on the way down, one copy for all receivers."""
        return f"{self.prefix}/blobs/{digest}/{offset}"

    def make_update_topic(self, device_id: str, digest: str = "+", offset: int | str = "+") -> str:
        """Return the topic of an update's bytes on the way up."""
        return f"{self.prefix}/agents/{device_id}/blobs/{digest}/{offset}"

    def make_client_id(self, role: ClientRole, name: str = "") -> str:
        """Return a process's client id; two processes with one id keep disconnecting each other.

        Names hold no colon, so ids are unique by role, federation and name; long ones end in their SHA-256.
        """
        full = ":".join((role, self.federation, name) if name else (role, self.federation))
        return full if len(full) <= MAX_CLIENT_ID else f"{role}:{hashlib.sha256(full.encode()).hexdigest()}"

    def split(self, topic: str) -> tuple[str, ...]:
        """Return the levels below the prefix, or () for a foreign topic."""
        head = self.prefix + "/"
        return tuple(topic[len(head) :].split("/")) if topic.startswith(head) else ()


def strip_share(topic_filter: str) -> str:
    """Return the plain filter of a shared one ($share/GROUP/FILTER), and other filters unchanged."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith("$share/") else topic_filter


def add_prefix(prefix: str, topic: str) -> str:
    """Return a topic or filter with `prefix`, perhaps "", below which a broker has all our topics."""
    if not prefix:
        return topic
    plain = strip_share(topic)
    return f"{topic.removesuffix(plain)}{prefix}/{plain}"


def remove_prefix(prefix: str, topic: str) -> str:
    """Undo `add_prefix`; a topic that is not below the prefix gets `OUTSIDE`."""
    if not prefix:
        return topic
    return topic.removeprefix(f"{prefix}/") if topic.startswith(f"{prefix}/") else f"{OUTSIDE}{topic}"
