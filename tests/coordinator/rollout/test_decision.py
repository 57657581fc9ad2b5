"""When a rollout goes on, waits, and stops: as tables, and over random fleets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.rollout.decision import (
    DeviceHealth,
    Plan,
    Progress,
    compute_share,
    decide,
    is_over,
    list_members,
    make_message,
)
from fedge.wire.messages import Health, Phase, Quality, RolloutState
from fedge.wire.rollout import compute_place

OLD, NEW = "a" * 64, "b" * 64
PLAN = Plan(id="r", target="2/manifest.json", release=2, digest=NEW, soak_s=10.0, absent_s=100.0)
BEGIN = Progress(began=0.0)
RUNNING, PAUSED, ABORTED, DONE = RolloutState
DEVICES = sorted((f"d{i}" for i in range(20)), key=lambda device: compute_place("r", device))


def seen(device, phase=Phase.SERVING, *, new=True, at=0.0, rollout="r", **others):
    new = new and phase in {Phase.SERVING, Phase.TRIAL}
    health = Health(
        device_id=device,
        at=at,
        phase=phase,
        release=2 if new else 1,
        bundle_digest=NEW if new else OLD,
        rollout=rollout,
        **others,
    )
    return DeviceHealth(health=health, at=at)


def fleet(n_new, *, at=0.0, **others):
    """The first so many run it, in the order of their places, the others do not."""
    return {
        device: seen(device, at=at, **others) if i < n_new else seen(device, new=False, rollout=None, at=at)
        for i, device in enumerate(DEVICES)
    }


def in_stage(stage):
    return Progress(began=0.0, stage=stage, share=PLAN.stages[stage])


N_FIRST = sum(compute_place("r", device) < 0.1 for device in DEVICES)
N_SECOND = sum(compute_place("r", device) < 0.5 for device in DEVICES)


def test_a_stage_must_be_well_for_the_soak_time():
    devices = fleet(N_FIRST)
    first = decide(PLAN, in_stage(0), devices, 1.0)
    assert (first.stage, first.good_since) == (0, 1.0)
    assert decide(PLAN, first, devices, 10.9) == first

    second = decide(PLAN, first, devices, 11.0)
    assert (second.stage, second.share, second.began, second.good_since) == (1, 0.5, 11.0, None)


def test_the_soak_time_begins_anew_when_a_device_falls_behind():
    good = decide(PLAN, in_stage(0), fleet(N_FIRST), 1.0)
    assert good.good_since == 1.0
    assert decide(PLAN, good, fleet(0), 5.0).good_since is None


def test_a_clock_that_is_set_back_holds_nothing_up():
    good = decide(PLAN, in_stage(0), fleet(N_FIRST), 1e6)
    assert good.good_since == 1e6
    assert decide(PLAN, decide(PLAN, good, fleet(N_FIRST), 1.0), fleet(N_FIRST), 11.0).stage == 1

    stopped = decide(PLAN, replace(in_stage(0), state=ABORTED, began=1e6), fleet(0), 1.0)
    assert is_over(PLAN, stopped, fleet(0), 3.0)


def test_after_the_last_stage_it_is_done():
    last = replace(in_stage(2), good_since=0.0)
    assert decide(PLAN, last, fleet(20), 10.0).state is DONE


@pytest.mark.parametrize("state", [PAUSED, ABORTED, DONE])
def test_nothing_is_decided_where_it_does_not_run(state):
    progress = replace(in_stage(0), state=state)
    assert decide(PLAN, progress, {"d0": seen("d0", Phase.REFUSED)}, 1e6) == progress


@pytest.mark.parametrize("phase", [Phase.REFUSED, Phase.ROLLED_BACK])
def test_a_single_failure_stops_the_first_stage(phase):
    failed = seen(DEVICES[0], phase, reason="accuracy: worse")
    stopped = decide(PLAN, in_stage(0), fleet(N_FIRST) | {DEVICES[0]: failed}, 5.0)
    assert (stopped.state, stopped.reasons) == (ABORTED, (f"{DEVICES[0]} {phase}: accuracy: worse",))


@pytest.mark.parametrize(("max_failures", "state"), [(0.05, ABORTED), (0.6, RUNNING)])
def test_what_share_may_fail_is_a_setting_in_the_first_stage_too(max_failures, state):
    devices = fleet(3) | {DEVICES[0]: seen(DEVICES[0], Phase.REFUSED, reason="latency: slow")}
    plan = replace(PLAN, max_failures=max_failures)
    first = replace(in_stage(0), share=math.nextafter(compute_place("r", DEVICES[1]), 1))
    assert len(list_members(plan, first, devices)) == 2
    assert decide(plan, first, devices, 1.0).state is state


ACCURACY = "accuracy: the running bundle is more accurate on this device's samples"


def kept(device, **others):
    return seen(device, Phase.KEPT, reason=ACCURACY, **others)


def test_one_that_keeps_its_own_is_no_failure_and_not_waited_for():
    first = replace(in_stage(0), share=math.nextafter(compute_place("r", DEVICES[2]), 1))
    devices = fleet(3) | {DEVICES[0]: kept(DEVICES[0])}
    assert len(list_members(PLAN, first, devices)) == 3
    good = decide(PLAN, first, devices, 1.0)
    assert (good.state, good.good_since) == (RUNNING, 1.0)

    assert is_over(PLAN, replace(in_stage(2), state=DONE), fleet(20) | {DEVICES[0]: kept(DEVICES[0])}, 1.0)


@pytest.mark.parametrize(("n_kept", "max_worse", "state"), [(1, 0.5, RUNNING), (2, 0.5, ABORTED), (3, 1.0, RUNNING)])
def test_the_share_of_devices_that_must_be_worse_to_stop_is_a_setting(n_kept, max_worse, state):
    figures = {"before": Quality(n=31, accuracy=1.0), "now": Quality(n=31, accuracy=0.935)}
    devices = fleet(3) | {device: kept(device, **figures) for device in DEVICES[:n_kept]}
    first = replace(in_stage(0), share=math.nextafter(compute_place("r", DEVICES[2]), 1))
    stopped = decide(replace(PLAN, max_worse=max_worse), first, devices, 1.0)
    assert stopped.state is state
    if state is ABORTED:
        assert stopped.reasons[0] == f"{min(DEVICES[:2])} kept its own: {ACCURACY} (0.94 < 1.00 on 31 samples)"


def test_a_first_stage_may_want_more_devices_than_its_share():
    devices = fleet(0)
    progress = decide(replace(PLAN, stages=(0.001, 1.0), fewest=3), BEGIN, devices, 1.0)
    assert sorted(list_members(PLAN, progress, devices)) == sorted(DEVICES[:3])
    for n, first in ((1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (20, 3)):
        few = {device: devices[device] for device in DEVICES[:n]}
        plan = replace(PLAN, stages=(0.001, 1.0), fewest=3)
        assert len(list_members(plan, decide(plan, BEGIN, few, 1.0), few)) == first


def test_later_a_small_share_may_fail():
    one = {DEVICES[0]: seen(DEVICES[0], Phase.REFUSED, reason="latency: slow")}
    two = one | {DEVICES[1]: seen(DEVICES[1], Phase.ROLLED_BACK)}
    assert decide(PLAN, in_stage(2), fleet(20) | one, 1.0).state is RUNNING
    assert decide(PLAN, in_stage(2), fleet(20) | two, 1.0).state is ABORTED


def test_a_failure_of_another_rollout_is_none():
    assert decide(PLAN, in_stage(0), fleet(1) | {"x": seen("x", Phase.REFUSED, rollout="q")}, 1.0).state is RUNNING


def quality(**others):
    return Quality(n=100, **others)


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (quality(accuracy=0.9), quality(accuracy=0.895), None),
        (quality(accuracy=0.9), quality(accuracy=0.88), "score"),
        (quality(latency_ms=1.0), quality(latency_ms=2.4), None),
        (quality(latency_ms=10.0), quality(latency_ms=17.0), "latency"),
        (quality(free_energy=0.0), quality(free_energy=0.9), None),
        (quality(free_energy=0.0), quality(free_energy=-1.1), "free energy"),
        (quality(free_energy=0.0), quality(free_energy=1.1), "free energy"),
        (quality(gate_entropy=0.2), quality(gate_entropy=0.45), None),
        (quality(gate_entropy=0.6), quality(gate_entropy=0.25), "gate entropy"),
        (quality(gate_entropy=0.2), quality(gate_entropy=0.95), "gate entropy"),
        (quality(), quality(accuracy=0.1), None),
        (None, quality(accuracy=0.1), None),
    ],
)
def test_what_devices_measure_stops_it(before, now, reason):
    stopped = decide(PLAN, in_stage(1), fleet(N_SECOND, before=before, now=now), 1.0)
    assert stopped.state is (RUNNING if reason is None else ABORTED)
    assert [why.split(":")[0] for why in stopped.reasons] == ([] if reason is None else [reason])


def test_one_device_that_gets_worse_is_weighed_with_those_that_get_better():
    better = {"before": quality(accuracy=0.8), "now": quality(accuracy=0.9)}
    worse = {"before": quality(accuracy=0.8), "now": quality(accuracy=0.79)}
    devices = fleet(N_SECOND, **better) | {DEVICES[0]: seen(DEVICES[0], **worse)}
    assert decide(PLAN, in_stage(1), devices, 1.0).state is RUNNING


@pytest.mark.parametrize(("n", "lost", "stops"), [(50, 1, False), (50, 5, True), (100, 2, False), (2000, 30, True)])
def test_what_a_single_canary_loses_by_chance_stops_nothing(n, lost, stops):
    measured = {
        "before": Quality(n=n, accuracy=0.95),
        "now": Quality(n=n, accuracy=0.95 - lost / n),
    }
    devices = fleet(0) | {DEVICES[0]: seen(DEVICES[0], **measured)}
    assert (decide(PLAN, in_stage(0), devices, 1.0).state is ABORTED) is stops


def test_heat_stops_it():
    assert decide(PLAN, in_stage(0), fleet(N_FIRST, temperature_c=86.0), 1.0).reasons == (
        "temperature: 86 C on average",
    )
    assert decide(PLAN, in_stage(0), fleet(N_FIRST, temperature_c=80.0), 1.0).state is RUNNING


@pytest.mark.parametrize("phase", [Phase.FETCHING, Phase.TRIAL, Phase.FAILED])
def test_a_device_that_is_on_its_way_is_waited_for(phase):
    devices = fleet(N_SECOND, at=90.0) | {DEVICES[0]: seen(DEVICES[0], phase, at=90.0)}
    assert decide(PLAN, in_stage(1), devices, 99.0).good_since is None


def test_an_absent_device_is_waited_for_only_as_long_as_agreed():
    devices = fleet(N_SECOND, at=90.0) | {DEVICES[0]: seen(DEVICES[0], new=False, at=0.0)}
    assert decide(PLAN, in_stage(1), devices, 99.0).good_since is None
    assert decide(PLAN, in_stage(1), devices, 101.0).good_since == 101.0


def test_one_that_disappears_on_trial_is_no_reason_to_wait_for_ever_nor_to_put_others_at_risk():
    gone = seen(DEVICES[0], Phase.TRIAL, at=0.0)
    devices = fleet(N_SECOND, at=90.0) | {DEVICES[0]: gone}
    assert decide(PLAN, in_stage(1), devices, 99.0).good_since is None
    assert decide(PLAN, in_stage(1), devices, 101.0).good_since == 101.0

    alone = fleet(0, at=200.0) | {DEVICES[0]: gone}
    progress = decide(replace(PLAN, stages=(0.0, 1.0)), BEGIN, alone, 201.0)
    assert list_members(PLAN, progress, alone) == [DEVICES[0]]
    assert progress.good_since is None  # nobody else has proved anything


def test_one_that_cannot_fetch_it_is_not_waited_for_for_ever_though_it_speaks():
    devices = fleet(N_SECOND) | {DEVICES[0]: seen(DEVICES[0], Phase.FAILED, at=100.0)}
    assert decide(PLAN, in_stage(1), devices, 101.0).good_since == 101.0


def test_where_everybody_is_absent_nothing_is_proved():
    assert decide(PLAN, in_stage(2), fleet(0), 1e6).good_since is None
    assert decide(PLAN, in_stage(0), {}, 1e6).good_since is None


def test_a_small_fleet_has_one_canary():
    few = {device: seen(device, new=False) for device in DEVICES[5:8]}
    share = compute_share(PLAN, BEGIN, few, 1.0)
    assert list_members(PLAN, replace(BEGIN, share=share), few) == [DEVICES[5]]


def test_a_canary_that_is_off_is_replaced():
    few = {device: seen(device, new=False, at=200.0 * (i > 0)) for i, device in enumerate(DEVICES[5:8])}
    progress = decide(PLAN, BEGIN, few, 201.0)
    assert sorted(list_members(PLAN, progress, few)) == sorted(DEVICES[5:7])


def test_named_canaries_go_alone():
    plan = replace(PLAN, canaries=("d3",), stages=(0.0, 1.0))
    devices = fleet(0)
    progress = decide(plan, BEGIN, devices, 1.0)
    assert list_members(plan, progress, devices) == ["d3"]
    assert make_message(plan, progress, {}).canaries == ("d3",)


def test_when_a_done_rollout_is_over():
    done = replace(in_stage(2), state=DONE)
    assert is_over(PLAN, done, fleet(20), 1.0)
    assert not is_over(PLAN, done, fleet(19), 1e6)
    assert is_over(PLAN, done, fleet(20) | {DEVICES[0]: seen(DEVICES[0], Phase.REFUSED)}, 1.0)
    expired = seen(DEVICES[0], Phase.REFUSED, reason="expired: timestamp.json is expired")
    assert not is_over(PLAN, done, fleet(20) | {DEVICES[0]: expired}, 1e6)  # until it is signed again


def test_when_an_aborted_one_is():
    stopped = replace(in_stage(0), state=ABORTED, began=50.0)
    assert not is_over(PLAN, stopped, fleet(1), 60.0)
    assert is_over(PLAN, stopped, fleet(0), 60.0)
    assert not is_over(PLAN, stopped, fleet(0), 50.5)
    assert not is_over(PLAN, stopped, fleet(0) | {DEVICES[0]: seen(DEVICES[0], Phase.FETCHING)}, 60.0)
    assert is_over(PLAN, stopped, fleet(1), 151.0)
    assert not is_over(PLAN, in_stage(0), fleet(20), 1.0)


PHASES = st.sampled_from([Phase.SERVING, Phase.TRIAL, Phase.FETCHING, Phase.FAILED, Phase.REFUSED, Phase.KEPT])


@given(st.lists(st.dictionaries(st.sampled_from(DEVICES), st.tuples(PHASES, st.booleans()), max_size=20), max_size=20))
def test_whatever_devices_say_stages_come_one_by_one_and_an_end_is_an_end(reports):
    devices, progress = fleet(0), BEGIN
    for number, report in enumerate(reports):
        now = 20.0 * number
        devices = devices | {d: seen(d, phase, new=new, at=now) for d, (phase, new) in report.items()}
        after = decide(PLAN, progress, devices, now)
        assert after.stage - progress.stage in {0, 1}
        assert after.share >= progress.share
        if progress.state is not RUNNING:
            assert after == progress
        if after.stage > progress.stage:
            assert any(devices[d].health.bundle_digest == NEW for d in list_members(PLAN, progress, devices))
        progress = after
