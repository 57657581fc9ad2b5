"""CICS: worked numbers and rules of fedepc.md sections 5 and 10."""

import math
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.batch_search import greedy_batch
from coordinator.selection import ccmab, reward_model
from coordinator.selection.ccmab import Arm, Participation, Settings, State


def arms(n, *, ghz=None, samples=50):
    return [
        Arm(
            id=f"d{i:02}",
            n_samples=samples,
            work=samples,
            cpu_ghz=1.0 + i if ghz is None else ghz,
            free_ram_gb=float(i),
        )
        for i in range(n)
    ]


def outcome(drop, *, seconds=1.0):
    return Participation(loss_drop=1.0 - (1.0 - drop), gradient_norm=1.0, seconds=seconds)


def play(state, devices, settings_, drop_of):
    """One round; `drop_of(id)`: loss drop, or None for a failure."""
    selection, state = ccmab.select(state, devices, settings_)
    drops = {i: drop_of(i) for i in selection.ids}
    told = {i: None if d is None else outcome(d) for i, d in drops.items()}
    return selection, ccmab.observe(state, selection, told)


# ------------------------------------------------------------------------------------------------ contexts


def test_context_is_normalised_and_a_constant_feature_is_one_half():
    raw = np.array([[1.0, 5, 10, 0, 0], [3.0, 5, 30, 0, 0], [2.0, 5, 20, 0, 0]])
    x = ccmab.normalise(raw, raw.min(axis=0), raw.max(axis=0))
    np.testing.assert_array_equal(x[:, :2], [[0, 0.5], [1, 0.5], [0.5, 0.5]])
    np.testing.assert_array_equal(x[:, 2], [0, 1, 0.5])


def test_missing_values_become_the_mean_of_those_that_have_one_or_zero():
    devices = [
        Arm(id="a", n_samples=10, work=10, cpu_ghz=2.0, free_ram_gb=math.nan),
        Arm(id="b", n_samples=10, work=10, cpu_ghz=None, free_ram_gb=None),
        Arm(id="c", n_samples=10, work=10, cpu_ghz=4.0, free_ram_gb=None),
    ]
    past = {
        "a": (
            Participation(gradient_norm=1, loss_drop=0.2, seconds=1),
            Participation(gradient_norm=3, loss_drop=0.4, seconds=1),
        )
    }
    full = ccmab.fill_missing(ccmab.collect_contexts(devices, past))
    np.testing.assert_allclose(full, [[2, 0, 10, 2, 0.3], [3, 0, 10, 2, 0.3], [4, 0, 10, 2, 0.3]])


def test_a_single_device_has_the_middle_context_and_is_chosen():
    selection, state = ccmab.select(State(), arms(1), Settings())
    assert selection.ids == ("d00",)
    x = ccmab.normalise(np.array([selection.contexts["d00"]]), state.lowest, state.highest)
    np.testing.assert_array_equal(x, np.full((1, 5), 0.5))


def test_ranges_only_widen():
    _, state = ccmab.select(State(), arms(3), Settings())
    assert (state.lowest[0], state.highest[0]) == (1.0, 3.0)
    _, state = ccmab.select(state, arms(1, ghz=2.0), Settings())
    assert (state.lowest[0], state.highest[0]) == (1.0, 3.0)
    _, state = ccmab.select(state, arms(1, ghz=9.0), Settings())
    assert (state.lowest[0], state.highest[0]) == (1.0, 9.0)


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6) | st.just(math.nan)] * 5), min_size=1, max_size=8))
def test_contexts_are_in_the_unit_cube_whatever_devices_tell(rows):
    raw = np.array(rows)
    lowest = np.fmin.reduce([*raw, [math.inf] * 5])
    highest = np.fmax.reduce([*raw, [-math.inf] * 5])
    x = ccmab.normalise(ccmab.fill_missing(raw), lowest, highest)
    assert np.isfinite(x).all()
    assert (x >= 0).all()
    assert (x <= 1).all()


# --------------------------------------------------------------------------------------- time, deadline, quota


SLOW_LINK = Arm(id="a", n_samples=100, work=100, cpu_ghz=1.0, link_mbit_s=2.0, model_bytes=375_000)  # 2 B / r: 3 s


def measured(*seconds):
    return [Participation(gradient_norm=1, loss_drop=0, seconds=s) for s in seconds]


