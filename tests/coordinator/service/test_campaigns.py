"""When a campaign begins, and why."""

from __future__ import annotations

import pytest

from coordinator.service.campaigns import (
    PAST,
    Campaign,
    Campaigns,
    Conditions,
    Decision,
    begin_next,
    decide,
    describe_campaigns,
    end_campaign,
    parse_conditions,
    record_participants,
    record_rest,
    require_counted,
)
from coordinator.store.records import DeviceFacts
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.errors import ConfigError

DAY = 86400.0


def device(i: str, n_arrived: int = 0, **changes: object) -> DeviceFacts:
    given = {"data_version": n_arrived, "n_arrived": n_arrived} | changes
    return DeviceFacts(id=i, **given)  # type: ignore[arg-type]


def rested(*facts: DeviceFacts, number: int = 1) -> Campaigns:
    """After a campaign from 0 to 100 s in which these devices took part."""
    begun = Campaigns(now=Campaign(number=number, began_at=0.0))
    summary = {"history": [], "rounds": 3, "first": 0, "clusters": {}, "split": False, "experts": 1}
    return end_campaign(record_participants(begun, facts), summary, 100.0)


# ------------------------------------------------------------------------------------------------------ conditions


def test_conditions_are_read_as_they_are_written() -> None:
    found = parse_conditions("1d", ["new-samples=500", "drift=0.1", "score-at-work=-0.05"])
    assert found == Conditions(every_s=DAY, new_samples=500, drift=0.1, fall=0.05)
    assert [parse_conditions(text, ()).every_s for text in ("90", "90s", "15m", "1.5h")] == [90, 90, 900, 5400]
    assert parse_conditions(None, ()) == Conditions()


@pytest.mark.parametrize(
    ("every", "when"),
    [
        *((text, ()) for text in ("", "d", "0", "-1d", "1w", "nan", "inf")),
        *(
            (None, (text,))
            for text in ("drift", "drift=0", "drift=2", "drift=nan", "new-samples=0.5", "score-at-work=0.05", "x=1")
        ),
    ],
)
def test_what_is_no_condition_is_refused(every: str | None, when: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"no time; write|no condition; there are"):
        parse_conditions(every, when)


# ---------------------------------------------------------------------------------------------------- new samples


def test_new_samples_are_those_since_each_device_took_part() -> None:
    """A device that slept through the last campaign brings all that it collected meanwhile."""
    campaigns = rested(device("a", 100), device("b", 50))
    wanted = Conditions(new_samples=30)
    assert decide(wanted, campaigns, [device("a", 120), device("b", 59)], DAY) is None
    now = [device("a", 120), device("b", 60)]
    assert decide(wanted, campaigns, now, DAY) == Decision(True, "30 new samples on 2 devices")
    late = [device("a", 100), device("c", 31)]
    assert decide(wanted, campaigns, late, DAY) == Decision(True, "31 new samples on 1 device")
    next_ = begin_next(campaigns, "x", now, first=4, planned=2, now=DAY)
    assert next_.now.changed == ("a", "b")
    slept = record_participants(next_, [device("a", 120)])
    assert decide(wanted, slept, [device("a", 120), device("b", 80)], 9 * DAY) == Decision(
        True, "30 new samples on 1 device"
    )


def test_samples_of_absent_devices_begin_nothing() -> None:
    campaigns = rested(device("a", 0))
    assert decide(Conditions(new_samples=1), campaigns, [device("a", 9, online=False)], DAY) is None
    assert decide(Conditions(every_s=1.0), campaigns, [], DAY) is None


def test_what_a_device_says_later_in_its_campaign_counts_for_the_next() -> None:
    campaigns = Campaigns(now=Campaign(began_at=0.0))
    first = record_participants(campaigns, [device("a", 5)])
    assert record_participants(first, [device("a", 9)]) is first
    second = begin_next(first, "x", [], first=3, planned=1, now=1.0)
    assert record_participants(second, [device("a", 9)]).seen["a"].n_arrived == 9


def test_devices_do_not_train_without_a_break() -> None:
    """The pause is as long as the campaign was; the schedule does not wait for it."""
    campaigns = rested(device("a", 0))
    assert decide(Conditions(new_samples=1), campaigns, [device("a", 1)], 199.0) is None
    assert decide(Conditions(new_samples=1), campaigns, [device("a", 1)], 200.0) is not None
    assert decide(Conditions(every_s=150.0), campaigns, [device("a", 1)], 151.0) is not None


# ----------------------------------------------------------------------------------------------------------- drift


def test_a_share_of_drifting_devices_begins_a_campaign() -> None:
    facts = [device(f"d{k:02}", drift=k < 2) for k in range(20)]
    campaigns = rested(*(device(f.id) for f in facts))
    assert decide(Conditions(drift=0.2), campaigns, facts, DAY) is None
    assert decide(Conditions(drift=0.1), campaigns, facts, DAY) == Decision(
        True, "2 of 20 devices with drift: d00, d01"
    )


