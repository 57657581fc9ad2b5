"""A sample's place, train, validation or test, as a function of its own digest. So it never moves.

The digest is of the model input, so a sample has the same one whether it came as bytes, as floats, or in a file.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.data.task import TEST, TRAIN, VALIDATION

TEST_SHARE: Final = 0.1
VALIDATION_SHARE: Final = 0.2
"""Shares of the samples that are held out. They are no setting, since a sample would move if they changed."""
DIGEST_BYTES: Final = 16


def compute_digests(x: NDArray[np.float32]) -> list[bytes]:
    """Return the digest of each model input (n, ...)."""
    from hashlib import blake2b  # 3.5 MB of OpenSSL: import only when hashing

    shape = repr(x.shape[1:]).encode()
    return [blake2b(np.ascontiguousarray(one).tobytes() + shape, digest_size=DIGEST_BYTES).digest() for one in x]


def choose_place(digest: bytes) -> int:
    """Return the place of a sample that nothing but its digest decides.

    >>> choose_place(bytes(16)), choose_place(bytes([200] * 16))
    (2, 0)
    """
    part = int.from_bytes(digest[:8], "big") / 2**64
    return TEST if part < TEST_SHARE else VALIDATION if part < TEST_SHARE + VALIDATION_SHARE else TRAIN


def compute_rank(digest: bytes) -> int:
    """Return the sample's rank, by which a class keeps an even choice of its old samples; independent of its place."""
    return int.from_bytes(digest[8:], "big") >> 1
