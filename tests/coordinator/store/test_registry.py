"""Who counts as a device, and what is refused."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest

from coordinator.store.records import Device, DeviceFacts
from coordinator.store.registry import GROWS_S, MAX_DEVICES, Registry
from fedge.errors import ProtocolError
from fedge.wire.messages import (
    AtWork,
    Capabilities,
    Context,
    DriftKind,
    Health,
    Phase,
    Presence,
    Quality,
    SiteDevice,
    Status,
)

NOW = 1e9


def status(
    device: str = "a", presence: Presence = Presence.ONLINE, incarnation: str = "1", **changes: object
) -> Status:
    values: dict[str, object] = {"task_fingerprint": "t", "n_samples": 5}
    return Status(device_id=device, incarnation=incarnation, presence=presence, **(values | changes))


def here(*ids: str) -> Registry:
    registry = Registry("t")
    for i in ids:
        registry.handle_status(i, status(i))
        registry.handle_context(i, Context(device_id=i), NOW)
    return registry


def test_devices_are_those_online_by_ascending_id_with_the_context_that_is_known() -> None:
    registry = here("b", "a")
    registry.handle_status("c", status("c"))
    known = (
        Device("a", 5, Context(device_id="a"), incarnation="1"),
        Device("b", 5, Context(device_id="b"), incarnation="1"),
    )
    assert registry.list_online() == (*known, Device("c", 5, None, incarnation="1"))
    registry.handle_context("c", Context(device_id="c", load=0.5), NOW)
    assert registry.list_online() == (*known, Device("c", 5, Context(device_id="c", load=0.5), incarnation="1"))


def test_what_steps_a_device_knows_and_what_bundle_it_had_are_what_its_status_says() -> None:
    registry = Registry("t")
    registry.handle_status("a", status(release=4, capabilities=Capabilities(trains=True, steps={"train": 1})))
    (device,) = registry.list_online()
    assert (device.steps, device.release) == ({"train": 1}, 4)


@pytest.mark.parametrize("presence", [Presence.OFFLINE, Presence.SLEEPING])
def test_a_device_that_left_is_not_asked(presence: Presence) -> None:
    registry = here("a", "b")
    assert not registry.handle_status("a", status(presence=presence))
    assert [d.id for d in registry.list_online()] == ["b"]
    assert registry.list_presence() == {"a": presence, "b": Presence.ONLINE}


def test_every_birth_is_told_even_of_the_same_incarnation() -> None:
    """It may come back to a broker that has forgotten what it was sent."""
    registry = here("a")
    assert registry.handle_status("a", status())
    assert registry.handle_status("a", status(incarnation="2"))
    registry.handle_status("a", status(presence=Presence.SLEEPING, incarnation="2"))
    assert registry.handle_status("a", status(incarnation="2"))


def test_a_status_that_only_tells_of_a_new_bundle_is_no_birth() -> None:
    """Otherwise its order would be sent again, and its report repeated, at the end of each federation."""
    registry = here("a")
    assert not registry.handle_status("a", status(release=1))
    assert registry.list_online()[0].release == 1
    assert registry.handle_status("a", status(release=1))


def test_a_connection_that_comes_back_makes_no_device_another_one() -> None:
    """The broker tells a coordinator that reconnects, or is started again, all retained statuses once more."""
    registry = here("a")
    before = registry.list_online()
    registry.handle_status("a", status())
    registry.handle_status("a", status(presence=Presence.OFFLINE))
    registry.handle_status("a", status())
    assert registry.list_online() == before
    assert here("a").list_online() == before
    registry.handle_status("a", status(incarnation="2"))
    assert registry.list_online() != before


def test_the_last_will_of_an_earlier_life_is_ignored() -> None:
    registry = here("a")
    registry.handle_status("a", status(incarnation="2"))
    registry.handle_status("a", status(presence=Presence.OFFLINE, incarnation="1"))
    assert registry.list_presence() == {"a": Presence.ONLINE}
    registry.handle_status("a", status(presence=Presence.OFFLINE, incarnation="2"))
    assert registry.list_presence() == {"a": Presence.OFFLINE}


def test_a_device_that_cannot_train_is_not_asked() -> None:
    registry = here("a", "b")
    registry.handle_status("a", status(capabilities=Capabilities(trains=False)))
    assert [device.id for device in registry.list_online()] == ["b"]
    (found,) = registry.list_inference_only()
    assert (found.id, found.trains) == ("a", False)
    registry.handle_status("a", status(presence=Presence.SLEEPING))
    assert registry.list_inference_only() == ()


def test_stored_contexts_count_until_there_are_new_ones() -> None:
    registry = Registry("t", {"a": Context(device_id="a", load=1.0)})
    registry.handle_status("a", status())
    assert registry.list_online()[0].context == Context(device_id="a", load=1.0)
    registry.handle_context("a", Context(device_id="a", load=2.0), NOW)
    assert registry.list_online()[0].context == Context(device_id="a", load=2.0)


@pytest.mark.parametrize(
    ("topic_id", "message", "name"),
    [
        ("b", status("a"), "foreign-id"),
        ("a", status("a", task_fingerprint="other"), "task-mismatch"),
        ("b", Context(device_id="a"), "foreign-id"),
        ("x", Context(device_id="x"), "unknown-device"),
    ],
)
def test_refusals_change_nothing(topic_id: str, message: Status | Context, name: str) -> None:
    registry = here("a")
    before = registry.list_online(), registry.list_presence()
    take = registry.handle_status if isinstance(message, Status) else partial(registry.handle_context, now=NOW)
    with pytest.raises(ProtocolError) as caught:
        take(topic_id, message)
    assert caught.value.name == name
    assert (registry.list_online(), registry.list_presence()) == before


def test_clocks_that_differ_by_more_than_a_minute_are_told() -> None:
    registry = Registry("t")
    for device, at in (("a", NOW + 60), ("b", NOW + 61), ("c", NOW - 365 * 86400), ("d", None)):
        registry.handle_status(device, status(device))
        registry.handle_context(device, Context(device_id=device, at=at), NOW)
    assert registry.find_wrong_clocks() == {"b": 61, "c": -365 * 86400}
    registry.handle_context("c", Context(device_id="c", at=NOW), NOW)
    assert registry.find_wrong_clocks() == {"b": 61}, "it was set"


def test_known_devices_and_those_that_are_there_find_a_place_among_invented_names() -> None:
    registry = Registry("t", {"of the last round": None})
    present = [f"p{k}" for k in range(MAX_DEVICES - 2)]
    for i in present:
        registry.handle_status(i, status(i))
    for i in ("x", "y"):
        registry.handle_status(i, status(i, presence=Presence.SLEEPING))
    with pytest.raises(ProtocolError, match="too-many-devices"):
        registry.handle_status("z", status("z", presence=Presence.SLEEPING))
    for i in ("a", "b", "of the last round"):
        registry.handle_status(i, status(i))
    assert set(registry.list_presence()) == {*present, "a", "b", "of the last round"}
    with pytest.raises(ProtocolError, match="too-many-devices"):
        registry.handle_status("c", status("c"))


def test_invented_names_do_not_fill_the_memory() -> None:
    registry = here("a", *(f"p{k}" for k in range(MAX_DEVICES - 1)))
    with pytest.raises(ProtocolError, match="too-many-devices"):
        registry.handle_status("c", status("c"))
    assert registry.handle_status("a", status())


async def test_a_late_joiner_has_no_bundle_and_was_not_asked_in_this_incarnation() -> None:
    registry = here("a", "equipped")
    tried = {"a": "1"}
    for changed in (status("a", incarnation="2"), status("b", capabilities=Capabilities(trains=False))):
        waiting = asyncio.create_task(registry.wait_for_late_joiner(tried, {"equipped"}))
        for still_the_same in (status("a", incarnation=tried["a"]), status("equipped", incarnation="2")):
            registry.handle_status(still_the_same.device_id, still_the_same)
            await asyncio.sleep(0)
            assert not waiting.done()
        registry.handle_status(changed.device_id, changed)
        await waiting
        tried = {device.id: device.incarnation for device in (*registry.list_online(), *registry.list_inference_only())}
    assert tried == {"a": "2", "b": "1", "equipped": "2"}


async def test_waiting_ends_when_enough_are_there() -> None:
    registry = here("a")
    waiting = asyncio.create_task(registry.wait_for_devices(2))
    heard = asyncio.create_task(registry.wait_for_status({"a", "b"}))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.handle_status("b", status("b"))
    await heard
    assert [d.id for d in await waiting] == ["a", "b"]


def health(device: str = "a", *, drift: bool, release: int = 1) -> Health:
    return Health(device_id=device, at=1.0, phase=Phase.SERVING, release=release, drift=drift)


def test_a_device_that_drifts_counts_as_another_one_once_for_each_bundle() -> None:
    registry = here("a", "b")
    seen = []
    for drift, release in ((False, 1), (True, 1), (True, 1), (False, 1), (True, 1), (True, 2)):
        registry.handle_health("a", health(drift=drift, release=release))
        a, b = registry.list_online()
        assert (a.drift, b) == (drift, Device("b", 5, Context(device_id="b"), incarnation="1"))
        seen.append(a.incarnation)
    calm, drifting, new = seen[0], seen[1], seen[5]
    assert seen == [calm, drifting, drifting, calm, drifting, new]
    assert len({calm, drifting, new}) == 3


def test_an_alarm_that_a_new_bundle_took_over_is_no_reason_to_ask_again() -> None:
    registry = here("a")
    seen = []
    for release, judged in ((1, 1), (2, 1), (2, 2)):
        told = msgspec.structs.replace(health(drift=True, release=release), drift_release=judged)
        registry.handle_health("a", told)
        (facts,) = registry.list_facts()
        assert facts.drift
        held = registry.describe_devices()["a"]["drift_held"]
        assert facts.held is held
        seen.append((registry.list_online()[0].incarnation, held))
    incarnations = [incarnation for incarnation, _ in seen]
    assert incarnations[1] == incarnations[0] != incarnations[2]
    assert [held for _, held in seen] == [False, True, False]


def test_other_class_shares_alone_need_no_other_bundle() -> None:
    registry = here("a")
    calm = registry.list_online()
    for kind, needs in ((DriftKind.SHARES, False), (DriftKind.INPUTS, True), (DriftKind.LABELS, True)):
        registry.handle_health("a", msgspec.structs.replace(health(drift=True), drift_kind=kind))
        assert registry.list_online()[0].drift is registry.list_facts()[0].drift is needs
        assert (registry.list_online() == calm) is not needs
        told = registry.describe_devices()["a"]
        assert (told["drift"], told["drift_kind"], told["at_work"]) == (True, str(kind), None)
    work = AtWork(right=3, wrong=1, recent=0.75)
    registry.handle_health("a", msgspec.structs.replace(health(drift=False), at_work=work))
    assert registry.describe_devices()["a"]["at_work"] == {"right": 3, "wrong": 1, "recent": 0.75}


def test_another_kind_of_drift_is_news_and_leaves_since_when_it_drifts() -> None:
    registry = here("a")
    drifts = [
        msgspec.structs.replace(health(drift=True), drift_kind=kind) for kind in (DriftKind.LABELS, DriftKind.INPUTS)
    ]
    assert [registry.handle_health("a", told, at) for told, at in zip(drifts, (5.0, 6.0), strict=True)] == [True, True]
    since: Any = registry.describe_devices()["a"]["since"]
    assert since["drift"] == 5.0


def test_how_many_samples_came_is_known_of_each_device() -> None:
    registry = here("a")
    registry.handle_status("a", status(data_version=7, n_arrived=3))
    told = registry.describe_devices()["a"]
    assert (told["data_version"], told["n_arrived"]) == (7, 3)


def test_the_accuracy_of_a_bundle_is_that_of_the_one_in_service() -> None:
    registry = here("a")
    before, now = Quality(n=40, accuracy=0.75), Quality(n=40, accuracy=0.5)
    found = []
    for phase, digest in (
        (Phase.SERVING, "1" * 64),
        (Phase.REFUSED, None),
        (Phase.ROLLED_BACK, None),
        (Phase.KEPT, None),
        (Phase.SERVING, None),  # another one answers than was measured
    ):
        told = Health(device_id="a", at=1.0, phase=phase, release=2, bundle_digest=digest, before=before, now=now)
        registry.handle_health("a", told)
        shown: Any = registry.describe_devices()["a"]["of_bundle"]
        found.append(shown and (shown["accuracy"], shown["n"], shown["release"]))
    assert found == [(0.5, 40, 2), (0.75, 40, 2), (0.75, 40, 2), (0.75, 40, 2), None]


def test_a_runtime_that_has_gone_stands_where_it_stood() -> None:
    registry = here("a")
    assert registry.describe_devices()["a"]["serving"] == "none"
    assert registry.handle_health("a", health(drift=True, release=4), 5.0)
    assert not registry.handle_health("a", health(drift=True, release=4), 6.0)
    gone = Health(device_id="a", at=1.0, phase=Phase.SERVING, release=1, serving=False)
    assert registry.handle_health("a", gone, 7.0)
    told: Any = registry.describe_devices()["a"]
    assert (told["serving"], told["health"]["release"], told["health"]["drift"]) == ("down", 4, True)
    assert (told["since"]["serving"], told["since"]["drift"]) == (7.0, 5.0)


def test_since_when_and_how_long_usually_outlive_a_restart() -> None:
    registry = here("a")
    for presence, at in ((Presence.OFFLINE, 10_000.0), (Presence.ONLINE, 12_000.0), (Presence.OFFLINE, 20_000.0)):
        registry.handle_status("a", status("a", presence=presence), at)
    registry.handle_health("a", health(drift=True), 21_000.0)
    before: Any = registry.describe_devices()["a"]
    assert (before["since"]["presence"], before["habit_s"]) == (20_000.0, 3000.0)
    later = Registry("t", kept=registry.export_messages())
    later.handle_health("a", health(drift=True), 30_000.0)
    later.handle_status("a", status("a", presence=Presence.OFFLINE), 30_000.0)
    after: Any = later.describe_devices()["a"]
    assert (after["since"], after["habit_s"]) == (before["since"], 3000.0)


async def test_drift_is_reason_enough_to_ask_a_device_again() -> None:
    registry = here("a")
    waiting = asyncio.create_task(registry.wait_for_late_joiner({"a": "1"}, {"a"}))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.handle_health("a", health(drift=True))
    async with asyncio.timeout(300):
        await waiting


def test_nobody_says_for_another_that_it_drifts() -> None:
    registry = here("a", "b")
    with pytest.raises(ProtocolError, match="foreign-id"):
        registry.handle_health("b", health(drift=True))
    assert not any(device.drift for device in registry.list_online())


def test_drift_that_is_told_before_the_birth_is_remembered() -> None:
    registry = Registry("t")
    registry.handle_health("a", health(drift=True))
    registry.handle_status("a", status())
    assert [device.drift for device in registry.list_online()] == [True]


def test_two_agents_of_one_id_are_noticed_and_any_of_their_wills_counts() -> None:
    registry = here("a")
    registry.handle_status("a", status("a", incarnation="2"))
    assert not registry.is_twice("a")  # it was started again
    assert "twins" not in registry.describe_devices()["a"]
    registry.handle_status("a", status("a", incarnation="1"))
    assert list(registry.describe_devices()["a"]["twins"]) == ["1", "2"]
    assert registry.is_twice("a")
    registry.handle_status("a", status("a", incarnation="2"), 30.0)
    registry.handle_status("a", status("a", incarnation="1"), 60.0)
    registry.handle_status("a", status("a", incarnation="1"), 70.0)
    assert registry.get_twins("a") == {"1": 60.0, "2": 30.0}
    registry.handle_status("a", status("a", Presence.OFFLINE, incarnation="2"))
    assert registry.list_presence() == {"a": Presence.OFFLINE}
    registry.handle_status("a", status("a", incarnation="3"))
    assert not registry.is_twice("a")
    assert registry.list_presence() == {"a": Presence.ONLINE}


def test_who_said_something_older_than_what_is_known_may_be_two() -> None:
    registry = here("a")
    registry.record_outdated("a")
    registry.record_outdated("unknown")
    registry.handle_status("a", status("a", Presence.OFFLINE, incarnation="0"))
    assert registry.list_presence() == {"a": Presence.OFFLINE}


def test_who_is_forgotten_is_no_device_any_more() -> None:
    registry = here("a", "b")
    assert registry.get_incarnation("a") == "1"
    registry.forget("a")
    registry.forget("unknown")
    assert [device.id for device in registry.list_online()] == ["b"]
    assert registry.get_incarnation("a") is None
    assert not registry.knows("a")


def test_the_devices_behind_a_relay_are_devices_and_the_relay_is_none() -> None:
    registry = here("z", "s.taken")
    behind = (
        SiteDevice("d1", 7, "i", True, False, 2),
        SiteDevice("d2", 0, "i", False, True, 0, ("labels",)),
        SiteDevice("taken", 1, "i", True, False, 0),
        SiteDevice("d" * 62, 1, "i", True, False, 0),
    )
    assert registry.handle_status("s", status("s", site=behind))
    assert [device.id for device in registry.list_online()] == ["s.d1", "s.taken", "z"], "no name is taken, or too long"
    assert registry.list_online()[0] == Device("s.d1", 7, None, "i", release=2, via="s")
    assert registry.list_inference_only() == (
        Device("s.d2", 0, None, "i", trains=False, drift=True, withholds=("labels",), via="s"),
    )
    assert registry.list_behind_relays() == dict.fromkeys(("s.d1", "s.d2"), Presence.ONLINE)
    assert not registry.handle_status("s", status("s", site=behind[:1])), (
        "others behind it: that it is there is no news"
    )
    registry.exclude({"s"})
    assert [device.id for device in registry.list_online()] == ["s.taken", "z"], (
        "a relay in quarantine is out with its site"
    )
    assert registry.list_inference_only() == ()
    registry.exclude(())
    registry.handle_status("s", status("s", Presence.OFFLINE, site=behind))
    assert [device.id for device in registry.list_online()] == ["s.taken", "z"]


def test_samples_and_drift_of_devices_behind_a_relay_count_as_those_of_others() -> None:
    registry = here("z")
    behind = (
        SiteDevice("d1", 7, "i", True, True, 2, (), None, 4, 9, DriftKind.LABELS),
        SiteDevice("d2", 5, "i", True, False, 2),  # a relay of an earlier version tells neither
    )
    registry.handle_status("s", status("s", site=behind))
    assert registry.list_facts() == [
        DeviceFacts(id="s.d1", data_version=4, n_arrived=9, drift=True, drift_kind=DriftKind.LABELS),
        DeviceFacts(id="s.d2"),
        DeviceFacts(id="z"),
    ]
    told = registry.describe_devices()["s.d1"]
    assert (told["n_arrived"], told["data_version"], told["drift"], told["drift_kind"]) == (9, 4, True, "labels")
    registry.handle_status("s", status("s", Presence.OFFLINE, site=behind))
    assert [facts.online for facts in registry.list_facts()] == [False, False, True]
    registry.exclude({"s"})
    assert [facts.id for facts in registry.list_facts()] == ["z"]


def test_where_there_can_be_no_relays_they_are_refused_with_the_reason() -> None:
    registry = Registry("t", no_relays="it needs single updates")
    with pytest.raises(ProtocolError, match="no-relays: s is a relay, and its devices are left out: it needs single"):
        registry.handle_status("s", status("s", site=()))
    registry.handle_context("s", Context(device_id="s"), NOW)
    assert registry.list_online() == ()


def test_a_device_with_another_task_is_told_of_in_words() -> None:
    registry, words = here(), "the task is one without class bird; the network cnn in place of mlp"
    for said, told in (("", "the task is another one"), (words, words)):
        with pytest.raises(ProtocolError, match=told) as caught:
            registry.handle_status("a", status(task_fingerprint="other", other_task=said))
        assert caught.value.name == "task-mismatch"
        assert "another federation" in str(caught.value)


def test_a_device_that_lacks_a_class_has_time_to_take_it_up() -> None:
    registry = Registry("t", earlier=("t0",))
    with pytest.raises(ProtocolError) as caught:
        registry.handle_status("a", status(task_fingerprint="t0"), NOW)
    assert caught.value.name == "task-behind"
    context = Context(device_id="a")
    registry.handle_context("a", context, NOW + GROWS_S)
    assert (registry.list_online(), registry.get_presence("a")) == ((), None)
    with pytest.raises(ProtocolError, match="update fedge") as caught:
        registry.handle_context("a", context, NOW + GROWS_S + 1)
    assert caught.value.name == "task-mismatch"

    registry.handle_status("a", status(), NOW)
    registry.handle_context("a", context, NOW + 2 * GROWS_S)
    assert [device.id for device in registry.list_online()] == ["a"]
