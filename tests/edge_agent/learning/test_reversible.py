from __future__ import annotations

import numpy as np
import pytest

from edge_agent.learning.reversible import pack_vector, read_vector
from fedge.tensors.layers import Layers, make_reversible_layout
from tests.support.orders import LAYOUT


@pytest.mark.parametrize(("counted", "value"), [(0, 0.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)])
def test_the_vector_is_that_of_the_last_report_that_counted(counted: int, value: float) -> None:
    """The newer one is of round 5. 6: of a device whose home was restored; the nearest that there is."""
    d = LAYOUT.n_params
    now, before = np.full(d, 2.0, np.float32), np.ones(d, np.float32)
    kept = Layers(make_reversible_layout(LAYOUT), pack_vector(now, before, 5, LAYOUT))
    np.testing.assert_array_equal(read_vector(kept, counted=counted, n_params=d), np.full(d, value))
    assert not read_vector(None, counted=counted, n_params=d).any()