def test_the_model_takes_its_time_on_the_way_until_the_whole_is_measured():
    assert ccmab.predict_seconds(SLOW_LINK, 1.0, (), 0.1) == pytest.approx(100 * 0.1 + 3.0)
    assert ccmab.predict_seconds(SLOW_LINK, 0.0, (), 0.1) == pytest.approx(3.0)
    assert ccmab.predict_seconds(SLOW_LINK, 1.0, measured(4.0, 6.0), 0.1) == 5.0
    unknown = msgspec.structs.replace(SLOW_LINK, link_mbit_s=None)
    assert ccmab.predict_seconds(unknown, 1.0, (), 0.1) == 10.0


def test_the_way_of_the_model_is_no_part_of_the_measured_cycles():
    def cycles(*seconds):
        return ccmab.estimate_cycles([SLOW_LINK], np.array([2.0]), {"a": measured(*seconds)})

    assert cycles(4.0, 6.0) == pytest.approx((5.0 - 3.0) * 2.0 / 100)
    assert cycles(1.0) == 0.0  # a small update: less than 2 B / r in all
    assert cycles() == 0.1


def test_of_equal_devices_those_with_fast_links_are_feasible():
    devices = [
        Arm(id=f"d{i}", n_samples=10, work=10, cpu_ghz=1.0, link_mbit_s=rate, model_bytes=10**6)
        for i, rate in enumerate((1.0, 20.0, 1.0, 20.0, 1.0, 20.0, 20.0))
    ]
    selection, _ = ccmab.select(State(), devices, Settings(quota=1.0, deadline_s=5.0))
    assert selection.ids == ("d1", "d3", "d5", "d6")


@pytest.mark.parametrize(("n", "m"), [(0, 0), (1, 1), (5, 1), (6, 2), (10, 2), (11, 3), (100, 20)])
def test_quota(n, m):
    assert ccmab.compute_quota(0.2, n) == m


def test_deadline_is_the_quantile_and_is_kept_by_each_device():
    devices = [Arm(id=f"d{i}", n_samples=10, work=10.0 * (i + 1), cpu_ghz=1.0) for i in range(5)]
    selection, _ = ccmab.select(State(), devices, Settings(quota=1.0, fairness=False))
    assert selection.deadline_s == pytest.approx(1 + 0.7 * 4)  # seconds 1..5, linear interpolation
    assert selection.ids == ("d0", "d1", "d2")


@pytest.mark.parametrize("absurd", [{"link_mbit_s": 5e-324}, {"link_mbit_s": 1e308}, {"cpu_ghz": 5e-324}])
@pytest.mark.parametrize("n_absurd", [1, 3, 4])
def test_absurd_rates_of_some_take_nobody_else_out_of_the_rounds(absurd, n_absurd):
    """Of eleven; the quantile of times of which some are infinite would be no number, and nobody feasible."""
    usual = Arm(id="d", n_samples=100, work=500.0, cpu_ghz=1.5, link_mbit_s=10.0, model_bytes=10**6)
    arms = [msgspec.structs.replace(usual, id=f"d{k:02}", **(absurd if k < n_absurd else {})) for k in range(11)]
    selection, _ = ccmab.select(State(), arms, Settings(quota=1.0))
    assert math.isfinite(selection.deadline_s)
    assert set(selection.ids) >= {arm.id for arm in arms[n_absurd:]}


def test_devices_that_cannot_compute_or_have_no_samples_are_not_selectable():
    devices = [
        Arm(id="a", n_samples=10, work=10, cpu_ghz=0.0),
        Arm(id="b", n_samples=0, work=0, cpu_ghz=2.0),
        Arm(id="c", n_samples=10, work=10, cpu_ghz=None),
    ]
    selection, _ = ccmab.select(State(), devices, Settings(quota=1.0))
    assert selection.ids == ("c",)
    assert set(selection.seconds) == {"c"}


def test_nobody_selectable_or_nobody_at_all_skips():
    for devices in ([], [Arm(id="a", n_samples=0, work=0)]):
        selection, state = ccmab.select(State(), devices, Settings())
        assert selection.ids == ()
        assert (state.round, state.selections, state.skipped) == (1, 0, 1)
        assert ccmab.observe(state, selection, {}) == state


def test_an_infeasible_deadline_skips_three_rounds_then_takes_the_fastest_alone():
    rules = Settings(deadline_s=1.0, fairness=False, quota=1.0)
    state, taken = State(), []
    for _ in range(9):
        selection, state = ccmab.select(state, arms(4), rules)  # 5 s, 2.5 s, 1.67 s, 1.25 s
        taken.append(selection.ids)
    assert taken == [(), (), (), ("d03",), (), (), (), ("d03",), ()]
    assert (state.round, state.selections, state.skipped) == (9, 2, 1)


