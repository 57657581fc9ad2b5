"""What a device does next and what it says of itself, as tables; the shell: tests/integration/test_rollout.py."""

import asyncio
import contextlib
import re
import shutil
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.updates.answering import LATENCY_WINDOW, ActiveBundle
from deploy.updates.decision import (
    MAX_ALL_METADATA_BYTES,
    RETRY_CAP_S,
    RETRY_S,
    Decision,
    Judgement,
    Situation,
    compute_claim,
    compute_phase,
    compute_retry_s,
    decide,
    explain_too_large,
    find_manifest_digest,
)
from deploy.updates.drift import Alarm
from deploy.updates.examination import Limits
from deploy.updates.link import MAX_RELEASE_BYTES, SPARE_DISK_BYTES, Link, Outcome
from deploy.updates.slots import Slots
from deploy.updates.trust import install_root
from fedge.errors import StoreError, UpdateRejected
from fedge.privacy.egress import PRIVACY_LEDGER, Rules
from fedge.steps.contract import Reveals
from fedge.system.files import compute_digest
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.connection.packet_limits import SMALL_CHUNK
from fedge.wire.messages import (
    Announcement,
    DriftKind,
    FileRef,
    Health,
    Phase,
    Quality,
    Rollout,
    RolloutState,
    decode_message,
    encode_message,
)
from fedge.wire.rollout import MAX_METADATA_BYTES

from ..bundles import GOLDEN, other_gate, poor_gate, source, variant
from ..repository import Simulator

pytestmark = pytest.mark.torch_free

OLD, NEW = "a" * 64, "b" * 64
RUNNING, PAUSED, ABORTED, DONE = RolloutState


def situation(state=RUNNING, *, running=OLD, takes_part=True, **others):
    return Situation(state=state, announced=NEW, running=running, takes_part=takes_part, **others)


@pytest.mark.parametrize(
    ("now", "do"),
    [
        (Situation(running=OLD), Decision.NOTHING),
        (Situation(running=OLD, on_trial=True), Decision.SETTLE),
        (Situation(running=OLD, inbox=True), Decision.TAKE_IN),
        (Situation(running=OLD, inbox=True, worse=True), Decision.SETTLE),
        (situation(DONE, running=NEW, switched=True, worse=True), Decision.SETTLE),
        (Situation(running=OLD, inbox=True, on_trial=True), Decision.SETTLE),
        (situation(), Decision.INSTALL),
        (situation(DONE), Decision.INSTALL),  # was off when its stage came
        (situation(takes_part=False), Decision.NOTHING),
        (situation(PAUSED), Decision.NOTHING),
        (situation(ABORTED), Decision.NOTHING),
        (situation(refused="accuracy: worse"), Decision.NOTHING),
        (situation(judged="forged: no"), Decision.NOTHING),
        (situation(failed="digest: x", waiting=True), Decision.NOTHING),
        (situation(failed="digest: x"), Decision.INSTALL),
        (situation(on_trial=True), Decision.SETTLE),  # one after the other: the slots are taken
        (situation(inbox=True), Decision.INSTALL),
        (situation(inbox=True, waiting=True), Decision.TAKE_IN),
        (situation(running=NEW), Decision.NOTHING),
        (situation(running=NEW, on_trial=True, switched=True), Decision.SETTLE),
        (situation(PAUSED, running=NEW, on_trial=True, switched=True), Decision.SETTLE),
        (situation(ABORTED, running=NEW, on_trial=True, switched=True), Decision.GO_BACK),
        (situation(ABORTED, running=NEW, switched=True), Decision.GO_BACK),
        (situation(ABORTED, running=NEW, switched=True, takes_part=False), Decision.GO_BACK),
        (situation(ABORTED, running=NEW, switched=True, no_way_back=True), Decision.NOTHING),
        (situation(ABORTED, running=NEW), Decision.NOTHING),  # it had it before the rollout
        (situation(ABORTED, running=NEW, switched=True, no_way_back=True, stuck="disk: x"), Decision.SETTLE),
        (situation(stuck="disk: x"), Decision.INSTALL),  # a new bundle may be what helps
        (Situation(running=OLD, inbox=True, stuck="disk: x"), Decision.TAKE_IN),
        (Situation(running=OLD, recalled=True, on_trial=True, inbox=True), Decision.RECALL),
    ],
)
def test_what_is_next(now, do):
    assert decide(now) is do


