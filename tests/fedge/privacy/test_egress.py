"""What the owner lets out: the file, what is left out of messages, and the door."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from fedge.errors import ConfigError, StoreError, TransportError
from fedge.privacy.egress import (
    ALL,
    FILE,
    INTRODUCED,
    MESSAGES,
    PRESETS,
    PRIVACY_LEDGER,
    REVEALED_FIELDS,
    Door,
    Rules,
    WithheldError,
    iterate_kinds,
    read_rules,
    without_figures,
)
from fedge.privacy.ledger import read_lines
from fedge.steps.contract import Action, Result, Reveals, load_installed_steps, make_report
from fedge.steps.descriptions.profile import Profile
from fedge.steps.descriptions.trial import Trial
from fedge.steps.mixture.fit_candidates import FitCandidates
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import SharePrivate
from fedge.steps.training.train import Start, Train, Trained
from fedge.wire.messages import (
    AtWork,
    Capabilities,
    Context,
    DriftKind,
    Health,
    Outcome,
    Phase,
    Presence,
    Quality,
    Report,
    Status,
    Want,
    encode_message,
)
from fedge.wire.topics import Topics
from tests.support.contracts import REF, order_of

STRICT = Rules(PRESETS["strict"])
TOPICS = Topics("shop")
TRAIN = Train(starts=(Start(model=REF), Start(model=REF, cluster=1)), sgd=Sgd())
TRAINED = Trained(update=REF, n_samples=3, cluster=1, loss_before=2.0, loss_after=1.0, gradient_norm=1.0)
HEALTH = Health(
    device_id="d",
    at=1.0,
    phase=Phase.SERVING,
    release=1,
    reason="no file",
    now=Quality(n=4, accuracy=0.5),
    drift=True,
    drift_kind=DriftKind.INPUTS,
    drift_release=1,
    at_work=AtWork(right=3, wrong=1, recent=0.75, covered=0.9, coverage=0.95),
)


def write(folder: Path, text: str) -> Path:
    (folder / FILE).write_text(text)
    return folder


# ---------------------------------------------------------------------------------------------------- the owner's file


def test_without_a_file_everything_but_what_learned_from_marked_samples_may_leave(tmp_path: Path) -> None:
    assert read_rules(tmp_path, None, None) == read_rules(None, None, None) == Rules()
    assert Rules().withheld == (Reveals.PRIVATE, Reveals.PERSONAL)


def test_the_file_names_a_preset_and_kinds_beside_it(tmp_path: Path) -> None:
    write(tmp_path, '[egress]\npreset = "strict"\nallow = "loss, machine"\nforbid = "update"\n')
    expected = PRESETS["strict"] | {Reveals.LOSS, Reveals.MACHINE} - {Reveals.UPDATE}
    assert read_rules(tmp_path, None, None).allowed == expected - {Reveals.UPDATE}
    assert read_rules(None, tmp_path / FILE, None) == read_rules(tmp_path, None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[egress]\npreset = "strickt"', "preset in .egress."),
        ('[egress]\nforbid = "profil"', "'profil'.*did you mean profile"),
        ('[egress]\nforbid = "nothing"', "no kind is called 'nothing'"),
        ('[egress]\nallow = "loss"\nforbid = "loss"', "allows and forbids loss"),
        ('[egress]\nforbids = "loss"', "did you mean forbid"),
        ('preset = "strict"', "unknown key preset"),
        ("[egress", "cannot read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_rules(write(tmp_path, text), None, None)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_rules(tmp_path, tmp_path / "mine.toml", None)


def test_a_file_that_a_link_leads_to_must_be_there(tmp_path: Path) -> None:
    """The owner has rules, on a disk that is not mounted: they are not those of no file."""
    (tmp_path / FILE).symlink_to(tmp_path / "unmounted" / FILE)
    with pytest.raises(ConfigError, match="cannot read"):
        read_rules(tmp_path, None, None)


def test_rules_in_the_configuration_of_the_process_are_refused_and_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, '[agent]\nid = "d"\n[egress]\npreset = "strict"\n')
    with pytest.raises(ConfigError, match="belongs into a file of the owner's own"):
        read_rules(tmp_path / "home", None, tmp_path / FILE)


# -------------------------------------------------------------------------------------------------- what is left out


def test_every_field_that_is_named_exists_and_the_rest_says_nothing_of_the_data() -> None:
    for kind, told in REVEALED_FIELDS.items():
        assert set(told) <= set(kind.__struct_fields__), kind
    assert set(MESSAGES.values()) == set(REVEALED_FIELDS) - {AtWork, Capabilities, Quality}


def test_strict_leaves_out_what_it_withholds() -> None:
    context = Context(device_id="d", at=1.0, cpu_ghz=2.0, load=0.5, temperature_c=60.0, n_samples=7)
    assert STRICT.strip(context) == Context(device_id="d", n_samples=7)
    full = Capabilities(trains=True, machine="aarch64", cpu_count=4, fedge_version="1", steps={"train": 1})
    status = Status(device_id="d", incarnation="1", presence=Presence.ONLINE, n_samples=7, capabilities=full)
    assert STRICT.strip(status).capabilities == Capabilities(trains=True, steps={"train": 1})
    assert STRICT.strip(status).n_samples == 7
    plain = Health(device_id="d", at=1.0, phase=Phase.SERVING, release=1, now=Quality(n=4))
    assert STRICT.strip(HEALTH) == plain
    assert ALL.strip(HEALTH) == HEALTH


def test_a_part_that_cannot_do_without_goes_as_a_whole_and_a_message_is_not_sent() -> None:
    no_count = Rules(PRESETS["default"] - {Reveals.COUNT})
    assert no_count.strip(HEALTH).now is None
    with pytest.raises(WithheldError, match="phase of Health reveals whether a new bundle suits it"):
        Rules(PRESETS["default"] - {Reveals.VERDICT}).strip(HEALTH)


@pytest.mark.parametrize("kind", [kind for kind in Reveals if kind is not Reveals.NOTHING])
@pytest.mark.parametrize("message", [HEALTH, Context(device_id="d", at=1.0, load=0.5, n_samples=7)], ids=["h", "c"])
def test_what_is_left_tells_nothing_that_is_withheld(message: Any, kind: Reveals) -> None:
    rules = Rules(frozenset(Reveals) - {kind})
    try:
        assert kind not in set(iterate_kinds(rules.strip(message)))
    except WithheldError:
        assert kind is Reveals.VERDICT


# ------------------------------------------------------------------------------------------------------- what is asked


def test_a_device_is_asked_for_what_its_owner_lets_out() -> None:
    spared = TRAIN.without(STRICT.withheld)
    assert spared == msgspec.structs.replace(TRAIN, starts=TRAIN.starts[:1], measure=False)
    assert STRICT.allows(spared)
    assert not STRICT.allows(TRAIN)
    assert spared.reveals()["cluster"] is Reveals.NOTHING
    assert TRAIN.without(["update"]) is None
    assert TRAIN.without(Rules().withheld) == TRAIN


def test_work_whose_result_is_all_withheld_is_not_asked_for() -> None:
    assert Trial(global_model=REF, expert=REF).without(["loss"]) is None, "its one field could be left out"
    assert Profile(extractor=REF).without(["profile"]) is None
    assert SharePrivate(kept_by="train").without(Rules().withheld) is None


def test_candidates_are_fitted_in_silence() -> None:
    action = FitCandidates(global_model=REF, initial_model=REF, sgd=Sgd(), local_steps=1)
    assert action.without(["loss"]) == msgspec.structs.replace(action, tell=False)


def test_steps_that_end_in_bundles_are_done_for_every_owner() -> None:
    for name in ("install", "install_bundle", "fit_gate", "fit_mixture", "fit_pool"):
        assert set(load_installed_steps()[name].RESULT.REVEALS.values()) == {Reveals.NOTHING}


class Sung(Result, frozen=True, kw_only=True):
    loudness: float


class Sing(Action, frozen=True, kw_only=True):
    STEP: ClassVar = "sing"
    RESULT: ClassVar = Sung
    DEVICE: ClassVar = ""


def test_a_field_that_a_step_says_nothing_of_counts_as_private() -> None:
    assert Sing().reveals() == {"loudness": Reveals.PRIVATE}
    assert Sing().without(Rules().withheld) is None
    assert ALL.allows(Sing())


# ------------------------------------------------------------------------------------------------------------ the door


def door(home: Path | None, rules: Rules = Rules(), action: Action | None = TRAIN) -> Door:
    return Door(rules, home, TOPICS, lambda _: action)


def through(it: Door, leaf: str, message: Any) -> None:
    it(TOPICS.make_agent_topic("d", leaf), encode_message(message))


def test_what_leaves_is_noted_with_what_it_tells(tmp_path: Path) -> None:
    it = door(tmp_path)
    report = make_report(order_of(TRAIN), TRAINED, 2.0)
    through(it, "status", Status(device_id="d", incarnation="1", presence=Presence.ONLINE, n_samples=7))
    through(it, "reports", report)
    it(TOPICS.make_update_topic("d", REF.digest, 0), b"chunk")
    through(it, "wants", Want(device_id="d", digest=REF.digest, ranges=((0, 1),)))
    it("kitchen/answers", b"{}")
    it(TOPICS.make_agent_topic("d", "renewal"), b"-----BEGIN CERTIFICATE REQUEST-----")
    it(TOPICS.make_agent_topic("d", "certificate"), b"")
    it.close()
    about = f"train {report.order_id}"
    assert [(line.message, line.about, line.kinds) for line in read_lines(tmp_path)] == [
        ("status", "", ("count",)),
        ("reports", about, ("choice", "count", "load", "loss", "update")),
        ("blobs", about, ("update",)),
        ("wants", "", ()),
        ("predictions", "", ("answers",)),
        ("renewal", "", ()),
        ("certificate", "", ()),
    ]
    assert [line.bytes for line in read_lines(tmp_path)][1:3] == [len(encode_message(report)), 5]


@pytest.mark.parametrize(
    ("rules", "action", "result"),
    [
        (STRICT, TRAIN, TRAINED),
        (STRICT, TRAIN, Trained(update=REF, n_samples=3, cluster=1)),
        (Rules(PRESETS["default"] - {Reveals.UPDATE}), TRAIN, TRAINED),
    ],
)
def test_a_result_that_somebody_forgot_to_strip_stays(
    tmp_path: Path, rules: Rules, action: Action, result: Trained
) -> None:
    it = door(tmp_path, rules, action)
    with pytest.raises(TransportError, match="the device's owner does not allow it to tell"):
        through(it, "reports", make_report(order_of(action), result, 0.0))
    with pytest.raises(TransportError, match="nothing that a device sends"):
        it(TOPICS.make_update_topic("d", REF.digest, 0), b"chunk")
    assert read_lines(tmp_path) == []


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        (TOPICS.make_agent_topic("d", "secrets"), b""),
        (TOPICS.make_update_topic("d", "a" * 64, 0), b"bytes that no report names"),
        (TOPICS.make_agent_topic("d", "health"), b"no message"),
        (TOPICS.make_agent_topic("d", "status"), encode_message(Context(device_id="d"))),
        (TOPICS.rollout, b""),
        (TOPICS.make_agent_topic("d", "renewal"), b"no request"),
        (TOPICS.make_agent_topic("d", "certificate"), b"words"),
        ("fedge/1/another/agents/d/status", b""),
    ],
)
def test_what_no_device_sends_stays(tmp_path: Path, topic: str, payload: bytes) -> None:
    with pytest.raises(TransportError, match="held back"):
        door(tmp_path)(topic, payload)
    assert read_lines(tmp_path) == []


def with_field(message: Any, name: str, value: object) -> bytes:
    version, fields = msgspec.msgpack.decode(encode_message(message))
    return msgspec.msgpack.encode((version, fields | {name: value}))


def test_fields_that_no_message_has_stay(tmp_path: Path) -> None:
    """Receivers ignore them, so nobody would notice."""
    it = door(tmp_path)
    status = Status(device_id="d", incarnation="1", presence=Presence.ONLINE)
    with pytest.raises(TransportError, match="held back"):
        it(TOPICS.make_agent_topic("d", "status"), with_field(status, "diary", "dear diary"))
    more = msgspec.msgpack.encode(msgspec.to_builtins(TRAINED) | {"diary": [1.0, 2.0]})
    report = make_report(order_of(TRAIN), TRAINED, 2.0)
    with pytest.raises(TransportError, match="held back"):
        through(it, "reports", msgspec.structs.replace(report, body=more))
    with pytest.raises(TransportError, match="held back"):
        through(it, "reports", msgspec.structs.replace(report, blobs=(*report.blobs, REF)))
    assert read_lines(tmp_path) == []


def test_a_refusal_carries_nothing(tmp_path: Path) -> None:
    it = door(tmp_path)
    refusal = Report(order_id="o", device_id="d", outcome=Outcome.FAILED)
    for carries in ({"body": b"dear diary"}, {"blobs": (REF,)}):
        with pytest.raises(TransportError, match="held back"):
            through(it, "reports", msgspec.structs.replace(refusal, **carries))
    assert read_lines(tmp_path) == []


def test_whole_numbers_in_place_of_others_may_leave(tmp_path: Path) -> None:
    it = door(tmp_path)
    through(it, "context", Context(device_id="d", load=1))
    through(it, "reports", make_report(order_of(TRAIN), msgspec.structs.replace(TRAINED, loss_before=2), 2.0))
    it.close()
    assert len(read_lines(tmp_path)) == 2


def test_a_report_of_no_open_order_stays_but_a_refusal_may_leave(tmp_path: Path) -> None:
    it = door(tmp_path, STRICT, None)
    with pytest.raises(TransportError, match="no open order"):
        through(it, "reports", make_report(order_of(TRAIN), TRAINED, 0.0))
    through(it, "reports", Report(order_id="o", device_id="d", outcome="declined"))  # type: ignore[arg-type]
    it.close()


def test_nothing_leaves_that_cannot_be_noted(tmp_path: Path) -> None:
    (tmp_path / "egress.db").mkdir()
    with pytest.raises(StoreError):
        through(door(tmp_path), "context", Context(device_id="d"))


def test_figures_of_the_devices_own_bundles_stay_unless_its_owner_lets_them_out(tmp_path: Path) -> None:
    figures = {"before": Quality(n=31, accuracy=1.0), "now": Quality(n=31, accuracy=0.94)}
    health = Health(device_id="d", at=1.0, phase=Phase.KEPT, release=2, **figures)
    told = Rules().strip(health, INTRODUCED)
    assert (told.phase, told.before, told.now) == (Phase.KEPT, None, None)
    through(door(tmp_path, Rules()), "introduced", told)
    through(door(tmp_path, Rules()), "health", health)
    with pytest.raises(TransportError, match="how well its own bundles do"):
        through(door(tmp_path, Rules()), "introduced", health)

    open_ = Rules(Rules().allowed | {Reveals.PERSONAL})
    assert open_.strip(health, INTRODUCED) == health
    through(door(tmp_path, open_), "introduced", health)
    (tmp_path / PRIVACY_LEDGER).write_text("{}")
    assert without_figures(open_, tmp_path).strip(health, INTRODUCED).now is None


def test_a_runtime_tells_no_figures_where_differential_privacy_was_promised(tmp_path: Path) -> None:
    quality = Quality(n=9, accuracy=0.9, free_energy=-1.0)
    health = Health(device_id="pi", at=1.0, phase=Phase.SERVING, release=2, now=quality, drift=True, n_predictions=7)
    health = msgspec.structs.replace(health, drift_kind=DriftKind.LABELS, drift_release=2)
    assert without_figures(Rules(), tmp_path).strip(health) == health
    (tmp_path / PRIVACY_LEDGER).write_text("{}")
    told = without_figures(Rules(), tmp_path).strip(health)
    assert (told.now, told.drift, told.drift_kind, told.drift_release) == (Quality(n=9), False, None, 0)
    assert told.n_predictions == 0
    assert told.phase is Phase.SERVING
