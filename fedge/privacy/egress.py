"""The owner's rules on what may leave a device, and the door that every message passes.

The owner's file (HOME/egress.toml, or another file) names a preset and further kinds (`fedge.steps.contract.Reveals`):

    [egress]
    preset = "strict"
    allow = "loss, machine"

`Rules` remove from a message what the owner withholds. The `Door` is part of the transport (`Transport`, argument
`door`). It does not rely on that removal, but checks each message again and records it before it leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from fedge.errors import ConfigError, ProtocolError, TransportError, raise_as
from fedge.membership.signed_messages import open_unverified
from fedge.privacy.ledger import Ledger
from fedge.settings import read_section, resolve
from fedge.steps.contract import Action, Reveals, decode_result, encode_body, fields_of
from fedge.system.text import Heading, suggest_nearest
from fedge.wire.messages import (
    AtWork,
    Capabilities,
    Context,
    Health,
    Outcome,
    Quality,
    Report,
    Status,
    Want,
    decode_message,
    encode_message,
    iterate_blobs,
)
from fedge.wire.topics import ROOT, Topics

S = TypeVar("S", bound=Struct)
Revealed = Mapping[str, Reveals]

FILE: Final = "egress.toml"
"""Name of the file in a device's home that holds the owner's rules, unless --egress names another file."""
RULES_HELP: Final = "This file of the owner says what may leave; by default it is HOME/egress.toml."
RulesFile = Annotated[Path | None, Heading.EGRESS, RULES_HELP]

PRIVACY_LEDGER: Final = "privacy.json"
"""Name of the file in a device's home with the privacy budget spent by training (`edge_agent.privacy.dp_ledger`)."""

REVEALED_FIELDS: Final[Mapping[type[Struct], Revealed]] = {
    Status: dict.fromkeys(("n_samples", "data_version", "n_arrived", "site"), Reveals.COUNT),
    Capabilities: dict.fromkeys(("fedge_version", "python_version", "machine", "cpu_count"), Reveals.MACHINE),
    Context: {
        **dict.fromkeys(("at", "cpu_ghz"), Reveals.MACHINE),
        **dict.fromkeys(
            ("load", "free_ram_gb", "free_disk_gb", "battery", "temperature_c", "link_mbit_s"), Reveals.LOAD
        ),
        "n_samples": Reveals.COUNT,
    },
    Report: {"seconds": Reveals.LOAD},
    Want: {},
    Health: {
        "phase": Reveals.VERDICT,
        "reason": Reveals.TEXT,
        "temperature_c": Reveals.LOAD,
        **dict.fromkeys(("n_predictions", "n_failed", "drift", "drift_kind", "drift_release", "outliers"), Reveals.USE),
    },
    AtWork: dict.fromkeys(("right", "wrong", "recent", "covered", "coverage"), Reveals.PERSONAL),
    Quality: {
        "n": Reveals.COUNT,
        **dict.fromkeys(("accuracy", "gate_entropy", "free_energy"), Reveals.LOSS),
        "latency_ms": Reveals.LOAD,
    },
}
"""The kind that each field of a message reveals, results of steps aside; unlisted fields reveal nothing of the data."""

INTRODUCED: Final[Revealed] = {
    **REVEALED_FIELDS[Health],
    **dict.fromkeys(("before", "now"), Reveals.PERSONAL),
}
"""The kinds of a Health about an introduction, whose figures are of bundles that have learned from all samples."""

PRESETS: Final[Mapping[str, frozenset[Reveals]]] = {
    "strict": frozenset(
        {Reveals.NOTHING, Reveals.COUNT, Reveals.UPDATE, Reveals.ACCOUNTED, Reveals.MASKED, Reveals.VERDICT}
    ),
    "default": frozenset(Reveals) - {Reveals.PRIVATE, Reveals.PERSONAL},
}

MESSAGES: Final[Mapping[str, Any]] = {
    "status": Status,
    "context": Context,
    "reports": Report,
    "wants": Want,
    "release-wants": Want,
    "health": Health,
    "introduced": Health,
}
"""A device's messages by the last level of the topic. Devices also send blobs, predictions and certificate requests."""

REQUEST: Final = b"-----BEGIN CERTIFICATE REQUEST-----"
"""First bytes of a certificate request, whose name and public key the previous certificate already showed."""

REMEMBERED: Final = 256
"""Most remembered blobs of reports that have passed; a report names one or two, and 16 orders are open at a time."""


