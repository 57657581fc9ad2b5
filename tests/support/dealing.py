"""The sequence in which pytest's workers begin the tests: what takes longest first, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence

SLOWEST = (
    "test_four_days_with_programs_that_are_killed_lose_no_sample_and_count_none_twice",
    "test_the_commands_of_a_section_run_as_they_are_written",
    "test_methods_end_in_the_same_bytes_and_large_networks_side_by_side_learn_what_each_learns_alone",
    "test_readmes_python_runs_as_it_is_written",
    "test_its_readme_runs_as_it_is_written",
    "test_a_search_that_is_stopped_goes_on_where_it_was",
    "test_others_go_on_without_it",
    "test_all_of_the_day_is_seen",
    "test_a_federation_with_noise_ends_though_an_agent_is_killed_and_one_has_a_small_budget",
    "test_two_minutes_of_bad_weather_lose_nothing",
    "test_over_a_real_broker_from_birth_to_a_rollout_everything_sent_is_the_same",
)
"""Tests that took more than a minute on two cores with four workers, the longest first."""


def deal(names: Sequence[str], workers: int) -> list[int]:
    """The places of the tests in the new sequence, of which each worker gets an equal part, in one piece, at first.

    Each part begins with its share of the slowest tests; all others stay in their sequence. `names`: the tests' names,
    without parameters.
    """
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    slow = sorted((k for k, name in enumerate(names) if name in ranks), key=lambda k: (ranks[names[k]], k))
    others = [k for k, name in enumerate(names) if name not in ranks]
    dealt: list[int] = []
    for worker in range(workers):
        hand = slow[worker::workers]
        rest = (len(names) - len(dealt)) // (workers - worker) - len(hand)
        dealt += [*hand, *others[: max(rest, 0)]]
        del others[: max(rest, 0)]
    return dealt
