"""Every message: round trip, prefixes refused, a table of malformed inputs, no other error from any bytes."""

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedge import messages
from fedge.errors import ProtocolError
from fedge.messages import Capabilities, Codec, Context, Message, Order, Report, Role, Status, Want, decode, encode
from fedge.step import Action, Result

DIGEST = "ab" * 32
REF = {"digest": DIGEST, "size_bytes": 10, "codec": "float32"}
SGD = {"steps": 3}
CALIBRATION = {"private": {"temperature": 1.0, "kappa": 0.0}}
POOLED = {"private": 0.5, "global": 0.5}
KEEP = {"type": "keep_part", "private": "head"}

ACTIONS: list[dict[str, Any]] = [
    {"type": "train", "starts": [{"model": REF}], "sgd": SGD},
    {"type": "profile", "extractor": REF},
    {"type": "trial", "global_model": REF, "expert": REF},
    {"type": "fit_candidates", "global_model": REF, "initial_model": REF, "sgd": SGD, "local_steps": 5},
    {"type": "fit_weights", "calibration": CALIBRATION, "pooled": [POOLED], "shrinkage": 20.0},
    {"type": "fit_energy", "calibration": CALIBRATION, "pooled": [POOLED], "shrinkage": 20.0},
    {
        "type": "fit_gate", "calibration": CALIBRATION, "pooled": POOLED, "shrinkage": 20.0,
        "beta": 0.5, "sgd": SGD, "release": 1,
    },
    {"type": "install", "global_model": REF, "release": 1, "method": "fedavg"},
    {"type": "fit_mixture", "experts": [{"model": REF}], "initial_model": REF, "sgd": SGD, "release": 1},
    {"type": "mean_features", "model": REF},
    {"type": "share_private", "keep": KEEP},
    {
        "type": "fit_pool", "global_model": REF, "part": "base", "keep": KEEP, "initial": REF, "pool": [REF, None],
        "own": 0, "release": 1,
    },
    {"type": "describe_labels", "epsilon": 3.0},
    {"type": "route", "gate": REF},
    {"type": "install_bundle", "files": {"a": REF, "b": REF, "c": REF}, "release": 1},
]  # fmt: skip
RESULTS: list[dict[str, Any]] = [
    {"type": "trained", "update": REF, "n_samples": 5, "loss_before": 2.0, "loss_after": 1.0, "gradient_norm": 0.1},
    {"type": "profiled", "profile": [0.1, 0.9], "extractor": DIGEST, "n_samples": 5},
    {"type": "tried", "delta": -0.5},
    {"type": "candidates_fitted", "losses": {"private": [0.5] * 16}, "n_validation": 3},
    {"type": "weights_fitted", "weights": [POOLED], "n_validation": 3},
    {"type": "energy_fitted", "pooled_losses": [1.0], "beta_losses": [[1.0, 1.0, 1.0]], "n_validation": 3},
    {"type": "installed", "bundle_digest": DIGEST, "roles": ["private"], "max_abs_diff": 1e-6},
    {"type": "features_measured", "mean": [0.5, 1.5], "n_samples": 5},
    {"type": "private_shared", "module": REF},
    {"type": "labels_described", "feature": -1, "n_samples": 0},
    {"type": "routed", "shares": [0.25, 0.75], "n_samples": 5},
    {"type": "declined", "reason": "battery"},
    {"type": "failed", "reason": "no blob"},
]
ORDER: dict[str, Any] = {
    "type": "order", "id": "r.1.train.cam1", "device_id": "cam1", "round": 1, "step": "train", "seed": 7,
    "task_fingerprint": "0" * 16, "deadline": 1e9, "action": ACTIONS[0],
}  # fmt: skip
REPORT: dict[str, Any] = {
    "type": "report", "order_id": "r.1.train.cam1", "device_id": "cam1", "seconds": 1.5, "result": RESULTS[0],
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {
        "type": "status",
        "device_id": "cam1",
        "incarnation": "a1",
        "presence": "online",
        "capabilities": {"trains": True},
    },
    {"type": "context", "device_id": "cam1", "cpu_ghz": 1.5},
    *[ORDER | {"action": action} for action in ACTIONS],
    *[REPORT | {"result": result} for result in RESULTS],
    {"type": "ack", "order_id": "r.1.train.cam1", "device_id": "cam1", "accepted": True},
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


def profile_of(**change: object) -> dict[str, Any]:
    return ORDER | {"action": {"type": "profile", "extractor": REF | change}}


def packed(fields: object, version: object = messages.PROTOCOL_VERSION) -> bytes:
    return msgspec.msgpack.encode([version, fields])


def refusal(data: bytes, kind: type[Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(data, kind)
    return caught.value.name


def test_the_table_covers_every_message_action_and_result() -> None:
    assert {type(made(fields)) for fields in MESSAGES} == set(get_args(Message))
    assert {type(made(ORDER | {"action": a}).action) for a in ACTIONS} == set(get_args(Action))  # type: ignore[union-attr]
    assert {type(made(REPORT | {"result": r}).result) for r in RESULTS} == set(get_args(Result))  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", MESSAGES, ids=lambda f: f"{f['type']}")
def test_round_trip(fields: dict[str, Any]) -> None:
    message = made(fields)
    assert decode(encode(message), type(message)) == message


@pytest.mark.parametrize("fields", MESSAGES, ids=lambda f: f"{f['type']}")
def test_every_prefix_and_every_extension_is_refused(fields: dict[str, Any]) -> None:
    message = made(fields)
    data = encode(message)
    for end in range(len(data)):
        assert refusal(data[:end], type(message)) == "malformed"
    assert refusal(data + b"\0", type(message)) == "malformed"


BAD_ORDERS = {
    "version": ("version", packed(ORDER, version=2)),
    "version is text": ("malformed", packed(ORDER, version="1")),
    "no envelope": ("malformed", msgspec.msgpack.encode(ORDER)),
    "three parts": ("malformed", msgspec.msgpack.encode([1, ORDER, 0])),
    "unknown type": ("malformed", packed(ORDER | {"type": "shell"})),
    "no type": ("malformed", packed({k: v for k, v in ORDER.items() if k != "type"})),
    "another message": ("unexpected-type", packed(REPORT)),
    "unknown field": ("malformed", packed(ORDER | {"pickle": b"x"})),
    "unknown field deep down": ("malformed", packed(profile_of(path="/"))),
    "missing field": ("malformed", packed({k: v for k, v in ORDER.items() if k != "seed"})),
    "unknown action": ("malformed", packed(ORDER | {"action": {"type": "delete"}})),
    "text for a number": ("malformed", packed(ORDER | {"round": "1"})),
    "negative round": ("malformed", packed(ORDER | {"round": -1})),
    "id with a slash": ("malformed", packed(ORDER | {"device_id": "a/b"})),
    "id with a wildcard": ("malformed", packed(ORDER | {"device_id": "+"})),
    "id with a newline at its end": ("malformed", packed(ORDER | {"device_id": "cam1\n"})),
    "empty id": ("malformed", packed(ORDER | {"device_id": ""})),
    "deadline NaN": ("not-finite", packed(ORDER | {"deadline": math.nan})),
    "deadline infinite": ("not-finite", packed(ORDER | {"deadline": math.inf})),
    "digest in capitals": ("malformed", packed(profile_of(digest="AB" * 32))),
    "empty blob": ("malformed", packed(profile_of(size_bytes=0))),
    "unknown codec": ("malformed", packed(profile_of(codec="pickle"))),
    "no start": ("malformed", packed(ORDER | {"action": {"type": "train", "starts": [], "sgd": SGD}})),
    "learning rate 0": ("malformed", packed(ORDER | {"action": ACTIONS[0] | {"sgd": {"learning_rate": 0.0}}})),
    "weight decay 2": ("malformed", packed(ORDER | {"action": ACTIONS[0] | {"sgd": {"weight_decay": 2.0}}})),
    "too long": ("oversized", b"\0" * (messages.MAX_MESSAGE_BYTES + 1)),
    "nested too deeply": ("malformed", b"\x91" * 50_000),
}  # fmt: skip


@pytest.mark.parametrize(("name", "data"), BAD_ORDERS.values(), ids=BAD_ORDERS)
def test_malformed_orders_are_refused_by_name(name: str, data: bytes) -> None:
    assert refusal(data, Order) == name


BAD_RESULTS = {
    "share above 1": {"type": "profiled", "profile": [1.5], "extractor": DIGEST, "n_samples": 1},
    "empty profile": {"type": "profiled", "profile": [], "extractor": DIGEST, "n_samples": 1},
    "15 grid losses": {"type": "candidates_fitted", "losses": {"private": [0.5] * 15}, "n_validation": 3},
    "unknown role": {"type": "candidates_fitted", "losses": {"king": [0.5] * 16}, "n_validation": 3},
    "two betas": {"type": "energy_fitted", "pooled_losses": [1.0], "beta_losses": [[1.0, 1.0]], "n_validation": 3},
    "negative number of samples": RESULTS[0] | {"n_samples": -1},
    "accuracy above 1": RESULTS[0] | {"val_accuracy": 1.01},
    "long reason": {"type": "failed", "reason": "x" * 1001},
}


@pytest.mark.parametrize("result", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_results_out_of_range_are_refused(result: dict[str, Any]) -> None:
    assert refusal(packed(REPORT | {"result": result}), Report) == "malformed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(value: float) -> None:
    losses = [0.5] * 15 + [value]
    result = {"type": "candidates_fitted", "losses": {"private": losses}, "n_validation": 3}
    assert refusal(packed(REPORT | {"result": result}), Report) == "not-finite"


def test_we_never_send_what_a_peer_would_refuse() -> None:
    with pytest.raises(ValueError, match="finite"):
        encode(Context(device_id="cam1", temperature_c=math.nan))
    with pytest.raises(ValueError, match="exceeds"):
        encode(Want(device_id="cam1", digest="x" * messages.MAX_MESSAGE_BYTES, ranges=((0, 1),)))


kinds = st.sampled_from(get_args(Message))


@given(data=st.binary(max_size=300), kind=kinds)
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_a_protocol_error(data: bytes, kind: type[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(data, kind)


@given(fields=st.sampled_from(MESSAGES), place=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_changed_byte_is_refused_or_gives_a_valid_message(fields: dict[str, Any], place: int, value: int) -> None:
    message = made(fields)
    data = bytearray(encode(message))
    data[place % len(data)] = value
    try:
        changed = decode(data, type(message))
    except ProtocolError:
        return
    assert decode(encode(changed), type(changed)) == changed


ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True)
finite = st.floats(allow_nan=False, allow_infinity=False)
statuses = st.builds(
    Status,
    device_id=ids,
    incarnation=ids,
    presence=st.sampled_from(messages.Presence),
    n_samples=st.integers(0, 2**53),
    capabilities=st.none() | st.builds(Capabilities, trains=st.booleans(), codecs=st.tuples(st.sampled_from(Codec))),
)
contexts = st.builds(
    Context,
    device_id=ids,
    cpu_ghz=st.none() | finite.map(abs),
    battery=st.none() | st.floats(0, 1),
    temperature_c=finite,
)
weights = st.dictionaries(st.sampled_from(Role), st.floats(0, 1), min_size=1)


@given(message=statuses | contexts)
@settings(max_examples=200, deadline=None)
def test_any_message_survives_the_wire(message: Status | Context) -> None:
    assert decode(encode(message), type(message)) == message


@given(pooled=weights)
def test_weights_survive_the_wire(pooled: dict[Role, float]) -> None:
    fields = {
        "type": "fit_gate",
        "calibration": CALIBRATION,
        "pooled": pooled,
        "shrinkage": 1.0,
        "beta": 0.0,
        "sgd": SGD,
    }
    order = made(ORDER | {"action": fields | {"release": 1}})
    assert decode(encode(order), Order) == order
