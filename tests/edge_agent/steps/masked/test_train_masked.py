"""Masked training: what `train` learns, under a mask that is used once."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy.stats import chisquare

from edge_agent.steps.masked.train_masked import many
from fedge.steps.contract import Declined, Failed
from fedge.steps.masked.train_masked import TrainedMasked
from fedge.steps.training.train import Trained
from fedge.system.files import skip_fsync
from fedge.tensors import fixed_point
from fedge.tensors.codecs import decode
from fedge.tensors.fixed_point import from_bytes, make_summand, make_zero
from fedge.tensors.layout import Codec
from fedge.wire.messages import Why
from tests.support.cohort import Cohort
from tests.support.orders import LAYOUT, device_data, order


@pytest.fixture
def cohort(tmp_path: Path) -> Cohort:
    made = Cohort(tmp_path)
    made.advertise()
    made.share()
    return made


def vector(cohort: Cohort, k: int, **changes: object) -> bytes:
    finished = cohort.does(k, msgspec.structs.replace(cohort.training(k), **changes))
    assert isinstance(finished.result, TrainedMasked), finished.result
    return finished.blobs[finished.result.masked.digest]


def test_it_learns_what_train_learns_and_tells_as_much(cohort: Cohort) -> None:
    """In the sum of all the pairs' masks cancel: without own masks it is that of what `train` learns."""
    action = cohort.training(0)
    plain = cohort.does(0, msgspec.structs.replace(action.train, codec=Codec.FLOAT32))
    assert isinstance(plain.result, Trained)
    update = decode(plain.blobs[plain.result.update.digest], Codec.FLOAT32, LAYOUT)
    total = make_zero(LAYOUT)
    for k in range(6):
        total.add(from_bytes(vector(cohort, k), LAYOUT))
        total.subtract(own_mask(cohort, k))
    expected = make_summand(update, plain.result.n_samples, 6, 100)
    assert plain.result.n_samples == total.others[-1] / 6 == 30
    np.testing.assert_array_equal(total.params, expected.params * np.uint32(6), "all have the same samples and seed")
    masked = cohort.result(0, action)
    assert isinstance(masked, TrainedMasked)
    for name in ("loss_before", "loss_after", "gradient_norm", "val_score"):
        assert getattr(masked, name) == getattr(plain.result, name)


def own_mask(cohort: Cohort, k: int) -> fixed_point.Summand:
    from edge_agent.privacy.masking import Session, Shared
    from fedge.privacy.masked_sums import expand_seed

    shared = Session(cohort.workers[k].make_device(order(cohort.sharing()), cohort.blobs), "train").load(Shared)
    assert shared is not None
    return expand_seed(shared.seed, LAYOUT)


def test_a_device_counts_at_most_as_the_heaviest(cohort: Cohort) -> None:
    heavy = {k: from_bytes(vector(cohort, k, heaviest=7), LAYOUT) for k in range(6)}
    total = make_zero(LAYOUT)
    for k, own in heavy.items():
        total.add(own)
        total.subtract(own_mask(cohort, k))
    assert total.others[-1] == 6 * 7


def test_nothing_but_the_masked_vector_leaves(cohort: Cohort) -> None:
    finished = cohort.does(0, cohort.training(0))
    assert list(finished.blobs) == [finished.result.masked.digest]  # type: ignore[attr-defined]
    assert not finished.unpacked
    assert len(finished.blobs[finished.result.masked.digest]) == fixed_point.count_bytes(LAYOUT)  # type: ignore[attr-defined]


def test_a_single_masked_update_is_uniform_whatever_it_hides(tmp_path: Path) -> None:
    """Bytes of 40 masked updates of one and the same training, also less one another: a mask is used for one alone.

    Chi-squared with 255 degrees of freedom, twice: fails by chance once in 5 * 10^5 runs.
    """
    vectors = []
    for turn in range(40):
        with skip_fsync():
            cohort = Cohort(tmp_path / str(turn), 5)
            cohort.advertise()
            cohort.share()
            vectors.append(from_bytes(vector(cohort, 0), LAYOUT))
    apart = [one.params - other.params for one, other in pairwise(vectors)]
    for numbers in ([v.params for v in vectors], apart):
        data = b"".join(array.astype("<u4").tobytes() for array in numbers)
        assert chisquare(np.bincount(np.frombuffer(data, np.uint8), minlength=256)).pvalue > 1e-6


def test_asked_again_it_sends_the_same_bytes_also_after_a_kill(cohort: Cohort) -> None:
    action = cohort.training(0)
    first = cohort.does(0, action)
    cohort.workers[0] = cohort.started(0)
    assert cohort.does(0, action) == first


