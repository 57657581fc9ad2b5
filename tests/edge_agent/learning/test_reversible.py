from __future__ import annotations

import numpy as np
import pytest

from edge_agent.learning.reversible import pack_vector, read_vector
from fedge.tensors.layers import Layers, make_reversible_layout
from tests.support.orders import LAYOUT


@pytest.mark.parametrize(("counted", "value"), [(True, 2.0), (None, 2.0), (False, 1.0)])
def test_the_vector_goes_back_only_if_the_last_report_did_not_count(counted: bool | None, value: float) -> None:
    d = LAYOUT.n_params
    now, before = np.full(d, 2.0, np.float32), np.ones(d, np.float32)
    kept = Layers(make_reversible_layout(LAYOUT), pack_vector(now, before, LAYOUT))
    np.testing.assert_array_equal(read_vector(kept, counted=counted, n_params=d), np.full(d, value))
    assert not read_vector(None, counted=counted, n_params=d).any()
