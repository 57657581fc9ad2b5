"""The proximal term reaches the devices, and shortens their way."""

import numpy as np
import pytest

from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits

EXACT = {"rounds": 2, "sgd": Sgd(steps=20), "codec": Codec.FLOAT32, "down": "float32"}


async def distance(tmp_path, mu: float) -> float:
    """How far a round moves the model."""
    fleet, layout, first, _ = digits(tmp_path / str(mu))
    method = make_method("fedprox", MethodSettings(**EXACT, options={"proximal_mu": mu}))
    fleet.round = 1
    after = await method.advance(method.init(layout, first), fleet)
    return float(np.linalg.norm(fleet.get(after.model, layout).params - fleet.get(first, layout).params))


async def test_the_stronger_the_pull_the_shorter_the_way(tmp_path) -> None:
    free, drawn, held = [await distance(tmp_path, mu) for mu in (0.0, 1.0, 10.0)]
    assert held < drawn < free


async def test_without_pull_it_is_fedavg_bit_for_bit(tmp_path) -> None:
    models = []
    for name, options in (("fedprox", {"proximal_mu": 0.0}), ("fedavg", {})):
        fleet, layout, first, _ = digits(tmp_path / name)
        method = make_method(name, MethodSettings(**EXACT, participation=0.5, options=options))
        models.append((await run_rounds(method, method.init(layout, first), fleet)).model)
    assert models[0] == models[1]


def test_the_pull_is_weak_by_default_and_absent_from_fine_tuning() -> None:
    method = make_method("fedprox+ft", MethodSettings())
    assert method.get_sgd().proximal_mu == 0.01
    assert method.settings.sgd.proximal_mu == 0


def test_a_negative_pull_is_refused() -> None:
    with pytest.raises(ConfigError, match="option of the method"):
        make_method("fedprox", MethodSettings(options={"proximal_mu": -1.0}))
