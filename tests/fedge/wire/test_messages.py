"""Every message: round trip, prefixes refused, a table of malformed inputs, no other error from any bytes."""

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedge.errors import ProtocolError
from fedge.wire import messages
from fedge.wire.messages import (
    Capabilities,
    Context,
    Health,
    Message,
    Order,
    Phase,
    Report,
    Rollout,
    RolloutState,
    Status,
    Want,
    decode_message,
    encode_message,
)

DIGEST = "ab" * 32
REF = {"digest": DIGEST, "size_bytes": 10, "codec": "float32"}
ORDER: dict[str, Any] = {
    "type": "order", "id": "r.1.train.cam1", "device_id": "cam1", "run": "r", "round": 1, "label": "train", "seed": 7,
    "task_fingerprint": "0" * 16, "left_s": 60.5, "step": "train", "version": 1, "body": b"an action",
}  # fmt: skip
REPORT: dict[str, Any] = {
    "type": "report", "order_id": "r.1.train.cam1", "device_id": "cam1", "seconds": 1.5, "outcome": "done",
    "body": b"a result", "blobs": [REF],
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {
        "type": "status",
        "device_id": "cam1",
        "incarnation": "a1",
        "presence": "online",
        "release": 3,
        "capabilities": {"trains": True, "steps": {"train": 1}},
    },
    {"type": "context", "device_id": "cam1", "cpu_ghz": 1.5},
    ORDER,
    REPORT,
    *[
        {key: value for key, value in REPORT.items() if key not in {"body", "blobs"}}
        | {"outcome": outcome, "reason": "hot"}
        for outcome in ("declined", "failed", "unsupported")
    ],
    {"type": "ack", "order_id": "r.1.train.cam1", "device_id": "cam1", "accepted": True},
    {"type": "beacon", "at": 1e9, "fedge_version": "0.2.0"},
    {"type": "claim", "incarnation": "a", "since": 1e9, "where": "server:/srv/shop", "works": True, "to": "b"},
    {"type": "want", "device_id": "cam1", "digest": DIGEST, "ranges": [[0, 10]]},
    {
        "type": "announcement",
        "rollout": "AAAA",
        "signatures": {"ab": "cd"},
        "roots": {"2.root.json": "AAAA"},
    },
    {
        "type": "rollout",
        "id": "r5",
        "state": "running",
        "target": "5/manifest.json",
        "release": 5,
        "share": 0.1,
        "metadata": {"timestamp.json": REF},
    },
    {"type": "health", "device_id": "cam1", "at": 1e9, "phase": "trial", "release": 5, "now": {"n": 20}},
]


def made(fields: dict[str, Any]) -> Message:
    return msgspec.convert(fields, Message)  # type: ignore[call-overload, no-any-return]


def packed(fields: object, version: object = Order.VERSION) -> bytes:
    return msgspec.msgpack.encode([version, fields])


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ORDER.items() if key != name}