@pytest.mark.parametrize(
    ("now", "phase"),
    [
        (Situation(running=OLD), (Phase.SERVING, "")),
        (Situation(running=OLD, on_trial=True), (Phase.TRIAL, "")),
        (situation(), (Phase.SERVING, "")),
        (situation(running=NEW, on_trial=True), (Phase.TRIAL, "")),
        (situation(running=NEW), (Phase.SERVING, "")),
        (situation(running=NEW, refused="accuracy: x", stuck="disk: x"), (Phase.FAILED, "disk: x")),
        (situation(refused="accuracy: x"), (Phase.KEPT, "accuracy: x")),
        (situation(refused="accuracy: x", switched=True), (Phase.ROLLED_BACK, "accuracy: x")),
        (situation(refused="latency: x"), (Phase.REFUSED, "latency: x")),
        (situation(ABORTED, refused="aborted: x", switched=True), (Phase.ROLLED_BACK, "aborted: x")),
        (situation(judged="forged: x"), (Phase.REFUSED, "forged: x")),
        (situation(judged="forged: x", takes_part=False), (Phase.SERVING, "")),
        (situation(failed="disk: x", waiting=True), (Phase.FAILED, "disk: x")),
    ],
)
def test_what_it_says(now, phase):
    assert compute_phase(now) == phase


def rollout(target="5/manifest.json", metadata=None, **others):
    if metadata is None:
        metadata = {"timestamp.json": FileRef(digest=OLD, size_bytes=5), f"5/{NEW}.manifest.json": ref(NEW)}
    return Rollout(id="r", state=RUNNING, target=target, release=5, share=1.0, metadata=metadata, **others)


def ref(digest, size_bytes=5):
    return FileRef(digest=digest, size_bytes=size_bytes)


def test_the_manifest_is_named_by_its_digest():
    assert find_manifest_digest(rollout()) == NEW
    assert find_manifest_digest(rollout(metadata={f"5/{OLD}.manifest.json": ref(NEW)})) is None
    assert find_manifest_digest(rollout(metadata={})) is None