# ---------------------------------------------------------------------------------------------------- the choice


def test_overdue_oldest_first_at_most_a_quarter():
    waits = [13, 4, 30, 21, 13, 11]
    assert ccmab.find_overdue(waits, 8, 40) == [2, 3]  # F = 10, ceil(8/4) = 2
    assert ccmab.find_overdue([10, 11], 8, 40) == [1]  # F itself is not overdue
    assert ccmab.find_overdue([13, 13, 13], 4, 20) == [0]


@pytest.mark.parametrize("search", [reward_model.select_greedily, greedy_batch])
@pytest.mark.parametrize("seed", range(2))
def test_nobody_starves(search, seed):
    rng = np.random.default_rng(seed)
    rules = Settings(quota=0.25, search=search)
    devices = arms(16)
    n, m = 16, 4
    bound = math.ceil(2 * n / m) + math.ceil(n / math.ceil(m / 4)) + 1
    last = dict.fromkeys((a.id for a in devices), 0)
    state = State()
    for t in range(1, 201):
        selection, state = play(state, devices, rules, lambda _: rng.choice([rng.uniform(-1, 1), None]))
        assert len(selection.ids) <= m
        assert all(
            selection.seconds[i] <= selection.deadline_s * (1 + 1e-9)
            for i in selection.ids
            if i not in selection.overdue
        )
        last |= dict.fromkeys(selection.ids, t)
        assert t - min(last.values()) <= bound


def test_without_fairness_slow_devices_never_train():
    rules = Settings(quota=0.25, fairness=False)
    state, seen = State(), set()
    for _ in range(60):
        selection, state = play(state, arms(8), rules, lambda _: 0.1)
        seen |= set(selection.ids)
    assert seen <= {f"d{i:02}" for i in range(8) if i >= 2}
    assert selection.overdue == ()


@pytest.mark.parametrize("search", [reward_model.select_greedily, greedy_batch])
@pytest.mark.parametrize("seed", range(10))
def test_the_good_device_is_found(search, seed):
    """Section 10, "Learning": in all of rounds 41-80, in 10 of 10 seeds."""
    rng = np.random.default_rng(seed)
    devices = [
        Arm(
            id=f"d{i}",
            n_samples=int(rng.integers(10, 200)),
            work=1.0,
            cpu_ghz=float(rng.uniform(0.5, 4)),
            free_ram_gb=float(rng.uniform(0.1, 8)),
        )
        for i in range(10)
    ]
    means = {a.id: rng.uniform(0, 0.2) for a in devices} | {"d3": 0.6}
    rules = Settings(quota=0.2, deadline_s=1e9, fairness=False, search=search)
    state, taken = State(), []
    for _ in range(80):
        selection, state = play(state, devices, rules, lambda i: means[i] + 0.05 * rng.standard_normal())
        taken.append("d3" in selection.ids)
    assert all(taken[40:])


@pytest.mark.parametrize("search", [reward_model.select_greedily, greedy_batch])
@pytest.mark.parametrize("seed", range(3))
def test_regret_is_lower_than_that_of_a_uniform_choice(search, seed):
    """Rewards grow with the samples that a device has, which its context says: the best three of twenty are known."""
    rng = np.random.default_rng(seed)
    devices = [
        Arm(id=f"d{i:02}", n_samples=int(n), work=1.0, cpu_ghz=float(rng.uniform(0.5, 4)), free_ram_gb=1.0)
        for i, n in enumerate(rng.permutation(np.arange(10, 210, 10)))
    ]
    worth = {a.id: 0.5 * (a.n_samples / 200) ** 2 for a in devices}
    best = set(sorted(worth, key=worth.__getitem__)[-3:])
    rules = Settings(quota=0.15, deadline_s=1e9, fairness=False, search=search)
    state, regret, hits = State(), [], []
    for _ in range(60):
        selection, state = play(state, devices, rules, lambda i: worth[i] + 0.05 * rng.standard_normal())
        regret.append(sum(worth[i] for i in best) - sum(worth[i] for i in selection.ids))
        hits.append(len(best & set(selection.ids)))
    uniform = sum(worth[i] for i in best) - 3 * np.mean(list(worth.values()))
    assert np.mean(regret) < uniform / 2
    assert np.mean(regret[30:]) < uniform / 3
    assert np.mean(hits[30:]) > 4 * 3 * 3 / 20  # four times what chance gives