class EgressSettings(Struct, frozen=True, kw_only=True):
    """Section [egress] of the owner's file."""

    preset: Annotated[Literal["default", "strict"], "These kinds may leave."] = "default"
    allow: Annotated[str, "These further kinds, comma-separated, may leave."] = ""
    forbid: Annotated[str, "These kinds of the preset, comma-separated, may not leave."] = ""


class WithheldError(Exception):
    """A required field of a message may not leave."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The owner's rules, as the kinds that may leave."""

    allowed: frozenset[Reveals] = PRESETS["default"]

    @property
    def withheld(self) -> tuple[Reveals, ...]:
        """The kinds that may not leave."""
        return tuple(kind for kind in Reveals if kind not in self.allowed)

    def strip(self, message: S, revealed: Revealed | None = None) -> S:
        """Return the message without the fields that may not leave.

        `revealed` gives each field's kind; if None, `REVEALED_FIELDS` does.

        Raises:
            WithheldError: a required field is withheld.
        """
        revealed = REVEALED_FIELDS[type(message)] if revealed is None else revealed
        left_out: dict[str, object] = {}
        for field in fields_of(type(message)):
            value = getattr(message, field.name)
            kind = revealed.get(field.name, Reveals.NOTHING)
            if kind not in self.allowed and field.required:
                raise WithheldError(f"{field.name} of {type(message).__name__} reveals {kind.words}")
            if kind not in self.allowed:
                left_out[field.name] = _get_default(field)
            elif type(value) in REVEALED_FIELDS:
                try:
                    left_out[field.name] = self.strip(value)
                except WithheldError:
                    if field.required:
                        raise
                    left_out[field.name] = _get_default(field)
        return msgspec.structs.replace(message, **left_out)

    def allows(self, action: Action) -> bool:
        """Return whether a device with these rules can carry out the action unchanged."""
        return action.without(self.withheld) == action


ALL: Final = Rules(frozenset(Reveals))
"""The rules of simulated devices, which have no owner."""


def without_figures(rules: Rules, home: Path) -> Rules:
    """Return a runtime's rules, which forbid noise-free figures once this home has promised differential privacy.

    The outcome of a rollout, one bit (docs/privacy.md), may still leave if the owner allows it.
    """
    private = os.path.lexists(home / PRIVACY_LEDGER)
    return Rules(rules.allowed - {Reveals.LOSS, Reveals.PERSONAL, Reveals.USE, Reveals.TEXT}) if private else rules


def read_rules(home: Path | None, own: Path | None, config: Path | None) -> Rules:
    """Read the owner's rules from `own` or HOME/egress.toml; without either, the default preset.

    Raises:
        ConfigError: the file is wrong or missing, or `config`, which configures a process, has a section [egress].
    """
    if read_section(config, "egress"):
        raise ConfigError(
            f"[egress] belongs into a file of the owner's own, HOME/{FILE} or --egress, not into {config}"
        )
    if own is None and home is not None and os.path.lexists(home / FILE):  # a link to nowhere is no permission
        own = home / FILE
    settings = resolve(EgressSettings, "egress", own, {})
    allow, forbid = _parse_kinds("allow", settings.allow), _parse_kinds("forbid", settings.forbid)
    if both := allow & forbid:
        raise ConfigError(f"[egress] of {own} allows and forbids {min(both)}")
    return Rules((PRESETS[settings.preset] | allow) - forbid)


def _parse_kinds(key: str, text: str) -> frozenset[Reveals]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = [str(kind) for kind in Reveals if kind is not Reveals.NOTHING]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"{key} in [egress]: no kind is called {word!r}{suggest_nearest(word, known)}; fedge egress --rules"
            )
    return frozenset(map(Reveals, words))


def _get_default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def iterate_kinds(message: Struct, revealed: Revealed | None = None) -> Iterator[Reveals]:
    """Yield the kinds of a message's non-default and required fields; `revealed` is as for `Rules.strip`."""
    revealed = REVEALED_FIELDS[type(message)] if revealed is None else revealed
    for field in fields_of(type(message)):
        value = getattr(message, field.name)
        if field.required or value != _get_default(field):
            yield revealed.get(field.name, Reveals.NOTHING)
        if type(value) in REVEALED_FIELDS:
            yield from iterate_kinds(value)


