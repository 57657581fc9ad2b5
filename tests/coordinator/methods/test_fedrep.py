from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.methods import MethodSettings
from coordinator.methods.fedrep import FedRep
from fedge.messages import Codec, KeepPart, Part
from fedge.sgd import Sgd
from tests.support.simulation import digits


async def test_without_steps_of_the_base_the_shared_part_stands_still_and_the_heads_learn(tmp_path: Path) -> None:
    """With sgd.steps = 0 only the head's phase is left, and it touches nothing that is shared."""
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    settings = MethodSettings(rounds=2, sgd=Sgd(steps=0), codec=Codec.FLOAT32, options={"head_steps": 20})
    method = FedRep(settings)
    assert method.keep(None) == KeepPart(private=Part.HEAD, head_steps=20)  # type: ignore[arg-type]
    state = method.initial(layout, first)
    losses = []
    for number in (1, 2):
        fleet.round = number
        state = await method.round(state, fleet)
        served = fleet.get(state.whole, layout)
        losses.append(np.mean([worker.look(worker.personal(served)).loss for worker in fleet.workers.values()]))
    n_base = layout.part(Part.BASE).n_params
    np.testing.assert_array_equal(
        fleet.get(state.model, layout.part(Part.BASE)).params, fleet.get(first, layout).params[:n_base]
    )
    assert losses[1] < losses[0]
