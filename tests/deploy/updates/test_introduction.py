"""When a campaign's bundle waits, is tried and goes back; over a broker: tests/integration/test_introduction.py."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace

from deploy.updates import introduction as introduction_of_deploy
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Examination, Limits
from deploy.updates.introduction import FILE, Introduction
from deploy.updates.link import Link
from deploy.updates.slots import Slots
from fedge.bundle.campaign import make_campaign_files
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.errors import ProtocolError
from fedge.membership.signed_messages import Plain
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import Phase, Quality, Rollout, RolloutState, encode_message
from fedge.wire.rollout import compute_introduction_digest, compute_place

from ..bundles import GOLDEN, broken_gate, digest, other_gate, poor_gate, source, variant

pytestmark = pytest.mark.torch_free

RUNNING, PAUSED, ABORTED, DONE = RolloutState
OLD, NEW = "a" * 64, "b" * 64
ANNOUNCED = Rollout(id="i3", state=RUNNING, target="campaign 3", release=3, share=1.0, metadata={})
FIT, WORSE = Examination(reason=""), Examination(reason="accuracy: x")
LENIENT = Limits(probation_s=0, latency_ratio=100.0, latency_slack_ms=1000.0)


def introduction(home, announced=ANNOUNCED, *, waits=True):
    found = Introduction(home, "pi", waits=waits)
    found.announced = announced
    return found


@pytest.mark.parametrize(
    ("campaign", "announced", "held"),
    [
        (0, None, False),
        (3, None, True),
        (3, ANNOUNCED, False),
        (3, replace(ANNOUNCED, state=DONE), False),
        (3, replace(ANNOUNCED, state=PAUSED), True),
        (3, replace(ANNOUNCED, state=ABORTED), True),
        (3, replace(ANNOUNCED, share=compute_place("i3", "pi")), True),
        (3, replace(ANNOUNCED, share=0.0, canaries=("pi",)), False),
        (4, ANNOUNCED, True),  # its introduction has not begun
        (2, ANNOUNCED, True),  # it missed its own
    ],
)
def test_which_bundle_waits(tmp_path, campaign, announced, held):
    assert introduction(tmp_path, announced).is_held(campaign) is held
    assert not introduction(tmp_path, announced, waits=False).is_held(campaign)


def bundle(folder, campaign=0, **changes):
    """In the inbox, with the mark of its campaign."""
    variant(folder, **changes)
    for name, data in make_campaign_files(campaign).items():
        (folder / name).write_bytes(data)
    return folder


def test_only_bundles_above_the_one_in_service_are_looked_at(tmp_path):
    for number in (2, 3, 4):
        bundle(tmp_path / "bundles" / str(number), 9 if number > 2 else 0, release=number)
    assert introduction(tmp_path).list_held(3) == {tmp_path / "bundles" / "4"}
    assert introduction(tmp_path, waits=False).list_held(3) == set()


def phase(found, running, refused=None, *, on_trial=False):
    health = found.make_health(2, running, refused, on_trial=on_trial, at=1.0)
    return str(health.phase), health.reason, health.rollout, health.bundle_digest


def test_what_it_says_of_its_bundle_and_never_the_digest(tmp_path):
    found, name = introduction(tmp_path), compute_introduction_digest("i3")
    assert phase(found, OLD) == ("serving", "", None, None)
    found.examining = True
    assert phase(found, OLD) == ("fetching", "", "i3", None)
    found.examining = False
    found.record_examination(3, NEW, FIT)
    assert phase(found, NEW, on_trial=True) == ("trial", "", "i3", name)
    assert phase(found, NEW) == ("serving", "", "i3", name)
    assert phase(found, OLD, "latency: x") == ("rolled_back", "latency: x", "i3", None)
    found.record_examination(3, NEW, WORSE)
    assert phase(found, OLD, "accuracy: x") == ("kept", "accuracy: x", "i3", None)
    found.record_examination(3, NEW, Examination(reason="not-finite: x"))
    assert phase(found, OLD, "not-finite: x") == ("refused", "not-finite: x", "i3", None)
    found.announced = replace(ANNOUNCED, id="i4", release=4)
    assert phase(found, OLD, "not-finite: x") == ("serving", "", None, None)


def test_it_remembers_beyond_a_restart(tmp_path):
    introduction(tmp_path).record_examination(3, NEW, FIT)
    assert phase(introduction(tmp_path), NEW)[0] == "serving"
    assert introduction(tmp_path, replace(ANNOUNCED, state=ABORTED)).is_recalled(NEW)
    (tmp_path / FILE).write_bytes(b"junk")
    assert phase(introduction(tmp_path), NEW) == ("serving", "", None, None)


def test_only_what_an_aborted_introduction_brought_goes_back(tmp_path):
    found = introduction(tmp_path)
    found.record_examination(3, NEW, FIT)
    assert not found.is_recalled(NEW)
    found.announced = replace(ANNOUNCED, state=ABORTED)
    assert found.is_recalled(NEW)
    assert not found.is_recalled(OLD)
    found.announced = replace(ANNOUNCED, state=ABORTED, id="i4")
    assert not found.is_recalled(NEW)


def test_a_first_bundle_counts_as_introduced_and_has_no_way_back(tmp_path):
    first = bundle(tmp_path / "bundles" / "1", 3, release=1)
    found = introduction(tmp_path)
    found.adopt_running(1, "c" * 64)
    assert phase(found, digest(first))[2] is None
    found.adopt_running(1, digest(first))
    assert phase(found, digest(first))[:3] == ("serving", "", "i3")
    found.announced = replace(ANNOUNCED, state=ABORTED)
    assert not found.is_recalled(digest(first))


def test_figures_are_of_this_introduction_alone(tmp_path):
    found = introduction(tmp_path)
    measured = replace(WORSE, before=Quality(n=31, accuracy=1.0), now=Quality(n=31, accuracy=0.94))
    found.record_examination(3, NEW, measured)
    assert found.make_health(2, OLD, "accuracy: x", on_trial=False, at=1.0).now == measured.now
    found.announced = replace(ANNOUNCED, id="i4")
    assert found.make_health(2, OLD, "accuracy: x", on_trial=False, at=1.0).now is None


# ------------------------------------------------------------------------------------------------- with the link


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home"
    slots = Slots(home)
    slots.stage(*source(variant(tmp_path / "first", release=1)))
    slots.switch()
    slots.confirm()
    slots.repair()
    return home


def link_of(home, *, waits=True):
    slots = Slots(home)
    link = Link("pi", "test", home, slots, ActiveBundle(slots, LENIENT), waits=waits)
    link._signed = Plain()
    return link


async def hear(link, announced):
    await link._on_introduction(Inbound("", encode_message(announced), retained=False))


async def follow(link, until):
    """Follow until the condition holds."""
    running = asyncio.create_task(link.follow())
    try:
        async with asyncio.timeout(120):
            while not until():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def said(link):
    health = link._make_introduced()
    return str(health.phase), health.release


async def test_a_bundle_waits_is_tried_and_goes_back_when_the_introduction_is_aborted(home):
    new = bundle(home / "bundles" / "2", 3, release=2, gate=other_gate)
    link = link_of(home)
    assert link._find_inbox_bundle() is None
    await hear(link, ANNOUNCED)
    assert link._find_inbox_bundle() == new
    await follow(link, lambda: link.slots.state.running == "b" and link.slots.state.trial is None)
    assert said(link) == ("serving", 2)

    await hear(link, replace(ANNOUNCED, state=ABORTED))
    await follow(link, lambda: link.answering.runtime.manifest.release == 1)
    assert said(link) == ("rolled_back", 1)
    assert link.slots.state.refused[digest(new)] == "aborted: introduction i3"
    assert link._find_inbox_bundle() is None


async def test_without_a_broker_it_waits_for_nobody(home):
    bundle(home / "bundles" / "2", 3, release=2, gate=other_gate)
    link = link_of(home, waits=False)
    await follow(link, lambda: link.slots.state.running == "b" and link.slots.state.trial is None)


@pytest.mark.parametrize(("gate", "phase_"), [(poor_gate, Phase.KEPT), (broken_gate, Phase.REFUSED)])
async def test_a_bundle_that_is_worse_is_not_taken_and_one_that_is_broken_is_refused(home, gate, phase_):
    new = bundle(home / "bundles" / "2", 3, release=2, gate=gate)
    link = link_of(home)
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        samples = np.tile(arrays["x"], (5, *[1] * (arrays["x"].ndim - 1)))
    runtime = link.answering.runtime
    Validation(preprocess(runtime.task, runtime.add_batch_axis(samples)), runtime.predict(samples).class_index).save(
        home
    )
    await hear(link, ANNOUNCED)
    await follow(link, lambda: digest(new) in link.slots.state.refused)
    assert said(link) == (str(phase_), 1)
    assert link._make_introduced().rollout == "i3"


async def test_one_that_is_paused_during_the_examination_waits_on(home, monkeypatch):
    bundle(home / "bundles" / "2", 3, release=2, gate=other_gate)
    link = link_of(home)
    await hear(link, ANNOUNCED)

    def examine(*_):
        link._introduction.announced = replace(ANNOUNCED, state=PAUSED)
        return FIT

    monkeypatch.setattr("deploy.updates.link.examine_bundle", examine)
    await link._install_inbox(home / "bundles" / "2")
    assert link.slots.state.running == "a"
    assert said(link) == ("serving", 1)
    assert link._find_inbox_bundle() is None
    await hear(link, ANNOUNCED)
    assert link._find_inbox_bundle() is not None


async def test_what_a_stranger_announces_is_refused(home):
    link = link_of(home)
    with pytest.raises(ProtocolError):
        await link._on_introduction(Inbound("", b"\x95junk", retained=False))
    assert link._introduction.announced is None


async def test_a_broker_that_hides_introductions_without_a_word_is_named_after_a_while(home, monkeypatch, caplog):
    bundle(home / "bundles" / "2", 3, release=2, gate=other_gate)
    link = link_of(home)
    assert link._find_inbox_bundle() is None
    assert link._make_introduced().reason == ""
    monkeypatch.setattr(introduction_of_deploy, "SILENCE_S", 0.0)
    link._find_inbox_bundle()
    link._find_inbox_bundle()
    assert link._make_introduced().reason.startswith("waits: this device has heard of no introduction")
    assert caplog.text.count("event=no_introduction") == 1
    assert "fedge provision broker" in caplog.text
    await hear(link, replace(ANNOUNCED, share=0.0))  # it waits for its turn
    assert link._find_inbox_bundle() is None
    assert link._make_introduced().reason == ""


async def test_where_the_broker_lets_it_hear_of_no_introduction_it_waits_for_none(home):
    new = bundle(home / "bundles" / "2", 3, release=2, gate=other_gate)
    link = link_of(home)
    assert link._find_inbox_bundle() is None
    link._on_introduction_refused("not authorised")
    assert link._find_inbox_bundle() == new