def test_an_announcement_is_another_when_its_metadata_are():
    assert compute_claim(rollout()) == compute_claim(rollout(canaries=("cam1",)))
    assert compute_claim(rollout()) != compute_claim(rollout(metadata={"timestamp.json": ref(NEW)}))
    assert compute_claim(rollout()) != compute_claim(rollout(target="4/manifest.json"))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([], ""),
        ([MAX_METADATA_BYTES], ""),
        ([MAX_METADATA_BYTES + 1], "endless-data"),
        ([MAX_METADATA_BYTES] * (MAX_ALL_METADATA_BYTES // MAX_METADATA_BYTES), ""),
        ([MAX_METADATA_BYTES] * (MAX_ALL_METADATA_BYTES // MAX_METADATA_BYTES) + [1], "endless-data"),
    ],
)
def test_metadata_beyond_all_measure_are_not_asked_for(sizes, reason):
    assert explain_too_large({str(i): ref(OLD, size) for i, size in enumerate(sizes)}).split(":")[0] == reason


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_pauses_between_attempts_grow_up_to_a_bound(attempt, draw):
    assert RETRY_S / 2 <= compute_retry_s(attempt, draw) <= RETRY_CAP_S


# ------------------------------------------------------------------------------------- the inbox, without a broker


class Unheard:
    """A transport to nobody: it keeps what was published."""

    settings = BrokerSettings("nobody")
    max_packet_bytes = None
    chunk_bytes = SMALL_CHUNK
    connected = True

    def __init__(self):
        self.published = []

    def on_connect(self, callback):
        pass

    async def subscribe(self, topic_filter, handler, refused=None):
        pass

    async def unsubscribe(self, topic_filter):
        pass

    async def publish(self, topic, payload, **options):
        self.published.append(payload)


async def followed(home, until, limits=None, announced=None):
    """A device that runs until something is so; `announced`: a rollout that nobody serves."""
    slots = Slots(home)
    answering = ActiveBundle(slots, limits or Limits(probation_s=0, latency_slack_ms=1e6))
    link = Link("pi", "test", home, slots, answering)
    await link.attach(Unheard())
    link._rollout = announced
    running = asyncio.gather(link.follow(), link.publish_health())
    try:
        async with asyncio.timeout(300):
            while not until(slots, answering):  # noqa: ASYNC110 - a thread does it
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return answering


@pytest.fixture
def home(tmp_path):
    slots = Slots(tmp_path / "home")
    slots.stage(*source(variant(tmp_path / "first", release=1)))
    slots.switch()
    slots.confirm()
    return tmp_path / "home"


def switched(slots, _):
    """The second slot's bundle is the good one."""
    return slots.state.trial is None and slots.running.name == "slot-b"


async def test_a_bundle_that_the_agent_wrote_is_taken_over(home):
    variant(home / "bundles" / "2", release=2, gate=other_gate)

    answering = await followed(
        home, lambda slots, answering: slots.state.trial is None and slots.running.name == "slot-b"
    )

    assert answering.runtime.manifest.release == 2


async def test_one_for_another_task_stays_in_the_inbox(home):
    from ..bundles import digest

    folder = variant(home / "bundles" / "2", release=2)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"name": "digits"', '"name": "cats"', 1))

    answering = await followed(home, lambda slots, answering: digest(folder) in slots.state.refused)

    assert answering.runtime.manifest.release == 1
    assert Slots(home).state.refused[digest(folder)].startswith("task: ")


async def test_one_that_is_damaged_is_not_refused_and_is_taken_over_when_it_is_whole(home, caplog):
    good = variant(home.parent / "2", release=2, gate=other_gate)
    folder = home / "bundles" / "2"
    shutil.copytree(good, folder)
    (folder / "skeleton.onnx").write_bytes(b"no graph")

    def repaired(slots, answering):
        if "event=inbox_damaged" in caplog.text and (good / "skeleton.onnx").exists():
            (good / "skeleton.onnx").replace(folder / "skeleton.onnx")  # at once: half a copy would be damaged, too
        return switched(slots, answering)

    answering = await followed(home, repaired)

    assert answering.runtime.manifest.release == 2
    assert caplog.text.count("event=inbox_damaged") == 1


async def test_one_that_was_refused_does_not_hide_an_older_one_that_is_newer_than_what_answers(home):
    folder = variant(home / "bundles" / "9", release=9)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"name": "digits"', '"name": "cats"', 1))
    await followed(home, lambda slots, answering: slots.state.refused)
    (home / "bundles" / "8").mkdir()
    variant(home / "bundles" / "7", release=7, gate=other_gate)

    answering = await followed(
        home, lambda slots, answering: slots.state.trial is None and slots.running.name == "slot-b"
    )

    assert answering.runtime.manifest.release == 7


async def test_one_that_the_agent_removes_meanwhile_is_forgotten(home):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))

    await link._install_inbox(home / "bundles" / "2")

    assert not slots.state.refused


async def test_what_cannot_be_trusted_piles_up_no_files(home):
    slots = Slots(home)
    install_root(home, Simulator().files["1.root.json"])
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    await link.attach(Unheard())
    received = home / "received"

    for number in range(3):
        wanted = ref(f"{number}" * 64, MAX_METADATA_BYTES)
        link._rollout = rollout(metadata={"timestamp.json": wanted, f"5/{NEW}.manifest.json": ref(NEW)})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await link._run_step()  # nobody sends it
        assert {path.name.split(".")[0] for path in received.iterdir()} == {wanted.digest}


