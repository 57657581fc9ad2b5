"""Every method averages by the rule of the settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.mean import BLOCK
from coordinator.methods import MethodSettings, make
from coordinator.methods.averaging import averages, lengths
from coordinator.options import method_and_options
from coordinator.protection import Protection, Rule
from fedge.messages import Codec
from fedge.sgd import Sgd
from fedge.steps.train import Trained
from fedge.tensors import Layout, TensorInfo, unflatten
from tests.support.simulation import digits, multiplying


@pytest.mark.parametrize("name", ["fedavg", "fedge", "fedepc", "cfic:alpha=0:beta=0", "scmoe-pfl", "fedper"])
async def test_the_rule_is_that_of_the_settings_in_every_method(tmp_path: Path, name: str) -> None:
    """One of six sends its update fifty times as long: a mean goes far, another rule about as far as it should."""
    moved: dict[Rule, float] = {}
    kind, options = method_and_options(name)
    rules: tuple[Rule, ...] = ("mean", "clipped", "median")
    for rule in rules:
        fleet, layout, first, _ = digits(tmp_path / rule, n=6, how="iid", limit=400)
        fleet._execute = multiplying(50, "d00")
        settings = MethodSettings(
            rounds=2,
            sgd=Sgd(steps=3),
            codec=Codec.FLOAT32,
            protection=Protection(average=rule),
            options=options,
        )
        method = make(kind, settings)
        state = method.init(layout, first)
        fleet.round = 1
        state = await method.round(state, fleet)
        start, now = (fleet.get(ref, layout).params for ref in (first, method.serves(state, "d01")))
        moved[rule] = float(np.linalg.norm(now - start))
    assert all(moved[rule] < 0.5 * moved["mean"] for rule in rules[1:]), moved


async def test_large_updates_which_are_read_ahead_give_the_same_mean(tmp_path: Path) -> None:
    fleet, *_ = digits(tmp_path, n=3, limit=200)
    settings = MethodSettings(protection=Protection(average="mean"))
    large = Layout(tensors=(TensorInfo(name="w", shape=(BLOCK + 5,)),))
    w = np.random.default_rng(0).normal(size=BLOCK + 5).astype(np.float32)
    updates = {
        i: Trained(update=fleet.put({"w": np.float32(k) * w}), n_samples=k) for k, i in enumerate("abc", start=1)
    }
    (found,) = await averages(make("fedavg", settings), fleet, updates, [updates], large)
    assert found is not None
    np.testing.assert_allclose(found.params, w * (1 + 4 + 9) / 6, rtol=1e-6)


async def test_updates_that_others_weigh_are_shortened_too(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=200)
    w = fleet.get(first, layout)
    updates = {}
    for i, times in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 10.0)):
        ref = fleet.put({name: np.float32(times) * tensor for name, tensor in unflatten(w, layout).items()})
        updates[i] = Trained(update=ref, n_samples=5)
    method = make("fedavg", MethodSettings())
    assert lengths(method, fleet, updates, layout) == {
        **dict.fromkeys("abc", (1.0, 1.0)),
        "d": (pytest.approx(0.2, rel=1e-4), 1.0),
    }
    plain = make("fedavg", MethodSettings(protection=Protection(average="mean")))
    assert set(lengths(plain, fleet, updates, layout).values()) == {(1.0, 1.0)}
    (found,) = await averages(method, fleet, updates, [["a", "b", "c", "d"]], layout)
    assert found is not None
    np.testing.assert_allclose(found.params, 1.25 * w.params, rtol=1e-4)