@pytest.mark.parametrize("search", [reward_model.select_greedily, greedy_batch])
def test_a_cohort_keeps_within_the_budget_but_for_the_overdue(search):
    rules = Settings(quota=0.5, deadline_s=1e9, budget_s=6.0, search=search)
    devices = arms(8, samples=40)  # 4 s for the slowest, half a second for the fastest
    state, seen = State(), set()
    for _ in range(30):
        selection, state = play(state, devices, rules, lambda _: 0.1)
        chosen = [selection.seconds[i] for i in selection.ids if i not in selection.overdue]
        assert sum(chosen) + sum(selection.seconds[i] for i in selection.overdue) <= 6.0 or not chosen
        seen |= set(selection.ids)
    assert seen == {a.id for a in devices}


def test_a_budget_that_fits_nobody_skips_three_rounds_then_the_fastest_goes_alone():
    rules = Settings(quota=0.5, deadline_s=1e9, budget_s=0.1, fairness=False)
    state, taken = State(), []
    for _ in range(4):
        selection, state = ccmab.select(state, arms(4), rules)
        taken.append(selection.ids)
    assert taken == [(), (), (), ("d03",)]


# ------------------------------------------------------------------------------------------------ what is observed


def test_rewards_are_clipped_and_failures_cost():
    assert ccmab.compute_reward(outcome(0.25)) == 0.25
    assert ccmab.compute_reward(outcome(7.0)) == 1.0
    assert ccmab.compute_reward(outcome(-7.0)) == -1.0
    assert ccmab.compute_reward(None) == -1.0
    assert ccmab.compute_reward(outcome(math.nan)) == -1.0
    assert ccmab.compute_reward(outcome(0.5, seconds=math.inf)) == -1.0


def test_observe_records_raw_contexts_rewards_and_a_window():
    rules = Settings(quota=1.0, deadline_s=math.inf)
    state = State()
    for k in range(60):
        selection, state = ccmab.select(state, arms(2), rules)
        told = {"d00": outcome(k / 100, seconds=float(k)), "d01": None}
        state = ccmab.observe(state, selection, told)
    assert len(state.rewards) == len(state.contexts) == ccmab.HISTORY  # of 120
    assert state.rewards[:4] == pytest.approx((0.10, -1.0, 0.11, -1.0))
    assert state.rewards[-2:] == pytest.approx((0.59, -1.0))
    assert [p.loss_drop for p in state.participations["d00"]] == pytest.approx([0.55, 0.56, 0.57, 0.58, 0.59])
    assert "d01" not in state.participations
    assert state.contexts[1][0] == 2.0  # raw GHz of d01


def test_a_fast_device_that_stops_answering_is_only_asked_as_overdue_until_it_answers():
    rules = Settings(quota=0.5)
    state = State()
    for _ in range(4):  # d05 computes fastest and is always feasible
        selection, state = play(state, arms(6), rules, lambda _: 0.1)
    while not state.at_least:
        selection, state = play(state, arms(6), rules, lambda i: None if i == "d05" else 0.1)
    assert state.at_least == {"d05": 2 * selection.deadline_s}
    for _ in range(20):
        selection, state = play(state, arms(6), rules, lambda i: None if i == "d05" else 0.1)
        assert ("d05" in selection.ids) == ("d05" in selection.overdue)
    while state.at_least:
        selection, state = play(state, arms(6), rules, lambda _: 0.1)
    assert "d05" in selection.ids


def test_a_device_that_declined_teaches_nothing():
    selection, state = ccmab.select(State(), arms(3), Settings(quota=1.0, deadline_s=1e9))
    assert ccmab.observe(state, selection, {}) == state


def test_selection_is_deterministic_and_order_of_devices_is_irrelevant():
    rng = np.random.default_rng(5)
    states = [State(), State()]
    for _ in range(12):
        devices = arms(9)
        (first, a), (second, b) = (
            ccmab.select(s, d, Settings(quota=0.4)) for s, d in zip(states, (devices, devices[::-1]), strict=True)
        )
        assert first == second
        told = {i: outcome(rng.uniform()) for i in first.ids}
        states = [ccmab.observe(s, first, told) for s in (a, b)]
        assert states[0] == states[1]


def test_identical_devices_are_taken_in_order():
    devices = [Arm(id=f"d{i}", n_samples=5, work=5, cpu_ghz=1.0) for i in range(10)]
    selection, _ = ccmab.select(State(), devices, Settings())
    assert selection.ids == ("d0", "d1")


