"""Updates and embeddings for tests of clusterings."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays


def at(*degrees):
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def updates_of(seed, n, d=40):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


embeddings = arrays(
    np.float64,
    st.tuples(st.integers(1, 9), st.integers(1, 3)),
    elements=st.sampled_from([-1.0, -0.5, -0.1, 0.0, 0.1, 0.3, 1.0]),
)
