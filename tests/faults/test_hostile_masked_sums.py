"""A coordinator that departs from the protocol of masked sums: can it read the update of one device of ten?

Over the devices' real steps. The coordinator takes off all masks that shares open, whatever sums it named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedge import fixed_point
from fedge.codec import decode
from fedge.masking import add_pair_mask, prg
from fedge.messages import Codec
from fedge.shamir import combine
from fedge.step import Result
from fedge.steps.train import Trained
from fedge.steps.train_masked import TrainedMasked
from fedge.steps.unmask import Unmasked
from tests.support.cohort import Cohort
from tests.support.orders import LAYOUT, device_data

VICTIM = 0
EVERYBODY = tuple(range(10))


class Hostile:
    """The coordinator of ten devices. `vectors`: masked updates; `results`: what devices showed to open a sum."""

    def __init__(self, home: Path) -> None:
        self.cohort = Cohort(home, 10)
        self.cohort.workers = [self.cohort.started(k, device_data(24 + 4 * k)) for k in EVERYBODY]
        self.cohort.advertise()
        self.cohort.share()
        self.vectors: dict[int, bytes] = {}
        self.results: dict[int, Result] = {}

    def train(self, among: Mapping[int, tuple[int, ...]]) -> None:
        """Tell each device who has shared secrets with it."""
        for k, peers in among.items():
            finished = self.cohort.does(k, self.cohort.training(k, among=peers))
            assert isinstance(finished.result, TrainedMasked), finished.result
            self.vectors[k] = finished.blobs[finished.result.masked.digest]

    def open(self, sums: Mapping[int, tuple[int, ...]]) -> None:
        """Tell each device which sum is opened."""
        self.results = {k: self.cohort.result(k, self.cohort.opening(*summed)) for k, summed in sums.items()}

    def secret(self, kind: str, k: int) -> bytes:
        shown = {j: getattr(r, kind) for j, r in self.results.items() if isinstance(r, Unmasked)}
        shares = {j + 1: of[k] for j, of in shown.items() if k in of}
        assert len(shares) >= self.cohort.roster.threshold, f"the {kind} of {k} stay closed"
        return combine(dict(sorted(shares.items())[: self.cohort.roster.threshold]))

    def read(self, peers: tuple[int, ...]) -> fixed_point.Summand:
        """The victim's update without its masks."""
        total = fixed_point.zero(LAYOUT)
        total.add(fixed_point.from_bytes(self.vectors[VICTIM], LAYOUT))
        total.subtract(prg(self.secret("seeds", VICTIM), LAYOUT))
        for peer in peers:
            key = X25519PrivateKey.from_private_bytes(self.secret("keys", peer))
            add_pair_mask(total, peer, VICTIM, self.cohort.roster.pair_seed(key, VICTIM), LAYOUT)
        return total

    def truth(self) -> fixed_point.Summand:
        """The same, from plain training."""
        action = self.cohort.training(VICTIM)
        plain = self.cohort.does(VICTIM, msgspec.structs.replace(action.train, codec=Codec.FLOAT32))
        assert isinstance(plain.result, Trained)
        ref = plain.result.update
        update = decode(plain.blobs[ref.digest], Codec.FLOAT32, LAYOUT)
        return fixed_point.summand(update, plain.result.n_samples, 10, action.heaviest)


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def test_one_that_masks_only_with_devices_that_are_left_out_is_read(hostile: Hostile) -> None:
    """The victim hears of five that have shared; the four with which it is summed hear that it has not."""
    near, summed = (5, 6, 7, 8, 9), (0, 1, 2, 3, 4)
    hostile.train({VICTIM: near, **dict.fromkeys(summed[1:], EVERYBODY[1:]), **dict.fromkeys(near, EVERYBODY)})
    hostile.open(dict.fromkeys(EVERYBODY, summed))
    np.testing.assert_array_equal(hostile.read(near).params, hostile.truth().params)


def test_what_two_halves_open_of_two_sums_is_what_they_have_in_common(hostile: Hostile) -> None:
    hostile.train(dict.fromkeys(EVERYBODY, EVERYBODY))
    one, other = (0, 1, 2, 3, 4), (0, 5, 6, 7, 8)
    hostile.open(dict.fromkeys(one, one) | dict.fromkeys((5, 6, 7, 8, 9), other))
    np.testing.assert_array_equal(hostile.read(EVERYBODY[1:]).params, hostile.truth().params)
