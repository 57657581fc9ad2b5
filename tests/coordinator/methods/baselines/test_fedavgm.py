"""Server momentum: the velocity over the rounds, gamma = 0, unresponsive devices, the way to bytes."""

import numpy as np
import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits

EXACT = {"rounds": 4, "sgd": Sgd(steps=5), "codec": Codec.FLOAT32, "down": "float32"}


async def test_the_second_step_holds_gamma_times_the_first(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = make_method("fedavgm", MethodSettings(**EXACT, options={"gamma": 0.8}))
    plain = make_method("fedavg", MethodSettings(**EXACT))
    states = [method.init(layout, first)]
    for r in (1, 2):
        fleet.round = r
        states.append(await method.advance(states[-1], fleet))
    mean = await plain.round(FedAvgState(round=1, layout=layout, model=states[1].model), fleet)
    w0, w1, w2, averaged = (
        fleet.get(ref, layout).params for ref in (first, states[1].model, states[2].model, mean.model)
    )
    np.testing.assert_allclose(w2 - w1, (averaged - w1) + 0.8 * (w1 - w0), atol=1e-6)
    assert decode_state(encode_state(states[2]), FedAvgState) == states[2]


async def test_without_momentum_it_is_fedavg_bit_for_bit(tmp_path) -> None:
    states = []
    for name, options in (("fedavgm", {"gamma": 0.0}), ("fedavg", {})):
        fleet, layout, first, _ = digits(tmp_path / name)
        method = make_method(name, MethodSettings(**EXACT, participation=0.5, options=options))
        states.append(await run_rounds(method, method.init(layout, first), fleet))
    assert states[0].model == states[1].model
    assert states[0].velocity is None


async def test_an_unresponsive_round_changes_neither_model_nor_velocity(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = make_method("fedavgm", MethodSettings(**EXACT))
    fleet.round = 1
    before = await method.advance(method.init(layout, first), fleet)
    fleet.unresponsive = frozenset(device.id for device in fleet.get_devices())
    fleet.round = 2
    after = await method.advance(before, fleet)
    assert (after.model, after.velocity) == (before.model, before.velocity)
    assert before.velocity is not None


def test_half_of_the_last_step_is_kept_by_default() -> None:
    assert make_method("fedavgm", MethodSettings()).get_gamma() == 0.5


@pytest.mark.parametrize("gamma", [-0.1, 1.0])
def test_gamma_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(ConfigError, match="option of the method"):
        make_method("fedavgm", MethodSettings(options={"gamma": gamma}))
