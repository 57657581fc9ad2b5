"""Every method averages by the rule of the settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.mean import BLOCK
from coordinator.aggregation.protection import Protection, Rule
from coordinator.fleet import sites
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from coordinator.methods.catalogue import make_method
from coordinator.methods.options import parse_method
from coordinator.methods.parts.averaging import average_by_cluster, compute_update_factors
from coordinator.methods.settings import MethodSettings
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.tensors.layout import Codec, Layout, TensorInfo, unflatten
from fedge.wire.messages import BlobRef
from tests.support.simulation import digits, multiplying


@pytest.mark.parametrize("name", ["fedavg", "fedge", "fedepc", "cfic:alpha=0:beta=0", "scmoe-pfl", "fedper"])
async def test_the_rule_is_that_of_the_settings_in_every_method(tmp_path: Path, name: str) -> None:
    """One of six sends its update fifty times as long: a mean goes far, another rule about as far as it should."""
    moved: dict[Rule, float] = {}
    kind, options = parse_method(name)
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
        method = make_method(kind, settings)
        state = method.init(layout, first)
        fleet.round = 1
        state = await method.round(state, fleet)
        start, now = (fleet.get(ref, layout).params for ref in (first, method.get_model(state, "d01")))
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
    (found,) = await average_by_cluster(make_method("fedavg", settings), fleet, updates, [updates], large)
    assert found is not None
    np.testing.assert_allclose(found.params, w * (1 + 4 + 9) / 6, rtol=1e-6)


async def test_updates_that_others_weigh_are_shortened_too(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=200)
    w = fleet.get(first, layout)
    updates = {}
    for i, times in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 10.0)):
        ref = fleet.put({name: np.float32(times) * tensor for name, tensor in unflatten(w, layout).items()})
        updates[i] = Trained(update=ref, n_samples=5)
    method = make_method("fedavg", MethodSettings(protection=Protection(average="clipped")))
    assert compute_update_factors(method, fleet, updates, layout) == {
        **dict.fromkeys("abc", (1.0, 1.0)),
        "d": (pytest.approx(0.2, rel=1e-4), 1.0),
    }
    plain = make_method("fedavg", MethodSettings(protection=Protection(average="mean")))
    assert set(compute_update_factors(plain, fleet, updates, layout).values()) == {(1.0, 1.0)}
    (found,) = await average_by_cluster(method, fleet, updates, [["a", "b", "c", "d"]], layout)
    assert found is not None
    np.testing.assert_allclose(found.params, 1.25 * w.params, rtol=1e-4)


class TwoSites(Fleet):
    """A fleet in which the updates of a, b and c lie on one site, and those of d and e on another."""

    @property
    def sites(self) -> TwoSites:
        return self

    def find_remote(self, updates: dict[str, BlobRef]) -> set[str]:
        return {i for i in updates if i in "abcde"}

    async def compute_means(self, wanted: SiteSums, note: Note) -> list[SiteMean]:
        found = []
        for names in ("abc", "de"):
            own = wanted.narrow_to({i: ref for i, ref in wanted.updates.items() if i in names})
            means, _ = sites.average_updates(own, own.updates, lambda ref: self.get(ref, wanted.layout))
            found += [SiteMean(k, m, tuple(own.sums[k])) for k, m in enumerate(means) if m is not None]
        return found


@pytest.mark.parametrize("rule", ["norm-clipped", "mean", "clipped"])
async def test_what_lies_on_sites_counts_as_it_would_here(tmp_path: Path, rule: Rule) -> None:
    """Clusters overlap, so that a device weighs more in one than in another; some updates are stale, too."""
    layout = Layout(
        tensors=(
            TensorInfo(name="w", shape=(3,)),
            TensorInfo(name="running", shape=(2,), kind="buffer"),
            TensorInfo(name="batches", shape=(), kind="counter"),
        )
    )
    fleet, *_ = digits(tmp_path, n=3, limit=200)
    rng = np.random.default_rng(3)
    updates = {}
    for n, i in enumerate("abcdefgh"):
        tensors = {name: (1 + 20 * (n % 4 == 3)) * rng.normal(size=k) for name, k in (("w", 3), ("running", 2))}
        floats = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
        ref = fleet.put({**floats, "batches": np.int64([5, 9, 2, 7, 8, 1, 3, 4][n])})
        updates[i] = Trained(update=ref, n_samples=[10, 400, 20, 10, 5000, 30, 900, 40][n])
    members = [[*"abcdefgh"], [*"abd"], [*"begh"], [*"ef"], [*"gh"], []]
    method = make_method("fedavg", MethodSettings(protection=Protection(average=rule)))
    stale = {"b": 0.5, "g": 0.7}
    here, there = [
        await average_by_cluster(method, f, updates, members, layout, discounts=stale) for f in (fleet, TwoSites(fleet))
    ]
    for ours, theirs in zip(here[:-1], there[:-1], strict=True):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(theirs.params, ours.params, rtol=1e-6)
        np.testing.assert_allclose(theirs.buffers, ours.buffers, rtol=1e-6)
        np.testing.assert_array_equal(theirs.counters, ours.counters)
        assert theirs.n_samples == pytest.approx(ours.n_samples)
    assert here[-1] is there[-1] is None
