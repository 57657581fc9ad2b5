"""A sample's place is a function of its digest alone, in the stated shares, whatever its bytes were."""

from __future__ import annotations

import numpy as np

from edge_agent.samples.places import TEST_SHARE, VALIDATION_SHARE, choose_place, compute_digests, compute_rank
from fedge.data.preprocessing import preprocess
from fedge.data.task import TEST, TRAIN, VALIDATION
from fedge.tasks.specs import BUILT_IN


def test_places_have_the_stated_shares_and_say_nothing_of_the_rank() -> None:
    digests = compute_digests(np.random.default_rng(0).random((20_000, 3), np.float32))
    places = np.array([choose_place(digest) for digest in digests])
    ranks = np.array([compute_rank(digest) for digest in digests]) / 2**63
    for place, share in (
        (TEST, TEST_SHARE),
        (VALIDATION, VALIDATION_SHARE),
        (TRAIN, 1 - TEST_SHARE - VALIDATION_SHARE),
    ):
        assert abs((places == place).mean() - share) < 0.015
        assert abs(ranks[places == place].mean() - 0.5) < 0.03


def test_a_picture_has_one_digest_whether_it_came_as_bytes_or_as_floats() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (2, 28, 28)).astype(np.uint8)
    task = BUILT_IN["mnist"]
    assert compute_digests(preprocess(task, pixels)) == compute_digests(preprocess(task, pixels.astype(np.float64)))


def test_numbers_in_another_shape_are_another_sample() -> None:
    x = np.zeros((1, 4), np.float32)
    assert compute_digests(x) != compute_digests(x.reshape(1, 2, 2))
