"""What a device can be asked: found by entry point or by its owner's path, read or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edge_agent.steps
import fedge.steps
from fedge.errors import ConfigError, ProtocolError
from fedge.steps.contract import (
    REFUSALS,
    Action,
    Declined,
    Failed,
    Refusal,
    Result,
    Reveals,
    Unsupported,
    decode_action,
    decode_result,
    encode_body,
    list_versions,
    load_device_half,
    load_installed_steps,
    load_known_steps,
    make_report,
    require,
)
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.mixture.install import FineTune, Install
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.wire.messages import (
    BlobRef,
    Capabilities,
    Order,
    Outcome,
    Presence,
    Report,
    Status,
    Why,
    decode_message,
    encode_message,
)
from tests.support.contracts import LAYOUT, REF, order_of

PROFILE = Profile(extractor=REF)
every = pytest.mark.parametrize("step", load_installed_steps().values(), ids=load_installed_steps())


class Sung(Result, frozen=True, kw_only=True):
    REVEALS: ClassVar = {"loudness": Reveals.NOTHING}
    loudness: float


class Sing(Action, frozen=True, kw_only=True):
    STEP: ClassVar = "sing"
    RESULT: ClassVar = Sung
    DEVICE: ClassVar = "steps_of_a_user"
    verse: int = 1


class Unnamed(Action, frozen=True, kw_only=True):
    """Forgot its name."""


class SingToo(Sing, frozen=True, kw_only=True):
    """Inherited one."""


@pytest.fixture
def user(own_module: Callable[..., ModuleType]) -> ModuleType:
    return own_module("steps_of_a_user", Sing=Sing, SingToo=SingToo, Unnamed=Unnamed, number=3, run=None)


# ------------------------------------------------------------------------------------------------------ the registry


@every
def test_a_contract_is_complete(step: type[Action]) -> None:
    assert load_installed_steps()[step.STEP] is step
    assert issubclass(step.RESULT, Result)
    assert set(step.RESULT.REVEALS) == set(step.RESULT.__struct_fields__), "what each field lets out is said"
    assert set(step.RESULT.REVEALS.values()) <= set(Reveals)
    assert callable(load_device_half(step).run)
    assert step.__doc__


def test_one_folder_lists_all_that_a_device_can_be_asked_another_how_it_does_it() -> None:
    contracts, halves = (
        {(p.parent.name, p.stem) for p in Path(package.__path__[0]).glob("*/*.py")}
        for package in (fedge.steps, edge_agent.steps)
    )
    assert contracts == halves
    assert {name for _, name in contracts} - {"__init__"} == set(load_installed_steps())
    for name, step in load_installed_steps().items():
        assert step.__module__.endswith(f".{name}")
        assert load_device_half(step).__name__ == step.__module__.replace("fedge", "edge_agent", 1)


def test_the_status_has_room_for_all_steps() -> None:
    versions = list_versions(load_installed_steps())
    status = Status(
        device_id="d", incarnation="1", presence=Presence.ONLINE, capabilities=Capabilities(trains=True, steps=versions)
    )
    assert decode_message(encode_message(status), Status) == status


def test_a_step_of_the_owners_is_known_by_its_path(user: ModuleType) -> None:
    known = load_known_steps(["steps_of_a_user:Sing"])
    assert known == {**load_installed_steps(), "sing": Sing}
    assert "sing" not in load_installed_steps()
    assert load_device_half(known["sing"]) is user
    assert decode_action(order_of(Sing(verse=2)), known) == Sing(verse=2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "steps_of_a_user:number is not a step: it must be a subclass of"),
        ("Unnamed", "Unnamed needs a name of its own on the wire"),
        ("SingToo", "SingToo needs a name of its own on the wire.* or devices carry out 'sing' instead"),
    ],
)
def test_a_path_that_is_no_step_is_refused(user: ModuleType, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_known_steps([f"steps_of_a_user:{name}"])


@pytest.mark.parametrize(
    ("module", "says"),
    [("no_such_module", "there is no module no_such_module"), ("fedge.steps.sgd", "needs a function run")],
)
def test_a_step_without_a_device_half_says_so(module: str, says: str) -> None:
    class Lame(Sing, frozen=True, kw_only=True):
        STEP: ClassVar = "lame"
        DEVICE: ClassVar = module

    with pytest.raises(ConfigError, match=f"step lame has no device half: .*{says}"):
        load_device_half(Lame)


@pytest.mark.parametrize(
    "path", ["steps_of_a_user:Dance", "no_such_module:Sing", "Sing", "", "fedge.steps.contract:Result"]
)
def test_a_path_that_leads_nowhere_is_refused(user: ModuleType, path: str) -> None:
    with pytest.raises(ConfigError):
        load_known_steps([path])


def test_a_new_step_costs_a_look_at_all_samples_and_brings_no_tensors() -> None:
    assert Sing().passes(1, 20, 3) == 23
    assert Sing().uploads(Sung(loudness=1.0), LAYOUT) == {}
    Sing().check(Sung(loudness=1.0), None)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- actions


def test_an_action_survives_the_wire_and_is_made_alike_twice() -> None:
    order = order_of(PROFILE)
    assert decode_action(decode_message(encode_message(order), Order), load_installed_steps()) == PROFILE
    assert order_of(Profile(extractor=REF)) == order


@pytest.mark.parametrize(
    ("changes", "have"),
    [({"step": "sing"}, "none of that name"), ({"version": 2}, "version 1"), ({"version": 0}, "version 1")],
)
def test_what_the_device_does_not_know_is_unsupported(changes: dict[str, Any], have: str) -> None:
    order = msgspec.structs.replace(order_of(PROFILE), body=b"whatever", **changes)
    found = decode_action(order, load_installed_steps())
    expected = f"step {order.step} version {order.version}: this device has {have}"
    assert found == Unsupported(reason=expected)


def test_a_recipe_that_fedge_0_2_does_not_know_has_another_version() -> None:
    plain, adam = (Train(starts=(Start(model=REF),), sgd=sgd) for sgd in (Sgd(), Sgd(optimizer="adam")))
    assert (plain.order_version, adam.order_version) == (Train.VERSION, Train.VERSION + 1000)
    assert (PROFILE.order_version, PROFILE.recipe_version) == (Profile.VERSION, 0)
    order = order_of(adam)
    assert order.version == adam.order_version  # a device of fedge 0.2 takes only Train.VERSION
    assert decode_action(order, load_installed_steps()) == adam
    tuning = FineTune(sgd=Sgd(clip_norm=1.0), checkpoints=(1,), otherwise=1)
    assert Install(model=REF, method="m", fine_tune=tuning).recipe_version == 1


def test_a_later_recipe_is_unsupported() -> None:
    order = msgspec.structs.replace(order_of(Train(starts=(Start(model=REF),), sgd=Sgd())), version=3001)
    assert isinstance(decode_action(order, load_installed_steps()), Unsupported)


def test_a_device_announces_steps_and_recipe() -> None:
    versions = list_versions({"profile": Profile})
    assert versions == {"profile": Profile.VERSION, "recipe": 2}


BODIES = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "a list": msgspec.msgpack.encode([1]),
    "a field is missing": msgspec.msgpack.encode({"noise": 0.0}),
    "a field of another type": msgspec.msgpack.encode({"extractor": "0" * 64}),
    "a field out of range": msgspec.msgpack.encode({"extractor": REF, "noise": -1.0}),
    "more behind it": encode_body(PROFILE) + b"\0",
    "too deep": b"\x91" * 50_000,
    "text that is none": b"\x81\xa9extractor\xa1\xff",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_action_is_malformed(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_action(msgspec.structs.replace(order_of(PROFILE), body=body), load_installed_steps())
    assert caught.value.name == "malformed"


def test_unknown_fields_of_an_action_and_of_its_references_are_ignored() -> None:
    later = {"extractor": {**msgspec.to_builtins(REF), "colour": "red"}, "wings": 2}
    order = msgspec.structs.replace(order_of(PROFILE), body=msgspec.msgpack.encode(later))
    assert decode_action(order, load_installed_steps()) == Profile(extractor=REF)


def test_every_prefix_of_a_body_is_malformed() -> None:
    body = encode_body(PROFILE)
    for end in range(len(body)):
        with pytest.raises(ProtocolError, match="malformed"):
            decode_action(msgspec.structs.replace(order_of(PROFILE), body=body[:end]), load_installed_steps())


def test_an_optional_field_of_a_later_version_is_ignored() -> None:
    body = msgspec.msgpack.encode({"extractor": REF, "noise": 0.5, "colour": "red"})
    order = msgspec.structs.replace(order_of(PROFILE), body=body)
    assert decode_action(order, load_installed_steps()) == Profile(extractor=REF, noise=0.5)


@given(st.binary(max_size=200), st.sampled_from(sorted(load_installed_steps())))
def test_random_bodies_raise_nothing_but_a_protocol_error(body: bytes, name: str) -> None:
    step = load_installed_steps()[name]
    order = msgspec.structs.replace(order_of(PROFILE), step=name, version=step.VERSION, body=body)
    with suppress(ProtocolError):
        assert isinstance(decode_action(order, load_installed_steps()), step)


# ----------------------------------------------------------------------------------------------------------- results


PROFILED = Profiled(extractor=REF.digest, profile=(0.5, 1.0), halves=0.25, n_samples=3)


def test_a_result_survives_the_wire() -> None:
    report = make_report(order_of(PROFILE), PROFILED, 1.5)
    assert (report.outcome, report.why, report.seconds, report.blobs) == (Outcome.DONE, None, 1.5, ())
    assert decode_result(decode_message(encode_message(report), Report), PROFILE) == PROFILED


@pytest.mark.parametrize(("outcome", "kind"), REFUSALS.items())
def test_a_refusal_says_why_and_holds_nothing_else(outcome: Outcome, kind: type[Refusal]) -> None:
    report = make_report(order_of(PROFILE), kind(why=Why.HOT, reason="81.5 C"), 0.1)
    assert (report.outcome, report.why, report.body, report.blobs) == (outcome, Why.HOT, b"", ())
    assert b"81.5" not in encode_message(report)
    assert decode_result(decode_message(encode_message(report), Report), PROFILE) == kind(why=Why.HOT)


def test_why_there_is_no_result_may_be_what_only_a_newer_fedge_knows() -> None:
    report = encode_message(make_report(order_of(PROFILE), Failed(why=Why.ERROR), 0.1)).replace(b"error", b"flood")
    assert decode_result(decode_message(report, Report), PROFILE) == Failed(why=Why.OTHER)


def test_every_reason_has_words() -> None:
    assert len({why.words for why in Why}) == len(Why)


def test_every_outcome_but_done_is_a_refusal() -> None:
    assert set(REFUSALS) == set(Outcome) - {Outcome.DONE}
    assert set(REFUSALS.values()) == {Declined, Failed, Unsupported}


def test_a_report_names_the_tensors_of_its_result() -> None:
    class Both(Result, frozen=True, kw_only=True):
        one: BlobRef
        others: dict[str, tuple[BlobRef, ...]]

    other = BlobRef(digest="1" * 64, size_bytes=5)
    report = make_report(order_of(PROFILE), Both(one=REF, others={"a": (other,)}), 1.0)
    assert report.blobs == (REF, other)


def test_an_optional_field_of_a_later_result_is_ignored() -> None:
    report = make_report(order_of(PROFILE), PROFILED, 1.0)
    body = msgspec.msgpack.encode({**msgspec.to_builtins(PROFILED), "colour": "red"})
    assert decode_result(msgspec.structs.replace(report, body=body), PROFILE) == PROFILED


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"profile": [0.5]})])
def test_a_body_that_is_no_result_is_malformed(body: bytes) -> None:
    report = msgspec.structs.replace(make_report(order_of(PROFILE), PROFILED, 1.0), body=body)
    with pytest.raises(ProtocolError) as caught:
        decode_result(report, PROFILE)
    assert caught.value.name == "malformed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_neither_sent_nor_read(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        encode_body(Tried(delta=value))
    trial = Trial(global_model=REF, expert=REF)
    body = msgspec.msgpack.encode({"delta": value})
    with pytest.raises(ProtocolError) as caught:
        decode_result(msgspec.structs.replace(make_report(order_of(trial), Tried(), 1.0), body=body), trial)
    assert caught.value.name == "not-finite"
    sing = msgspec.structs.replace(
        order_of(PROFILE), body=msgspec.msgpack.encode({"extractor": REF, "noise": math.inf})
    )
    with pytest.raises(ProtocolError, match="not-finite"):
        decode_action(sing, load_installed_steps())


def test_require() -> None:
    require(True, "not said")
    with pytest.raises(ProtocolError, match="wrong-result: said"):
        require(False, "said")