def test_state_survives_serialisation():
    state = State()
    for _ in range(4):
        _, state = play(state, arms(6), Settings(quota=0.5), lambda _: 0.2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State) == state
    empty = State()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(empty), type=State) == empty


def test_clusters_are_independent():
    """Observing one cluster's bandit leaves another's selection as it is: states share nothing."""
    a, b = State(), State()
    selection, a = ccmab.select(a, arms(5), Settings())
    before, _ = ccmab.select(b, arms(5), Settings())
    ccmab.observe(a, selection, {i: outcome(1.0) for i in selection.ids})
    assert ccmab.select(b, arms(5), Settings())[0] == before


# ------------------------------------------------------------------------------------------- other rules, other sizes


def test_another_rule_chooses_among_the_feasible_and_overdue_devices_are_asked_first():
    told = []

    def last(ids, n, seconds):
        told.append((list(ids), n, dict(seconds)))
        return sorted(ids)[-n:] if n else []

    fixed = Settings(deadline_s=1.0, quota=0.5)
    devices = arms(8)  # the clock rises with the id: 50 samples take 5 / GHz seconds, so d04 and above are in time
    selection, state = ccmab.select(State(), devices, fixed, rule=last)
    assert selection.ids == ("d04", "d05", "d06", "d07")
    assert told[0][0] == ["d04", "d05", "d06", "d07"]
    assert told[0][1] == 4
    assert all(seconds <= 1.0 for seconds in told[0][2].values())
    waiting = msgspec.structs.replace(state, round=9)
    selection, _ = ccmab.select(waiting, devices, fixed, rule=last)
    assert selection.overdue == ("d00",)
    assert selection.ids == ("d00", "d05", "d06", "d07")
    assert told[1][1] == 3


def test_a_size_of_its_own_replaces_the_quota():
    for size in (1, 3, 8):
        selection, _ = ccmab.select(State(), arms(8), Settings(deadline_s=math.inf), size=size)
        assert len(selection.ids) == size


def test_measured_devices_say_how_long_the_others_will_take():
    devices = arms(4, ghz=2.0)  # 50 samples of work each
    past = {"d00": (Participation(gradient_norm=1, loss_drop=0, seconds=3.0),)}
    clocks = np.full(4, 2.0)
    assert ccmab.estimate_cycles(devices, clocks, past) == pytest.approx(3.0 * 2.0 / 50)
    assert ccmab.estimate_cycles(devices, clocks, {}) == 0.1
    assert ccmab.estimate_cycles(devices, np.zeros(4), past) == 0.1
    selection, _ = ccmab.select(State(participations=past), devices, Settings())
    assert selection.seconds == pytest.approx(dict.fromkeys(selection.seconds, 3.0))


def test_a_device_that_was_never_measured_is_feasible_even_where_the_guess_of_its_time_is_far_off():
    devices = arms(8, ghz=2.0)
    milliseconds = {f"d{i:02}": (Participation(gradient_norm=1, loss_drop=0.1, seconds=0.002),) for i in range(7)}
    seen = []
    selection, _ = ccmab.select(
        State(participations=milliseconds), devices, Settings(), rule=lambda ids, n, _: seen.extend(ids) or ids[:n]
    )
    assert "d07" in seen
    assert selection.seconds["d07"] == pytest.approx(0.002)


def test_estimates_are_the_two_terms_of_each_devices_score():
    selection, state = ccmab.select(State(), arms(3), Settings())
    bonus = math.sqrt(2 * math.log(1 / 0.1) * 0.25)
    assert selection.estimates == {a.id: (0.0, pytest.approx(bonus)) for a in arms(3)}
    rules = Settings(quota=0.1, deadline_s=1e9, fairness=False)
    for _ in range(5):
        selection, state = play(state, arms(6), rules, lambda _: 0.1)
        (chosen,) = selection.ids
        assert sum(selection.estimates[chosen]) == pytest.approx(max(map(sum, selection.estimates.values())))
    ruled, _ = ccmab.select(state, arms(6), rules, rule=lambda ids, n, _: ids[:n])
    assert ruled.estimates == {}


@pytest.mark.parametrize("search", [reward_model.select_greedily, greedy_batch])
def test_a_round_of_thousands_of_devices_holds_no_matrix_of_all_pairs(search):
    devices, rules = arms(3000), Settings(quota=0.01, search=search)
    _, state = play(State(), devices, rules, lambda _: 0.1)
    tracemalloc.start()
    ccmab.select(state, devices, rules)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # 3,000 x 3,000 numbers are 72 MB