def test_with_other_samples_by_then_it_still_sends_what_it_sent(cohort: Cohort) -> None:
    """Two updates under one mask would show their difference."""
    action = cohort.training(0)
    first = cohort.does(0, action)
    cohort.workers[0] = cohort.started(0, device_data(20))
    assert cohort.does(0, action) == first


@pytest.mark.parametrize("changed", ["another model", "fewer pairs", "other sharers"])
def test_another_training_under_the_same_mask_is_refused(cohort: Cohort, changed: str) -> None:
    cohort.does(0, cohort.training(0))
    cohort.workers[0] = cohort.started(0)
    other = {
        "another model": cohort.training(0, seed=1),
        "fewer pairs": cohort.training(0, among=(0, 1, 2, 3)),
        "other sharers": msgspec.structs.replace(cohort.training(0), sharers=cohort.positions(range(5))),
    }[changed]
    refused = cohort.result(0, other)
    assert isinstance(refused, Failed)
    assert refused.reason == "another order was answered under this mask"


@pytest.mark.parametrize("among", [(0,), (0, 1, 2)])
def test_masks_with_too_few_are_refused(cohort: Cohort, among: tuple[int, ...]) -> None:
    refused = cohort.result(0, cohort.training(0, among=among))
    assert isinstance(refused, Failed)
    assert "at least 3 are needed" in refused.reason


@pytest.mark.parametrize(
    ("named", "sent"),
    [((0, 1, 2, 3, 4), range(6)), (range(6), (0, 1, 2, 3, 4)), (range(1, 6), range(6)), ((), range(6))],
    ids=["shares of one more", "shares of one less", "without itself", "nobody"],
)
def test_masks_with_others_than_all_neighbours_that_have_shared_are_refused(
    cohort: Cohort, named: Collection[int], sent: Collection[int]
) -> None:
    """Whoever masks with fewer than it is told could be summed without those with whom it has masked."""
    action = msgspec.structs.replace(cohort.training(0, among=sent), sharers=cohort.positions(named))
    refused = cohort.result(0, action)
    assert isinstance(refused, Failed)
    assert refused.reason == "the order's shares are not those of the neighbours that have shared their secrets"
    assert isinstance(cohort.result(0, cohort.training(0)), TrainedMasked), "nothing was masked"


def test_it_signs_with_whom_it_has_masked(cohort: Cohort) -> None:
    for k, among in ((0, None), (1, (0, 1, 2, 3))):
        action = cohort.training(k, among=among)
        result = cohort.result(k, action)
        assert isinstance(result, TrainedMasked)
        assert cohort.roster.find_signers(cohort.roster.make_mask_statement(action.sharers), {k: result.statement}) == {
            k
        }


def test_before_its_secrets_are_shared_it_masks_nothing(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    for k in range(1, 6):
        cohort.made[k] = cohort.result(k, cohort.sharing())  # type: ignore[assignment]
    refused = cohort.result(0, cohort.training(0, among=range(6)))
    assert isinstance(refused, Failed)
    assert refused.reason == "no secrets were shared for this roster"


def test_a_device_without_samples_declines(cohort: Cohort) -> None:
    cohort.workers[0] = cohort.started(0, device_data(sensitive=1.0))
    refused = cohort.result(0, cohort.training(0))
    assert isinstance(refused, Declined)
    assert refused.why is Why.NO_DATA


def test_many_are_as_each_alone_to_float_tolerance(tmp_path: Path) -> None:
    """Side by side, with what was sent before left to its own `run`."""
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    alone = [from_bytes(vector(cohort, k), LAYOUT) for k in range(6)]
    devices = [w.make_device(order(cohort.training(k)), cohort.blobs) for k, w in enumerate(cohort.workers)]
    assert many(devices, [cohort.training(k) for k in range(6)]) == [None] * 6
    fresh = Cohort(tmp_path / "fresh")
    fresh.advertise()
    fresh.share()
    actions = [fresh.training(k) for k in range(6)]
    devices = [
        w.make_device(order(action, seed=7), fresh.blobs) for w, action in zip(fresh.workers, actions, strict=True)
    ]
    found = many(devices, actions)
    totals = [make_zero(LAYOUT), make_zero(LAYOUT)]
    for k, (device, result) in enumerate(zip(devices, found, strict=True)):
        assert isinstance(result, TrainedMasked)
        totals[0].add(from_bytes(device.blobs[result.masked.digest], LAYOUT))
        totals[0].subtract(own_mask(fresh, k))
        totals[1].add(alone[k])
        totals[1].subtract(own_mask(cohort, k))
    means = [fixed_point.compute_mean_change(total, LAYOUT, 6, 100) for total in totals]
    np.testing.assert_allclose(means[0].params, means[1].params, atol=1e-5)
