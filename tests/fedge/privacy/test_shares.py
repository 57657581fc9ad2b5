"""Shamir's sharing: any t shares give the secret, fewer nothing of it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.privacy.shares import PRIME, SECRET_BYTES, combine_shares, split_secret

SECRETS = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)


def test_the_modulus_is_prime() -> None:
    """Miller-Rabin with twenty bases: a composite passes with probability 2^-40 at most."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 22):
        powers = [pow(base, odd << k, PRIME) for k in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


@given(SECRETS, st.integers(1, 6), st.integers(0, 4))
def test_any_t_shares_give_the_secret(secret: bytes, t: int, more: int) -> None:
    shares = split_secret(secret, t, range(1, t + more + 1))
    for some in combinations(shares, t):
        assert combine_shares({x: shares[x] for x in some}) == secret
    assert combine_shares(shares) == secret


def test_fewer_shares_are_those_of_any_secret() -> None:
    """For t - 1 shares and any other secret there is a polynomial that has both: here of degree 1, one share."""
    shares = split_secret(bytes(32), 2, [1, 2])
    for other in (bytes(31) + b"\1", b"\xff" * 32):
        slope = (int.from_bytes(shares[1]) - int.from_bytes(other)) % PRIME
        second = (int.from_bytes(other) + 2 * slope) % PRIME
        assert combine_shares({1: shares[1], 2: second.to_bytes(33)}) == other


def test_shares_differ_each_time() -> None:
    assert split_secret(bytes(32), 2, [1, 2]) != split_secret(bytes(32), 2, [1, 2])


def test_shares_of_no_secret_are_refused() -> None:
    with pytest.raises(ValueError, match="no secret"):
        combine_shares({1: (PRIME - 1).to_bytes(33)})


@pytest.mark.parametrize(
    ("secret", "t", "holders"),
    [(b"short", 1, [1]), (bytes(32), 3, [1, 2]), (bytes(32), 2, [0, 1]), (bytes(32), 2, [1, 1])],
)
def test_what_cannot_be_shared(secret: bytes, t: int, holders: list[int]) -> None:
    with pytest.raises(ValueError, match="holders"):
        split_secret(secret, t, holders)
