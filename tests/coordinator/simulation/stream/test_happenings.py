"""What happens in a stream, to whom and when."""

import pytest

from coordinator.simulation.stream.happenings import (
    DARKEST,
    HAPPENINGS,
    SEASON,
    Happenings,
    draw_happenings,
    parse_happenings,
)
from fedge.errors import ConfigError

GROUPS = [(f"d{i}", i % 2) for i in range(8)]


def test_a_list_of_happenings_is_parsed_and_a_typo_named() -> None:
    assert parse_happenings("turn, classes") == ("classes", "turn")
    assert parse_happenings("none") == ()
    with pytest.raises(
        ConfigError, match="'turns' can happen: take some of classes, seasons, turn, move, wrong-labels"
    ):
        parse_happenings("turns")


def test_nothing_happens_unless_it_is_wanted() -> None:
    found = draw_happenings((), 10, GROUPS, 10, seed=0)
    assert (found.turned, found.moved, found.wrong, found.seasons, set(found.births)) == (None, None, (), False, {1})
    assert found.count_turns("d0", 10) == 0
    assert not found.has_wrong_labels("d0", 10)
    assert found.compute_gain(3) == 1


def test_everything_happens_to_different_devices_of_different_groups() -> None:
    for seed in range(5):
        found = draw_happenings(HAPPENINGS, 10, GROUPS, 10, seed=seed)
        assert found == draw_happenings(HAPPENINGS, 10, GROUPS, 10, seed=seed)
        assert found.births == (1,) * 8 + (3, 4)
        assert found.moved is not None
        assert found.turned not in found.moved
        one, other = (dict(GROUPS)[device] for device in found.moved)
        assert one != other
        assert (found.turns_in, found.wrong_from, found.moves_in, len(found.wrong)) == (6, 7, 8, 2)
    assert len({draw_happenings(HAPPENINGS, 10, GROUPS, 10, seed=seed).turned for seed in range(9)}) > 1


def test_the_world_changes_from_a_campaign_on() -> None:
    happens = Happenings(
        campaigns=9, births=(1,), turned="a", turns_in=4, moved=("b", "c"), moves_in=5, wrong=("d",), wrong_from=6
    )
    assert [happens.count_turns("a", c) for c in (3, 4, 9)] == [0, 1, 1]
    assert [happens.find_source("b", c) for c in (4, 5)] == ["b", "c"]
    assert happens.find_source("c", 5) == "b"
    assert happens.find_source("a", 5) == "a"
    assert [happens.has_wrong_labels("d", c) for c in (5, 6)] == [False, True]


def test_seasons_come_back() -> None:
    happens = draw_happenings(("seasons",), 10, GROUPS, 3, seed=0)
    gains = [happens.compute_gain(c) for c in range(1, 2 * SEASON + 1)]
    assert gains[0] == pytest.approx(1)
    assert gains[:SEASON] == pytest.approx(gains[SEASON:])
    assert DARKEST <= min(gains) < 0.7


def test_two_devices_are_too_few_to_move_or_turn() -> None:
    with pytest.raises(ConfigError, match="at least three devices"):
        draw_happenings(("turn",), 10, GROUPS[:2], 10, seed=0)
    assert draw_happenings(("seasons",), 10, GROUPS[:1], 10, seed=0).seasons
