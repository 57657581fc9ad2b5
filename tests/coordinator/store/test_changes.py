"""Since when a device is as it is, and how long it may be away."""

from __future__ import annotations

import msgspec

from coordinator.store.changes import (
    REMEMBERED,
    SLEEP_S,
    SPARE,
    USUAL_S,
    Change,
    Changes,
    compute_habit_s,
    record_change,
)


def after(*seen: tuple[str, float]) -> Changes:
    changes = Changes()
    for value, at in seen:
        changes = record_change(changes, "presence", value, at)
    return changes


def test_a_value_counts_from_when_it_was_first_seen() -> None:
    changes = after(("online", 1.0), ("online", 5.0))
    assert changes.last == {"presence": Change(value="online", at=1.0)}
    changes = record_change(changes, "drift", "True", 7.0)
    assert {name: change.at for name, change in changes.last.items()} == {"presence": 1.0, "drift": 7.0}
    assert msgspec.json.decode(msgspec.json.encode(changes), type=Changes) == changes


def test_a_habit_is_the_longest_of_the_last_absences_and_a_half_more() -> None:
    assert compute_habit_s(after(("online", 0.0))) == USUAL_S
    nights = [
        seen for day in range(20) for seen in (("sleeping", 100_000.0 * day), ("online", 100_000.0 * day + 40_000))
    ]
    changes = after(*nights)
    assert changes.absences_s == (40_000.0,) * REMEMBERED
    assert compute_habit_s(changes) == SPARE * 40_000


def test_an_announced_sleep_may_last_a_day_and_an_outage_ten_minutes() -> None:
    assert compute_habit_s(after(("online", 0.0), ("sleeping", 9.0))) == SLEEP_S
    assert compute_habit_s(after(("online", 0.0), ("offline", 9.0))) == USUAL_S


def test_a_first_sight_and_a_clock_set_back_are_no_absence() -> None:
    assert after(("online", 5.0)).absences_s == ()
    assert after(("offline", 5.0), ("online", 1.0)).absences_s == (0.0,)
