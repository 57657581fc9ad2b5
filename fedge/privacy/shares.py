"""Shamir's secret sharing: any t shares give the secret; fewer reveal nothing.

Source: Shamir, "How to Share a Secret", CACM 22(11), 1979. The secret is f(0) of a random polynomial f of degree t - 1,
and a share is f(x). The polynomial is over the integers modulo the prime 2^256 + 297, for secrets of 32 bytes.
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
        holders: the number x of each holder, distinct and > 0; at least t of them.

    Raises:
        ValueError: there are fewer holders than t, or the secret or an x is invalid.
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
    """Recover the secret from t shares, by holder. Too few or false shares give a wrong secret; the caller checks it.

    Raises:
        ValueError: the shares give no valid secret.

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