@dataclass(frozen=True, slots=True)
class Seen:
    """The door's view of a message: its type, its step and order, and the kinds that it reveals.

    `blobs` are the blobs that may follow the message, by digest.
    """

    message: str
    about: str
    kinds: frozenset[Reveals]
    blobs: tuple[tuple[str, Seen], ...] = ()


class Door:
    """The exit for everything that leaves a device. It stops withheld data, and records the rest before it leaves.

    Args:
        rules: the owner's rules.
        home: the device's home, with its ledger; if None, nothing is recorded.
        topics: the federation's topics.
        action_of: returns the action of an open order, or None if there is no such order.
    """

    def __init__(
        self, rules: Rules, home: Path | None, topics: Topics, action_of: Callable[[str], Action | None]
    ) -> None:
        self.rules = rules
        self._home = home
        self._ledger: Ledger | None = None
        self._topics = topics
        self._action_of = action_of
        self._blobs: dict[str, Seen] = {}

    def __call__(self, topic: str, payload: bytes) -> None:
        """Let a message out.

        Raises:
            TransportError: the owner withholds a part of the message, or it is not a device's message.
            StoreError: the message cannot be recorded.
        """
        with raise_as(TransportError, "held back", on=ProtocolError):
            seen = self._inspect(topic, payload)
        if forbidden := sorted(seen.kinds - self.rules.allowed):
            words = ", ".join(kind.words for kind in forbidden)
            raise TransportError(f"held back: the device's owner does not allow it to tell {words}")
        if self._home is not None:
            self._ledger = self._ledger or Ledger(self._home)
            self._ledger.record(seen.message, seen.about, seen.kinds - {Reveals.NOTHING}, len(payload))

        self._blobs |= dict(seen.blobs)
        for digest in list(self._blobs)[:-REMEMBERED]:
            del self._blobs[digest]

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def _inspect(self, topic: str, payload: bytes) -> Seen:
        leaf, *rest = self._topics.split(topic)[2:] or ("",)
        if leaf in MESSAGES:
            data = open_unverified(payload)
            message: Any = decode_message(data, MESSAGES[leaf])
            _require_same(encode_message(message), data)
            if isinstance(message, Report):
                return self._inspect_report(message)
            kinds = iterate_kinds(message, INTRODUCED if leaf == "introduced" else None)
            return Seen(leaf, getattr(message, "order_id", ""), frozenset(kinds))
        if (leaf == "renewal" and payload.startswith(REQUEST)) or (leaf == "certificate" and not payload):
            return Seen(leaf, "", frozenset())
        if leaf == "blobs" and rest and rest[0] in self._blobs:
            return self._blobs[rest[0]]
        if leaf == "predictions" or not topic.startswith(f"{ROOT}/"):  # a sensor chooses the topic of its answer
            return Seen("predictions", "", frozenset({Reveals.ANSWERS}))
        raise TransportError(f"held back: nothing that a device sends goes to {topic}")

    def _inspect_report(self, report: Report) -> Seen:
        """View a report together with its result and the blobs that it names; a refusal has neither."""
        if report.outcome is not Outcome.DONE:
            if report.body or report.blobs:
                raise ProtocolError("malformed", "the report is a refusal, but has a result or blobs")
            return Seen("reports", report.order_id, frozenset(iterate_kinds(report)))
        action = self._action_of(report.order_id)
        if action is None:
            raise ProtocolError("unknown-order", f"no open order is called {report.order_id}")
        about, revealed, result = f"{action.STEP} {report.order_id}", action.reveals(), decode_result(report, action)
        _require_same(encode_body(result), report.body)
        if report.blobs != tuple(iterate_blobs(result)):
            raise ProtocolError("malformed", "the report's blobs are not those that the result names")
        blobs = tuple(
            (ref.digest, Seen("blobs", about, frozenset({kind})))
            for name, kind in revealed.items()
            for ref in iterate_blobs(getattr(result, name))
        )
        return Seen("reports", about, frozenset({*iterate_kinds(report), *iterate_kinds(result, revealed)}), blobs)


def _require_same(read: bytes, sent: bytes) -> None:
    """Check that a message holds nothing but the fields that were read; 1 and 1.0 count as the same.

    Raises:
        ProtocolError: the message has a field that no rule covers and that receivers ignore.
    """
    if msgspec.msgpack.decode(read) != msgspec.msgpack.decode(sent):
        raise ProtocolError("malformed", "the message has a field that its type does not have")
