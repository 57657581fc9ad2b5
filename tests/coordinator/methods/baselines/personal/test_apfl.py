from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.personal.apfl import Apfl
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, predicted


def settings(**options: float) -> MethodSettings:
    return MethodSettings(
        rounds=3, sgd=Sgd(steps=6), codec=Codec.FLOAT32, down="float32", participation=0.75, options=dict(options)
    )


async def test_the_global_model_is_fedavgs_and_the_bundle_is_the_mixture(tmp_path: Path) -> None:
    one, layout, first, _ = digits(tmp_path / "1", n=4, limit=400)
    two, _, _, _ = digits(tmp_path / "2", n=4, limit=400)
    fedavg = await run_rounds(FedAvg(settings()), FedAvg(settings()).init(layout, first), one)
    apfl = await run_rounds(Apfl(settings()), Apfl(settings()).init(layout, first), two)
    found, expected = two.get(apfl.model, layout), one.get(fedavg.model, layout)
    np.testing.assert_allclose(found.params, expected.params, atol=1e-6)  # FedAvg's devices train side by side
    for worker in two.workers.values():
        x = worker.data.x_val
        mixed = worker.network.compute_logits(worker.make_personal_model(found), x)
        assert (predicted(worker, x).argmax(axis=1) == mixed.argmax(axis=1)).mean() > 0.9  # but for the offset


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(ConfigError):
        Apfl(settings(alpha=alpha))