async def test_what_was_announced_anew_does_not_wait_for_the_failures_of_another(home):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    first = rollout()
    for _ in range(10):
        link._record_failure(first, StoreError("disk: full"))
    assert decide(link._make_situation(first, None)) is Decision.NOTHING

    mended = rollout(metadata=first.metadata | {"timestamp.json": ref(NEW)})

    assert decide(link._make_situation(mended, None)) is Decision.INSTALL
    began = time.monotonic()
    link._record_failure(mended, StoreError("disk: full"))
    assert link._retry_at - began <= compute_retry_s(1, 1) + 1


def test_a_trial_that_another_process_began_is_as_strict_about_the_time(home, tmp_path):
    from ..bundles import GOLDEN, digest

    new = variant(tmp_path / "new", release=2, gate=other_gate)
    slots = Slots(home)
    slots.stage(*source(new))
    slots.switch()
    seen = Outcome(digest=digest(new), switched=True, before=Quality(n=1, latency_ms=0.0))
    (home / "outcome.json").write_bytes(msgspec.json.encode(seen))
    answering = ActiveBundle(slots, Limits(latency_ratio=1, latency_slack_ms=0))
    Link("pi", "test", home, slots, answering)

    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        for _ in range(LATENCY_WINDOW):
            answering.answer(arrays["x"][:1])

    assert answering.runtime.manifest.release == 1
    assert slots.state.refused[digest(new)].startswith("latency: ")


def test_what_has_expired_is_judged_anew_when_the_clock_was_set_back():
    now = time.time()
    assert Judgement(announcement="a", reason="expired: x", at=now - 1).holds_for("a")
    assert not Judgement(announcement="a", reason="expired: x", at=now + 3600).holds_for("a")
    assert Judgement(announcement="a", reason="forged: x", at=now + 3600).holds_for("a")
    assert not Judgement(announcement="a", reason="forged: x", at=now).holds_for("b")


async def test_nothing_is_fetched_of_a_release_below_the_highest_that_ran_here(home):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    for release, reason in ((1, None), (0, "rollback: release 0 is older than 1, which ran here")):
        now = link._make_situation(msgspec.structs.replace(rollout(), release=release), None)
        assert now.judged == reason
        assert decide(now) is (Decision.INSTALL if reason is None else Decision.NOTHING)


@pytest.fixture
def metadata_s(monkeypatch):
    """Called with how long metadata are waited for."""
    return lambda seconds: monkeypatch.setattr("deploy.updates.link.METADATA_S", seconds)


async def test_the_inbox_does_not_wait_for_metadata_that_nobody_sends(home, metadata_s):
    metadata_s(0.3)
    variant(home / "bundles" / "2", release=2, gate=other_gate)

    answering = await followed(
        home, lambda slots, answering: slots.state.trial is None and slots.running.name == "slot-b", announced=rollout()
    )

    assert answering.runtime.manifest.release == 2


def announced_as(rollout):
    """As on the wire, signed by nobody."""
    return encode_message(Announcement(rollout=encode_message(rollout), signatures={}))


async def test_who_announces_anew_is_asked_at_once(home):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    link._record_failure(rollout(), StoreError("time-out: x"))
    for retained, do in ((True, Decision.NOTHING), (False, Decision.INSTALL)):
        await link._on_rollout(Inbound(topic="", payload=announced_as(rollout()), retained=retained))
        assert decide(link._make_situation(link._rollout, None)) is do


