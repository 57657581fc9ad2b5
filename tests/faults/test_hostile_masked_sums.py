"""A coordinator that departs from the protocol of masked sums: can it read the update of one device of ten?

Over the devices' real steps. Each attack opens the update exactly if devices show what they are asked for, as they did
once; so what stands against it is that they do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace

from edge_agent.privacy.masking import Masked, Session
from fedge.privacy.masked_sums import add_pair_mask, expand_seed
from fedge.privacy.shares import SHARE_BYTES, combine_shares
from fedge.steps.contract import Failed, Result
from fedge.steps.masked.train_masked import compute_common_digest
from fedge.steps.masked.unmask import Unmasked
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.tensors import fixed_point
from fedge.tensors.codecs import decode
from fedge.tensors.fixed_point import Summand
from fedge.tensors.layout import Codec
from tests.support.cohort import SESSION, Cohort
from tests.support.orders import LAYOUT, device_data, order

VICTIM = 0
EVERYBODY = tuple(range(10))
Kind = Literal["seeds", "keys"]


class Hostile(Cohort):
    """The coordinator of ten devices. `shown`: what it has of their secrets, by kind, whose, and who showed it.

    `helpers`: devices that work for it.
    """

    helpers: tuple[int, ...] = ()

    def __init__(self, home: Path) -> None:
        super().__init__(home, 10)
        self.workers = [self.started(k, device_data(24 + 4 * k)) for k in EVERYBODY]
        self.advertise()
        self.share()
        self.shown: dict[tuple[Kind, int], dict[int, bytes]] = defaultdict(dict)

    def session(self, k: int) -> Session:
        return Session(self.workers[k].make_device(order(self.sharing()), self.blobs), SESSION)

    def tell(self, k: int, kinds: Mapping[Kind, Iterable[int]]) -> None:
        """A device shows all that it is asked for."""
        masked = self.session(k).load(Masked)
        assert masked is not None
        for kind, wanted in kinds.items():
            for peer in masked.shares.keys() & set(wanted):
                held = self.roster.unseal(self.session(k).encryption, peer, k, masked.shares[peer])
                assert held is not None
                self.shown[kind, peer][k + 1] = held[:SHARE_BYTES] if kind == "seeds" else held[SHARE_BYTES:]

    def believing(self, k: int, summed: Collection[int]) -> None:
        """As a device of before that hears of this sum."""
        self.tell(k, {"seeds": summed, "keys": set(EVERYBODY) - set(summed)})

    def open(self, k: int) -> Result:
        """With all confirmations that there are."""
        result = self.result(k, self.opening())
        if isinstance(result, Unmasked):
            self.tell(k, {"seeds": result.seeds, "keys": result.keys})
        return result

    def secret(self, kind: Kind, k: int) -> bytes:
        shares = self.shown[kind, k]
        assert len(shares) >= self.roster.threshold, f"the {kind} of {k} stay closed"
        return combine_shares(dict(sorted(shares.items())[: self.roster.threshold]))

    def read(self, peers: Collection[int]) -> list[int]:
        """The victim's update without the masks of its pairs with these, and its own."""
        asked = self.training(VICTIM)
        training = compute_common_digest(asked.train, asked.heaviest)
        total = fixed_point.make_zero(LAYOUT)
        total.add(fixed_point.from_bytes(self.vectors[VICTIM], LAYOUT))
        total.subtract(expand_seed(self.secret("seeds", VICTIM), LAYOUT))
        for peer in peers:
            own = peer in self.helpers
            key = self.session(peer).masking if own else X25519PrivateKey.from_private_bytes(self.secret("keys", peer))
            add_pair_mask(total, peer, VICTIM, self.roster.derive_pair_seed(key, peer, VICTIM, training), LAYOUT)
        return total.params.tolist()

    def opened(self) -> Summand:
        """The sum of all, which all confirm and open."""
        self.confirm(*EVERYBODY)
        assert all(isinstance(self.open(k), Unmasked) for k in EVERYBODY)
        total = fixed_point.make_zero(LAYOUT)
        for k in EVERYBODY:
            total.add(fixed_point.from_bytes(self.vectors[k], LAYOUT))
            total.subtract(expand_seed(self.secret("seeds", k), LAYOUT))
        return total

    def truth(self) -> list[int]:
        """The same, from plain training."""
        action = self.training(VICTIM)
        plain = self.does(VICTIM, replace(action.train, codec=Codec.FLOAT32))
        assert isinstance(plain.result, Trained)
        update = decode(plain.blobs[plain.result.update.digest], Codec.FLOAT32, LAYOUT)
        return fixed_point.make_summand(update, plain.result.n_samples, 10, action.heaviest).params.tolist()


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def test_one_that_masks_only_with_devices_that_are_left_out_is_in_no_sum(hostile: Hostile) -> None:
    """The victim hears of five that have shared; the four with which it is summed hear that it has not."""
    near, summed = (5, 6, 7, 8, 9), (0, 1, 2, 3, 4)
    told = {VICTIM: (VICTIM, *near), **dict.fromkeys(summed[1:], EVERYBODY[1:]), **dict.fromkeys(near, EVERYBODY)}
    for k, among in told.items():
        hostile.train(k, among=among)
    for k in EVERYBODY:
        hostile.believing(k, summed)
    assert hostile.read(near) == hostile.truth()
    for among in set(told.values()):
        for k in EVERYBODY:
            refused = hostile.result(k, hostile.confirming(k, *summed, among=among))
            assert isinstance(refused, Failed)
            assert any(
                reason in refused.reason
                for reason in (
                    "the sum has devices that have shared no secrets",
                    "this device has not masked with these devices",
                    "did not sign to have masked with these devices",
                )
            )
            assert isinstance(hostile.open(k), Failed)