def refusal(data: bytes, kind: type[Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode_message(data, kind)
    return caught.value.name


def test_the_table_covers_every_message() -> None:
    assert {type(made(fields)) for fields in MESSAGES} == set(get_args(Message))


def test_what_agents_and_coordinators_say_is_version_2_and_the_rest_is_as_it_was() -> None:
    """Runtimes of fedge 0.1 read rollouts and speak of their health; what moves tensors is older than both."""
    second = {"Status", "Context", "Order", "Report", "Ack", "Beacon", "Claim"}
    for kind in get_args(Message):
        assert (2 if kind.__name__ in second else 1) == kind.VERSION
        (fields,) = [f for f in MESSAGES if type(made(f)) is kind][:1]
        assert msgspec.msgpack.decode(encode_message(made(fields)))[0] == kind.VERSION
        assert refusal(packed(fields, 3 - kind.VERSION), kind) == "version"


@pytest.mark.parametrize("fields", MESSAGES, ids=lambda f: f"{f['type']}")
def test_from_version_2_on_unknown_optional_fields_are_ignored(fields: dict[str, Any]) -> None:
    message = made(fields)
    more = packed(fields | {"colour": "red"}, type(message).VERSION)
    if type(message).VERSION == 2 or isinstance(message, Health | Rollout):
        assert decode_message(more, type(message)) == message
    else:
        assert refusal(more, type(message)) == "malformed"


def test_a_phase_and_a_state_of_a_later_version_begin_nothing_and_end_nothing() -> None:
    (health,) = (fields for fields in MESSAGES if fields["type"] == "health")
    (rollout,) = (fields for fields in MESSAGES if fields["type"] == "rollout")
    assert decode_message(packed(health | {"phase": "flying"}, 1), Health).phase is Phase.FAILED
    assert decode_message(packed(rollout | {"state": "halted"}, 1), Rollout).state is RolloutState.PAUSED


def test_references_of_a_later_version_are_read_from_version_2_on() -> None:
    later = {**REF, "colour": "red"}
    report = REPORT | {"blobs": [later]}
    order = ORDER | {"differences": {DIGEST: {"base": DIGEST, "blob": later, "wings": 2}}}
    plain = {"differences": {DIGEST: {"base": DIGEST, "blob": REF}}}
    assert decode_message(packed(report), Report) == decode_message(packed(REPORT), Report)
    assert decode_message(packed(order), Order) == decode_message(packed(ORDER | plain), Order)
    (rollout,) = [fields for fields in MESSAGES if fields["type"] == "rollout"]
    assert refusal(packed(rollout | {"metadata": {"timestamp.json": later}}, Rollout.VERSION), Rollout) == "malformed"


def test_capabilities_of_a_later_version_are_read() -> None:
    fields = MESSAGES[0] | {"capabilities": {"trains": True, "steps": {"train": 1}, "wings": 2}}
    assert decode_message(packed(fields), Status).capabilities == Capabilities(trains=True, steps={"train": 1})


@pytest.mark.parametrize("fields", MESSAGES, ids=lambda f: f"{f['type']}")
def test_round_trip(fields: dict[str, Any]) -> None:
    message = made(fields)
    assert decode_message(encode_message(message), type(message)) == message


@pytest.mark.parametrize("fields", MESSAGES, ids=lambda f: f"{f['type']}")
def test_every_prefix_and_every_extension_is_refused(fields: dict[str, Any]) -> None:
    message = made(fields)
    data = encode_message(message)
    for end in range(len(data)):
        assert refusal(data[:end], type(message)) == "malformed"
    assert refusal(data + b"\0", type(message)) == "malformed"


BAD_ORDERS = {
    "version": ("version", packed(ORDER, version=1)),
    "later version": ("version", packed(ORDER, version=3)),
    "version is text": ("malformed", packed(ORDER, version="2")),
    "no envelope": ("malformed", msgspec.msgpack.encode(ORDER)),
    "three parts": ("malformed", msgspec.msgpack.encode([2, ORDER, 0])),
    "unknown type": ("malformed", packed(ORDER | {"type": "shell"})),
    "no type": ("malformed", packed(without("type"))),
    "another message": ("unexpected-type", packed(REPORT)),
    "missing field": ("malformed", packed(without("seed"))),
    "no body": ("malformed", packed(without("body"))),
    "a body of text": ("malformed", packed(ORDER | {"body": "text"})),
    "a step with a slash": ("malformed", packed(ORDER | {"step": "package/module"})),
    "a path for a step": ("malformed", packed(ORDER | {"step": "package.module:Class"})),
    "text for a number": ("malformed", packed(ORDER | {"round": "1"})),
    "negative round": ("malformed", packed(ORDER | {"round": -1})),
    "id with a slash": ("malformed", packed(ORDER | {"device_id": "a/b"})),
    "id with a wildcard": ("malformed", packed(ORDER | {"device_id": "+"})),
    "id with a newline at its end": ("malformed", packed(ORDER | {"device_id": "cam1\n"})),
    "empty id": ("malformed", packed(ORDER | {"device_id": ""})),
    "no time left": ("malformed", packed(ORDER | {"left_s": 0})),
    "more than a day": ("malformed", packed(ORDER | {"left_s": 24 * 3600 + 1})),
    "until the year 128726": ("malformed", packed(ORDER | {"left_s": 4e12})),
    "time NaN": ("malformed", packed(ORDER | {"left_s": math.nan})),
    "time infinite": ("malformed", packed(ORDER | {"left_s": math.inf})),
    "too long": ("oversized", b"\0" * (messages.MAX_MESSAGE_BYTES + 1)),
    "nested too deeply": ("malformed", b"\x91" * 50_000),
}  # fmt: skip


@pytest.mark.parametrize(("name", "data"), BAD_ORDERS.values(), ids=BAD_ORDERS)
def test_malformed_orders_are_refused_by_name(name: str, data: bytes) -> None:
    assert refusal(data, Order) == name


BAD_REPORTS: dict[str, dict[str, Any]] = {
    "unknown outcome": {"outcome": "maybe"},
    "a number for a reason": {"outcome": "failed", "why": 7},
    "negative time": {"seconds": -1.0},
    "too many blobs": {"blobs": [REF] * 65},
    "digest in capitals": {"blobs": [REF | {"digest": "AB" * 32}]},
    "empty blob": {"blobs": [REF | {"size_bytes": 0}]},
    "unknown codec": {"blobs": [REF | {"codec": "pickle"}]},
}


@pytest.mark.parametrize("changes", BAD_REPORTS.values(), ids=BAD_REPORTS)
def test_reports_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    assert refusal(packed(REPORT | changes), Report) == "malformed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(value: float) -> None:
    assert refusal(packed({"type": "context", "device_id": "cam1", "temperature_c": value}), Context) == "not-finite"
    now = {"n": 20, "free_energy": value}
    health = {"type": "health", "device_id": "cam1", "at": 1e9, "phase": "trial", "release": 5, "now": now}
    assert refusal(packed(health, Health.VERSION), Health) == "not-finite"


def test_we_never_send_what_a_peer_would_refuse() -> None:
    with pytest.raises(ValueError, match="finite"):
        encode_message(Context(device_id="cam1", temperature_c=math.nan))
    with pytest.raises(ValueError, match="exceeds"):
        encode_message(Want(device_id="cam1", digest="x" * messages.MAX_MESSAGE_BYTES, ranges=((0, 1),)))


kinds = st.sampled_from(get_args(Message))


@given(data=st.binary(max_size=300), kind=kinds)
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_a_protocol_error(data: bytes, kind: type[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_message(data, kind)


@given(fields=st.sampled_from(MESSAGES), place=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_changed_byte_is_refused_or_gives_a_valid_message(fields: dict[str, Any], place: int, value: int) -> None:
    message = made(fields)
    data = bytearray(encode_message(message))
    data[place % len(data)] = value
    try:
        changed = decode_message(data, type(message))
    except ProtocolError:
        return
    assert decode_message(encode_message(changed), type(changed)) == changed


ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True)
finite = st.floats(allow_nan=False, allow_infinity=False)
statuses = st.builds(
    Status,
    device_id=ids,
    incarnation=ids,
    presence=st.sampled_from(messages.Presence),
    n_samples=st.integers(0, 2**53),
    capabilities=st.none() | st.builds(Capabilities, trains=st.booleans()),
)
contexts = st.builds(
    Context,
    device_id=ids,
    cpu_ghz=st.none() | finite.map(abs),
    battery=st.none() | st.floats(0, 1),
    temperature_c=finite,
)


@given(message=statuses | contexts)
@settings(max_examples=200, deadline=None)
def test_any_message_survives_the_wire(message: Status | Context) -> None:
    assert decode_message(encode_message(message), type(message)) == message