async def test_what_nobody_signed_changes_nothing(home):
    simulator, slots = Simulator(), Slots(home)
    install_root(home, simulator.files["1.root.json"])
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    genuine = rollout(version=3)

    async def hears(payload):
        await link._on_rollout(Inbound(topic="", payload=payload, retained=False))
        return link._rollout

    assert await hears(announced_as(genuine)) is None
    assert await hears(encode_message(simulator.announce(genuine, "test"))) == genuine
    aborted = msgspec.structs.replace(genuine, state=ABORTED, version=4)
    for payload in (
        announced_as(aborted),
        encode_message(Simulator().announce(aborted, "test")),
        encode_message(simulator.announce(aborted, "elsewhere")),
        encode_message(simulator.announce(msgspec.structs.replace(aborted, version=2), "test")),
    ):
        assert await hears(payload) == genuine
        assert re.match("announcement refused: (forged|rollback)", link._distrusted)
    assert await hears(encode_message(simulator.announce(aborted, "test"))) == aborted
    assert link._distrusted == ""


async def test_what_a_foreign_key_announced_is_said_in_its_health(home):
    slots, transport = Slots(home), Unheard()
    install_root(home, Simulator().files["1.root.json"])
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    await link.attach(transport)
    payload = encode_message(Simulator().announce(rollout(version=3), "test"))
    await link._on_rollout(Inbound(topic="", payload=payload, retained=True))
    running = asyncio.gather(link.follow(), link.publish_health())
    try:
        async with asyncio.timeout(300):
            while not transport.published:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    said = decode_message(transport.published[-1], Health)
    assert (said.phase, said.release) == (Phase.SERVING, 1)
    assert said.reason.startswith("announcement refused: forged")


async def test_when_it_ends_it_says_so_and_the_broker_would_say_so_for_it(home):
    slots, transport = Slots(home), Unheard()
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    will = link.make_last_will(BrokerSettings("nobody"))
    await link.attach(transport)
    running = asyncio.create_task(link.publish_health())
    link._update_health()
    async with asyncio.timeout(300):
        while not transport.published:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    first, last = (decode_message(said, Health) for said in transport.published)
    dead = decode_message(will.payload, Health)
    assert (first.serving, last.serving, dead.serving) == (True, False, False)
    assert (dead.device_id, dead.phase, dead.release, dead.n_predictions) == ("pi", Phase.SERVING, 1, 0)
    assert (will.topic, will.delay_s) == ("fedge/1/test/agents/pi/health", 0)


async def test_it_speaks_up_when_an_earlier_process_is_said_to_have_gone(home):
    slots, transport = Slots(home), Unheard()
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    await link.attach(transport)
    for serving in (True, False):
        said = encode_message(Health(device_id="pi", at=1.0, phase=Phase.SERVING, release=1, serving=serving))
        await link._on_own_health(Inbound(topic="", payload=said, retained=False))
        assert link._unsaid.is_set() == (not serving)


def test_an_owner_who_forbids_verdicts_leaves_no_last_will(home):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()), Rules(frozenset({Reveals.NOTHING})))
    assert link.make_last_will(BrokerSettings("nobody")) is None