def test_of_two_sums_that_halves_are_told_neither_is_opened(hostile: Hostile) -> None:
    """They have the victim in common."""
    for k in EVERYBODY:
        hostile.train(k)
    halves = {(0, 1, 2, 3, 4): (0, 1, 2, 3, 4), (0, 5, 6, 7, 8): (5, 6, 7, 8, 9)}
    for summed, half in halves.items():
        for k in half:
            hostile.believing(k, summed)
    assert hostile.read(EVERYBODY[1:]) == hostile.truth()
    for summed, half in halves.items():
        hostile.confirm(*summed, who=half)
    for k in EVERYBODY:
        refused = hostile.open(k)
        assert isinstance(refused, Failed)
        assert refused.reason == "5 of 10 devices of the cohort have confirmed the sum, 7 are needed"


@pytest.mark.parametrize("helpers", [(7, 8, 9), (6, 7, 8, 9)], ids=["a third", "more"])
def test_only_more_than_a_third_that_work_for_it_open_two_sums(hostile: Hostile, helpers: tuple[int, ...]) -> None:
    """They are in both sums, confirm whatever it wants, and show all that they have."""
    for k in EVERYBODY:
        hostile.train(k)
    for k in helpers:
        hostile.tell(k, {"seeds": EVERYBODY, "keys": EVERYBODY})
    hostile.helpers, opened = helpers, []
    for honest in ((0, 1, 2), tuple(k for k in (3, 4, 5, 6) if k not in helpers)):
        summed = tuple(sorted({VICTIM, *honest, *helpers}))
        hostile.signed = {k: forced(hostile, k, summed) for k in helpers}
        hostile.confirm(*summed, who=honest)
        opened.append({type(hostile.open(k)) for k in honest} == {Unmasked})
    if len(helpers) > 3:
        assert opened == [True, True]
        assert hostile.read(EVERYBODY[1:]) == hostile.truth()
    else:
        assert opened == [False, True]
        with pytest.raises(AssertionError, match="stay closed"):
            hostile.read(EVERYBODY[1:])


def forced(hostile: Hostile, k: int, summed: tuple[int, ...]) -> bytes:
    """The confirmation of a device that works for the coordinator."""
    statement = hostile.roster.make_sum_statement(hostile.positions(None), hostile.positions(summed))
    return hostile.session(k).signing.sign(statement)


def test_an_honest_sum_of_ten_is_theirs(hostile: Hostile) -> None:
    """What is opened then is the sum of all, and no more."""
    for k in EVERYBODY:
        hostile.train(k)
    total = hostile.opened()
    assert not any(kind == "keys" for kind, _ in hostile.shown)
    assert hostile.read(()) != hostile.truth(), "under the masks of its pairs"
    mean = fixed_point.compute_mean_change(total, LAYOUT, 10, 100)
    assert np.abs(mean.params).max() < 1


@pytest.mark.parametrize("quiet", ["steps", "weights"])
def test_the_sum_of_devices_that_learn_otherwise_than_the_victim_is_noise(hostile: Hostile, quiet: str) -> None:
    """The nine others take no step, or have a scale at which all that they learn is rounded to 0."""
    for k in EVERYBODY:
        action = hostile.training(k)
        if k != VICTIM and quiet == "steps":
            action = replace(action, train=replace(action.train, sgd=Sgd(steps=0)))
        elif k != VICTIM:
            action = replace(action, heaviest=2**24)
        hostile.take(k, action)
    total = hostile.opened()
    apart = (total.params - np.array(hostile.truth(), np.uint32)).view(np.int32)
    assert np.abs(apart.astype(np.int64)).max() > 2**24
    with pytest.raises(ValueError, match="weights that sum to"):
        fixed_point.compute_mean_change(total, LAYOUT, 10, 100)
