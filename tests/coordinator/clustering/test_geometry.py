"""Directions of updates: worked numbers and properties of scmoe_pfl.md sections 4 and 5."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.clustering import geometry
from tests.support.directions import at, embeddings, updates_of


def test_unit_updates_have_norm_one_or_are_flagged():
    np.testing.assert_allclose(geometry.compute_unit_update(np.array([3.0, 0, 4])), [0.6, 0, 0.8])
    assert np.linalg.norm(geometry.compute_unit_update(np.float32([1e30, 1e30]))) == pytest.approx(1)
    assert np.linalg.norm(geometry.compute_unit_update(np.float32([1e-6, 1e-30]))) == pytest.approx(1)
    for flagged in ([0.0, 0.0], [1e-12, 0.0], [np.nan, 1.0], [np.inf, 1.0], []):
        assert geometry.compute_unit_update(np.array(flagged)) is None


def test_gram_is_that_of_the_unit_updates():
    updates = updates_of(0, 6, 50)
    unit = np.stack([geometry.compute_unit_update(g) for g in updates])
    np.testing.assert_allclose(geometry.compute_gram(updates), unit @ unit.T, atol=1e-12)


def test_gram_of_blocks_is_the_gram():
    updates = updates_of(1, 5, geometry.COLUMNS + 100)
    unit = np.stack([geometry.compute_unit_update(g) for g in updates])
    np.testing.assert_allclose(geometry.compute_gram(updates), unit @ unit.T, atol=1e-12)


def test_rows_without_direction_are_zero():
    updates = np.float32([[1, 0], [0, 0], [np.nan, 1], [1, 1], [np.inf, 0]])
    products = geometry.compute_gram(updates)
    np.testing.assert_allclose(products[np.ix_([0, 3], [0, 3])], [[1, 0.5**0.5], [0.5**0.5, 1]], atol=1e-12)
    for lost in (1, 2, 4):
        assert not products[lost].any()
        assert not products[:, lost].any()
    sim = geometry.compute_similarity(geometry.embed_gram(products))
    np.testing.assert_array_equal(sim.diagonal(), [1, 0, 0, 1, 0])


@given(st.integers(0, 10**6), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_embedding_keeps_cosines_and_has_rank_at_most_n(seed, n):
    updates = updates_of(seed, n)
    z = geometry.embed_gram(geometry.compute_gram(updates))
    assert z.shape[1] <= n
    g = updates.astype(np.float64)
    exact = g @ g.T / np.outer(np.linalg.norm(g, axis=1), np.linalg.norm(g, axis=1))
    np.testing.assert_allclose(geometry.compute_similarity(z), exact, atol=1e-7)


@pytest.mark.parametrize(("n", "d"), [(5, 40), (40, 40), (60, 8)])
def test_the_embedding_is_a_rotation_of_the_unit_updates_however_many(n, d):
    updates = updates_of(5, n, d)
    updates[1] = 0
    z = geometry.compute_embedding(updates)
    assert z.shape[1] <= min(n, d)
    np.testing.assert_allclose(
        geometry.compute_similarity(z),
        geometry.compute_similarity(geometry.embed_gram(geometry.compute_gram(updates))),
        atol=2e-9,
    )


def test_updates_of_very_many_clients_are_projected(monkeypatch):
    updates = updates_of(6, 300, 1000)
    exact = geometry.compute_similarity(geometry.compute_embedding(updates))
    monkeypatch.setattr(geometry, "LARGEST_GRAM", 256)
    z = geometry.compute_embedding(updates)
    assert z.shape == (300, 256)
    assert 0 < np.abs(geometry.compute_similarity(z) - exact).max() < 6 / 256**0.5


@given(embeddings)
@settings(max_examples=50, deadline=None)
def test_similarity_is_symmetric_bounded_with_unit_diagonal(z):
    sim = geometry.compute_similarity(z)
    np.testing.assert_array_equal(sim, sim.T)
    assert np.abs(sim).max() <= 1
    np.testing.assert_array_equal(sim.diagonal(), z.any(axis=1).astype(float))


def test_projection_keeps_cosines_and_is_the_same_for_a_seed():
    rng = np.random.default_rng(5)
    base = rng.standard_normal(100_000)
    updates = [base + k * rng.standard_normal(100_000) for k in (0.5, 1.0, 2.0)]
    projected = [geometry.project(u.astype(np.float32), 4096, 1) for u in updates]
    errors = geometry.compute_cosines(np.stack(projected), np.stack(projected)) - geometry.compute_cosines(
        np.stack(updates), np.stack(updates)
    )
    assert np.abs(errors).max() < 4 / np.sqrt(4096)  # four standard deviations
    np.testing.assert_array_equal(geometry.project(updates[0].astype(np.float32), 4096, 1), projected[0])
    assert not np.array_equal(geometry.project(updates[0].astype(np.float32), 4096, 2), projected[0])
    np.testing.assert_allclose(geometry.project(3 * base, 256, 1), 3 * geometry.project(base, 256, 1))
    assert np.linalg.norm(projected[0]) == pytest.approx(np.linalg.norm(updates[0]), rel=4 * np.sqrt(2 / 4096))


def test_places_in_the_plane_reproduce_distances_of_directions_in_a_plane():
    units = at(0, 20, 70, 120, 240)
    found = geometry.project_to_plane(np.arange(1, 6)[:, None] * units)  # of any length
    for i, j in np.ndindex(5, 5):
        assert np.linalg.norm(found[i] - found[j]) == pytest.approx(np.linalg.norm(units[i] - units[j]), abs=1e-7)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-9)


@pytest.mark.parametrize("z", [np.array([[1.0], [-2.0]]), np.array([[1.0, 0, 0], [-1, 0, 0]])])
def test_two_places_have_two_coordinates(z):
    found = geometry.project_to_plane(z)
    assert found.shape == (2, 2)
    assert np.linalg.norm(found[0] - found[1]) == pytest.approx(2.0)


def test_without_a_direction_all_are_in_one_place():
    np.testing.assert_array_equal(geometry.project_to_plane(np.zeros((3, 0))), np.zeros((3, 2)))
