"""Shamir's secret sharing: any t shares give the secret; fewer reveal nothing.

Source: Shamir, "How to Share a Secret", CACM 22(11), 1979: the secret is f(0) of a random polynomial of degree t - 1, a
share is f(x). Here over the integers modulo the prime 2^256 + 297, for secrets of 32 bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Final

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33


def split_secret(secret: bytes, threshold: int, holders: Collection[int]) -> dict[int, bytes]:
    """Split a secret into a share for each holder, with the system's randomness.

    Args:
        secret: 32 bytes.
        threshold: t >= 1, the number of shares needed.
        holders: x of each, distinct and > 0; at least t.

    Raises:
        ValueError: fewer holders than t, or an invalid secret or x.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) == len(holders) or min(holders) < 1:
        raise ValueError(
            f"{len(secret)} bytes cannot be split among {len(holders)} holders of whom {threshold} can restore them"
        )
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def make_share(x: int) -> bytes:
        y = 0
        for coefficient in reversed(coefficients):
            y = (y * x + coefficient) % PRIME
        return y.to_bytes(SHARE_BYTES)

    return {x: make_share(x) for x in holders}


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Recover the secret from t shares, by holder. Too few or false shares give a wrong one: the caller checks it.

    Raises:
        ValueError: no valid secret.

    Example:
        >>> shares = split_secret(bytes(range(32)), 3, [1, 2, 3, 4, 5])
        >>> combine_shares({x: shares[x] for x in (5, 1, 3)}) == bytes(range(32))
        True
    """
    secret = 0
    for x, share in shares.items():
        above = below = 1
        for other in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        secret += int.from_bytes(share) * above * pow(below, -1, PRIME)
    secret %= PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("these are shares of no secret")
    return secret.to_bytes(SECRET_BYTES)
