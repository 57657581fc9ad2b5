"""Updates as directions: unit vectors, projections, embeddings, and the cosines between them.

Source: Li et al., "SCMoE-PFL", Information Fusion, 2026, Eq. 1 and 2; specification docs/methods/scmoe_pfl.md.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]
DECIMALS: Final = 9
NO_DIRECTION: Final = 1e-12  # ||g|| at or below it: no direction, section 4
COLUMNS: Final = 1 << 18  # columns of the updates that are converted to float64 at a time
LARGE: Final = 100_000  # parameters above which directions are projected when they are kept
PROJECTED: Final = 4096  # dimension of the projection (section 5)
PROJECTED_AT_ONCE: Final = 1 << 16  # parameters
NONZEROS: Final = 4  # per row of the random projection
LARGEST_GRAM: Final = 4096  # clients whose Gram matrix is decomposed; for more, the dimension of a projection
ROWS: Final = 1024  # rows of a matrix of all clients that are computed at a time


def compute_unit_update(update: NDArray[np.floating]) -> Vectors | None:
    """Compute the direction of an update, Eq. 1, (d,) of norm 1; None if the update is not finite or has norm <= 1e-12.

    The largest entry is divided out first, so that no square overflows or underflows.
    """
    largest = float(np.max(np.abs(update), initial=0.0))
    if not 0 < largest < np.inf:  # a NaN makes the maximum NaN, which fails here too
        return None
    scaled = update.astype(np.float64) / largest
    norm = float(np.linalg.norm(scaled))
    return None if largest * norm <= NO_DIRECTION else scaled / norm


def compute_direction(update: NDArray[np.floating]) -> Vectors | None:
    """Return an update's direction as stored: its unit vector, or if large a fixed projection; None if it has none."""
    unit = compute_unit_update(update)
    return unit if unit is None or len(unit) <= LARGE else project(unit, PROJECTED, seed=0)


def project(update: NDArray[np.floating], size: int, seed: int) -> Vectors:
    """Project a large update at random, (d,) -> (size,), by the same matrix for equal seeds (section 5).

    The matrix (d, size) is sparse: four entries per row (with replacement), each +-1/2, so entries have variance
    1/size. Cosines are kept within about 1/sqrt(size), one standard deviation, so use size >= 4096 if tau is tuned
    finely.

    Cost: O(d) time; the matrix is drawn in blocks of rows and never held.
    """
    projected = np.zeros(size)
    for block, start in enumerate(range(0, len(update), PROJECTED_AT_ONCE)):
        rng = np.random.default_rng((seed, block))
        values = update[start : start + PROJECTED_AT_ONCE].astype(np.float64)
        for _ in range(NONZEROS):
            columns = rng.integers(size, size=PROJECTED_AT_ONCE)[: len(values)]
            signs = rng.integers(2, size=PROJECTED_AT_ONCE, dtype=np.int8)[: len(values)] - 0.5
            projected += np.bincount(columns, weights=values * signs, minlength=size)
    return projected


def compute_gram(updates: NDArray[np.floating]) -> Vectors:
    """Compute the inner products of unit updates, (N, d) -> (N, N) float64, N >= 1.

    A row without direction (`compute_unit_update`) has product 0 with everything, itself included.
    Cost: O(N^2 d) time, O(N) memory per column of a block beyond the updates.
    """
    largest = np.max(np.abs(updates), axis=1, initial=0.0).astype(np.float64)
    usable = (largest > 0) & np.isfinite(largest)
    scale = np.where(usable, largest, 1.0)
    products = np.zeros((len(updates), len(updates)))
    for start in range(0, updates.shape[1], COLUMNS):
        block = updates[:, start : start + COLUMNS].astype(np.float64)
        block[~usable] = 0.0
        block /= scale[:, None]
        products += block @ block.T
    norms = np.sqrt(products.diagonal())
    directed = usable & (scale * norms > NO_DIRECTION)
    norms = np.where(directed, norms, np.inf)
    return products / norms[:, None] / norms[None, :]


def embed_gram(products: Vectors) -> Vectors:
    """Compute Z = U_m Lambda_m^(1/2), Eq. 2, from unit updates' Gram matrix (`compute_gram`): (N, N) -> (N, m).

    All nonzero components are kept, and nothing is centred, so that cosines are exactly those of the updates.
    """
    values, vectors = np.linalg.eigh(products)
    values, vectors = values[::-1], vectors[:, ::-1]
    keep = int(np.sum(values > NO_DIRECTION * max(values[0], 0.0)))
    return np.asarray(vectors[:, :keep] * np.sqrt(values[:keep]))


def compute_embedding(updates: NDArray[np.floating]) -> Vectors:
    """Compute Z of Eq. 2, a rotation of the unit updates: (N, d) -> (N, m), N >= 1.

    If there are as many clients as parameters, the unit updates are that embedding already. With more than 4096 clients
    and more than 4096 parameters, updates are projected to 4096 numbers (section 5), which keeps cosines within about
    1/64.

    Cost: O(N^2 d + N^3) time and O(N^2) memory for N < d, N <= 4096; else O(N d) time and O(N min(d, 4096)) memory.
    """
    n, d = updates.shape
    if n < min(d, LARGEST_GRAM + 1):
        return embed_gram(compute_gram(updates))
    z = np.zeros((n, min(d, LARGEST_GRAM)))
    for row, update in zip(z, updates, strict=True):
        unit = compute_unit_update(update)
        if unit is not None:
            row[:] = unit if d <= LARGEST_GRAM else project(unit, LARGEST_GRAM, seed=0)
    return z


def compute_cosines(a: Vectors, b: Vectors) -> Vectors:
    """Compute the cosines of the rows of a (n, m) with those of b (k, m), to 9 decimals; 0 for a zero row."""
    lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)[None, :]
    quotient = np.divide(a @ b.T, lengths, out=np.zeros(lengths.shape), where=lengths > NO_DIRECTION)
    return np.asarray(np.round(np.clip(quotient, -1.0, 1.0), DECIMALS))


def compute_similarity(z: Vectors) -> Vectors:
    """Compute Sim, an embedding's cosines with itself: (N, m) -> (N, N), symmetric, diagonal 1 (0 for a zero row).

    Cost: O(N^2 m) time, 8 N^2 bytes and some rows of that.
    """
    sim = np.empty((len(z), len(z)))
    for start in range(0, len(z), ROWS):
        end = start + ROWS
        sim[start:end, start:] = compute_cosines(z[start:end], z[start:])
        inner = np.triu(sim[start:end, start:end], 1)
        sim[start:end, start:end] = inner + inner.T
        sim[end:, start:end] = sim[start:end, end:].T
    np.fill_diagonal(sim, np.linalg.norm(z, axis=1) > NO_DIRECTION)
    return sim


def project_to_plane(z: Vectors) -> Vectors:
    """Place an embedding's rows in a plane, for plots: (N, m) -> (N, 2), centred.

    By classical scaling of the distances sqrt(2 - 2 cos); no other plane keeps more of their squares. An axis may come
    out mirrored. Cost: O(N m^2 + m^3) time.

    Source: Torgerson, "Multidimensional scaling: I. Theory and method", Psychometrika 17, 1952.
    """
    lengths = np.linalg.norm(z, axis=1, keepdims=True)
    units = np.divide(z, lengths, out=np.zeros_like(z), where=lengths > NO_DIRECTION)
    units -= units.mean(axis=0)
    _, axes = np.linalg.eigh(units.T @ units)
    places = units @ axes[:, ::-1][:, :2]
    return np.pad(places, ((0, 0), (0, 2 - places.shape[1])))
