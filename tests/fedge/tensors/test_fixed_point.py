"""Fixed point: sums are exact in the ring, never overflow, and round as little as is stated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.errors import ProtocolError
from fedge.tensors.fixed_point import (
    OTHERS,
    PARAMS,
    compute_heaviest,
    compute_mean_change,
    count_bytes,
    from_bytes,
    make_summand,
    make_zero,
)
from fedge.tensors.layout import Layout, Model, TensorInfo

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(3,)),
        TensorInfo(name="v", shape=(2,), kind="buffer"),
        TensorInfo(name="c", shape=(), kind="counter"),
    )
)


def change(*params: float, buffers: tuple[float, float] = (0, 0), counter: int = 0) -> Model:
    return Model(np.float32(params), np.float32(buffers), np.int64([counter]))


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 10_000),
)
def test_the_mean_is_the_plain_one_up_to_the_stated_rounding(devices, counter) -> None:
    cohort, heaviest = len(devices), 500
    total, weights = make_zero(LAYOUT), np.array([n for n, _ in devices])
    for n, values in devices:
        total.add(make_summand(change(*values, buffers=(100.5, -3e5), counter=counter), n, cohort, heaviest))
    mean = compute_mean_change(total, LAYOUT, cohort, heaviest)
    exact = weights @ np.array([values for _, values in devices]) / weights.sum()
    unit = 2.0 ** -PARAMS.compute_fraction_bits(cohort, heaviest)
    np.testing.assert_allclose(mean.params, exact, rtol=1e-6, atol=cohort / 2 * unit / weights.sum())
    np.testing.assert_allclose(mean.buffers, [100.5, -3e5], rtol=1e-6)
    assert mean.counters.tolist() == [counter]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("cohort", "heaviest"), [(2, 1), (7, 100), (1000, 10_000), (10_000, compute_heaviest(10_000))])
def test_the_largest_sum_does_not_overflow(cohort: int, heaviest: int, sign: int) -> None:
    """All devices at the limits: the sum of the cohort is still what it is, without wrapping around."""
    far = Model(np.float32([sign * 8] * 3), np.float32([sign * 2.0**20] * 2), np.int64([sign * 2**20]))
    one = make_summand(far, heaviest, cohort, heaviest)
    assert cohort * abs(int(one.params.view(np.int32)[0])) < 2**31
    assert cohort * abs(int(one.others.view(np.int64)[0])) < 2**63
    total = make_zero(LAYOUT)
    total.params[:] = one.params * np.uint32(cohort)
    total.others[:] = one.others * np.uint64(cohort)
    mean = compute_mean_change(total, LAYOUT, cohort, heaviest)
    np.testing.assert_allclose(mean.params, sign * 8, rtol=1e-6)
    np.testing.assert_allclose(mean.buffers, sign * 2.0**20, rtol=1e-6)


@pytest.mark.parametrize(("cohort", "heaviest"), [(20, 300), (31, 1), (2, 1), (63, 4), (1000, 10_000)])
def test_the_scale_is_that_of_the_formula(cohort: int, heaviest: int) -> None:
    """Devices and server derive it independently, so it stays as it is, also where one bit more would fit (31, 1)."""
    for ring in (PARAMS, OTHERS):
        bits = ring.compute_fraction_bits(cohort, heaviest)
        for more, fits in ((0, True), (1, False)):
            assert (cohort * (heaviest * ring.limit + 0.5) * 2.0 ** (bits + more) < 2 ** (ring.bits - 1)) == fits


def test_heavier_devices_than_fit_are_counted_as_the_heaviest() -> None:
    for cohort in (2, 100, 10_000):
        assert PARAMS.compute_fraction_bits(cohort, compute_heaviest(cohort)) >= 0
        assert PARAMS.compute_fraction_bits(cohort, 2 * compute_heaviest(cohort)) < 0


def test_what_is_above_the_limit_is_clipped() -> None:
    own = make_summand(change(100, -100, 1, buffers=(1e9, 0)), 2, 5, 10)
    mean = compute_mean_change(own, LAYOUT, 5, 10)
    np.testing.assert_allclose(mean.params, [8, -8, 1], rtol=1e-6)
    assert mean.buffers[0] == 2.0**20


def test_adding_and_taking_away_is_nothing() -> None:
    rng = np.random.default_rng(0)
    one, other = (from_bytes(rng.bytes(count_bytes(LAYOUT)), LAYOUT) for _ in range(2))
    total = make_zero(LAYOUT)
    total.add(one)
    total.add(other)
    total.subtract(one)
    assert total.to_bytes() == other.to_bytes()


@pytest.mark.parametrize("extra", [-1, 1])
def test_bytes_of_another_length_are_refused(extra: int) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        from_bytes(bytes(count_bytes(LAYOUT) + extra), LAYOUT)


@pytest.mark.parametrize("weight", [0, 11])
def test_a_weight_out_of_range_is_refused(weight: int) -> None:
    with pytest.raises(ValueError, match="it must be 1 to 10"):
        make_summand(change(0, 0, 0), weight, 5, 10)


@pytest.mark.parametrize("weights", [0, 51, 2**64 - 1])
def test_weights_that_a_cohort_cannot_have_are_refused(weights: int) -> None:
    total = make_zero(LAYOUT)
    total.others[-1] = weights
    with pytest.raises(ValueError, match="at most 50"):
        compute_mean_change(total, LAYOUT, 5, 10)


def test_a_cohort_too_heavy_for_any_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_summand(change(0, 0, 0), 1, 10, 2 * compute_heaviest(10))