async def test_it_tells_no_figures_from_the_first_training_with_differential_privacy_on(home, monkeypatch):
    """Whether agent and runtime started together or not."""
    monkeypatch.setattr("deploy.updates.link.HEALTH_S", 0.05)
    slots, transport = Slots(home), Unheard()
    answering = ActiveBundle(slots, Limits())
    answering.n_predictions = 7
    link = Link("pi", "test", home, slots, answering)
    await link.attach(transport)
    running = asyncio.gather(link.follow(), link.publish_health())

    async def told(n_predictions):
        while not transport.published or decode_message(transport.published[-1], Health).n_predictions != n_predictions:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    try:
        async with asyncio.timeout(60):
            await told(7)
            (home / PRIVACY_LEDGER).write_text("[]")
            await told(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_alarm_is_told_with_its_kind_and_outlives_process_and_bundle(home, monkeypatch):
    monkeypatch.setattr("deploy.updates.link.LOOK_S", 0.02)
    raised = Alarm(DriftKind.INPUTS, 1)

    async def run(until, begin=lambda answering: None):
        """A process that runs until its Health says so; its last Health."""
        slots, transport = Slots(home), Unheard()
        answering = ActiveBundle(slots, Limits(probation_s=0, latency_slack_ms=1e6))
        link = Link("pi", "test", home, slots, answering)
        await link.attach(transport)
        begin(answering)
        running = asyncio.gather(link.follow(), link.publish_health())
        try:
            async with asyncio.timeout(300):
                while not transport.published or not until(  # noqa: ASYNC110
                    said := decode_message(transport.published[-1], Health)
                ):
                    await asyncio.sleep(0.02)
                while (home / "drift.json").exists() is not said.drift:  # noqa: ASYNC110 - a thread does it
                    await asyncio.sleep(0.02)
            return said
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    said = await run(lambda health: health.drift, lambda answering: answering.raise_alarm(raised))
    assert (said.drift_kind, said.drift_release) == (DriftKind.INPUTS, 1)
    variant(home / "bundles" / "2", release=2, gate=other_gate)

    said = await run(lambda health: (health.release, health.phase) == (2, Phase.SERVING))

    assert (said.drift, said.drift_kind, said.drift_release) == (True, DriftKind.INPUTS, 1)
    said = await run(lambda health: not health.drift, lambda answering: answering.raise_alarm(None))
    assert (said.drift_kind, said.drift_release) == (None, 0)
    assert ActiveBundle(Slots(home), Limits()).alarm is None


async def test_without_a_root_of_trust_it_says_what_is_missing_and_takes_nothing_back(home):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    await link.attach(Unheard())
    await link._on_rollout(Inbound(topic="", payload=announced_as(rollout(metadata={})), retained=False))
    assert link._rollout is not None
    await link._on_rollout(
        Inbound(topic="", payload=announced_as(msgspec.structs.replace(rollout(), state=ABORTED)), retained=False)
    )
    assert link._rollout is None


async def test_a_bundle_that_proves_worse_is_given_up_while_the_next_is_being_fetched(home, tmp_path, metadata_s):
    metadata_s(1e6)
    slots = Slots(home)
    slots.stage(*source(variant(tmp_path / "2", release=2, gate=poor_gate)))
    slots.switch()
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        x, y = arrays["x"], arrays["y"]

    def given_up(slots, answering):
        if list((home / "received").iterdir()) and answering.runtime.manifest.release == 2:
            answering.add_feedback(x, y)
        return answering.runtime.manifest.release == 1

    answering = await followed(home, given_up, announced=rollout())

    assert answering.runtime.manifest.release == 1
    assert next(iter(Slots(home).state.refused.values())).startswith("accuracy: ")


async def test_a_release_that_does_not_fit_on_the_disk_waits_and_one_beyond_all_measure_is_refused(home, free_disk):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))

    free_disk.bytes = SPARE_DISK_BYTES + 10
    link._require_room(6, 4)
    with pytest.raises(StoreError, match=r"^disk: 11 bytes"):
        link._require_room(11, 0)
    with pytest.raises(UpdateRejected, match=r"^oversized: "):
        link._require_room(MAX_RELEASE_BYTES + 1, 0)


async def test_no_rollout_takes_back_what_the_agent_on_this_device_wrote(home):
    folder = variant(home / "bundles" / "2", release=2, gate=other_gate)
    await followed(home, switched)
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, Limits()))
    digest = compute_digest((folder / "manifest.json").read_bytes())
    forged = rollout(target="2/manifest.json", metadata={f"2/{digest}.manifest.json": ref(digest)})
    link._rollout = msgspec.structs.replace(forged, state=ABORTED)

    await link._run_step()

    assert slots.running.name == "slot-b"
    assert not slots.state.refused


@pytest.mark.parametrize("damage", ["folder", "bytes"])
async def test_a_damaged_outcome_is_put_aside_and_the_next_can_be_written(home, damage):
    file = home / "outcome.json"
    file.unlink(missing_ok=True)
    if damage == "bytes":
        file.write_bytes(b"\xff[")
    else:
        (file / "lost+found").mkdir(parents=True)
    variant(home / "bundles" / "2", release=2, gate=other_gate)
    await followed(home, switched)
    assert file.is_file()
    assert file.with_name("outcome.json.damaged").exists()