def test_an_alarm_that_the_new_bundle_took_over_begins_none_until_its_own_answers_drift() -> None:
    wanted, campaigns = Conditions(drift=0.5), rested(device("a", 10, drift=True))
    assert decide(wanted, campaigns, [device("a", 11, drift=True, held=True)], DAY) is None
    assert decide(wanted, campaigns, [device("a", 11, drift=True)], DAY) is not None


def test_a_device_that_drifted_before_begins_another_campaign_only_with_other_samples() -> None:
    """Its alarm goes out when inputs come that fit; until then nothing new could be learned."""
    wanted = Conditions(drift=0.5)
    campaigns = rested(device("a", 10, drift=True))
    assert decide(wanted, campaigns, [device("a", 10, drift=True)], DAY) is None
    assert decide(wanted, campaigns, [device("a", 11, drift=True)], DAY) is not None
    cleared = record_rest(campaigns, [device("a", 10)])
    assert decide(wanted, cleared, [device("a", 10, drift=True)], DAY) is not None


# --------------------------------------------------------------------------------------------------------- at work


def test_a_fall_is_of_answers_that_are_right_or_wrong() -> None:
    fall = parse_conditions(None, ["score-at-work=-0.05"])
    regression = Regression(targets=("a",), mean=(0.0,), std=(1.0,))
    require_counted(fall, Reconstruction())
    require_counted(parse_conditions(None, ["drift=0.1"]), regression)
    with pytest.raises(ConfigError, match=r"those of regression are neither; let drift=0\.1"):
        require_counted(fall, regression)


def test_a_fall_of_the_score_at_work_is_measured_from_the_best_since_the_last_campaign() -> None:
    wanted = Conditions(fall=0.05)
    campaigns = rested(device("a"))
    good, worse, bad = (device("a", at_work=share, n_answers=20) for share in (0.9, 0.86, 0.84))
    assert decide(wanted, campaigns, [bad], DAY) is None, "there is nothing to compare it with yet"
    campaigns = record_rest(campaigns, [good])
    assert record_rest(campaigns, [worse]) is campaigns
    assert decide(wanted, campaigns, [worse], DAY) is None
    assert decide(wanted, campaigns, [bad], DAY) == Decision(True, "score at work fell from 0.900 to 0.840")
    assert decide(wanted, campaigns, [device("a", at_work=0.1, n_answers=19)], DAY) is None, "too few answers"
    assert begin_next(campaigns, "", [], first=1, planned=1, now=DAY).best_at_work is None


# -------------------------------------------------------------------------------------------------------- schedule


def test_the_schedule_skips_what_nothing_calls_for() -> None:
    wanted = Conditions(every_s=DAY)
    campaigns = rested(device("a", 3))
    same, more = device("a", 3), device("a", 4)
    assert decide(wanted, campaigns, [more], DAY - 1) is None
    found = decide(wanted, campaigns, [same], DAY)
    assert found is not None
    assert (found.begins, "nothing calls for a campaign" in found.why) == (False, True)
    assert decide(wanted, campaigns, [more], DAY) == Decision(True, "1 d after the last one: 1 new sample on 1 device")
    others = device("a", 3, data_version=4)
    assert decide(wanted, campaigns, [others], DAY) == Decision(
        True, "1 d after the last one: the samples of 1 device have changed"
    )
    new = decide(wanted, campaigns, [same, device("b")], DAY)
    assert new == Decision(True, "1 d after the last one: 1 device took part in none yet")


# ---------------------------------------------------------------------------------------------------- what is shown


def test_the_campaigns_are_described_and_their_number_is_bounded() -> None:
    campaigns = rested(device("a"))
    for number in range(2, PAST + 5):
        campaigns = begin_next(campaigns, f"reason {number}", [], first=4 * number, planned=3, now=number * DAY)
        shown = describe_campaigns(campaigns, Conditions(every_s=DAY), paused=False)
        assert (shown["number"], shown["state"], shown["next_at"]) == (number, "running", None)
        summary = {
            "history": [{"accuracy": 0.5}, {"accuracy": None}], "rounds": 3, "first": 0, "clusters": {"0": [], "1": []},
            "split": True, "lineage": ["expert 2 was split from expert 1"],
        }  # fmt: skip
        campaigns = end_campaign(campaigns, summary, number * DAY + 60)
    shown = describe_campaigns(campaigns, Conditions(every_s=DAY), paused=False)
    assert (shown["state"], shown["next_at"]) == ("resting", (PAST + 5) * DAY)
    assert len(shown["history"]) == PAST + 1
    last = shown["history"][-1]
    assert (last["rounds"], last["accuracy"], last["experts"]) == (3, 0.5, 2)
    assert list(last["lineage"]) == ["expert 2 was split from expert 1"]
    assert describe_campaigns(campaigns, Conditions(), paused=True)["state"] == "paused"
