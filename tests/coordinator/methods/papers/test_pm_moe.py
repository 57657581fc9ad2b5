"""PM-MoE (docs/methods/pm_moe.md) on a small fleet: stage 1 is the base's, the pool is shuffled, bundles."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.methods.catalogue import make_method
from coordinator.methods.papers.pm_moe import PmMoe
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from deploy import load as load_bundle
from fedge.errors import ConfigError
from fedge.privacy.egress import PRESETS, Rules
from fedge.steps.mixture.fit_pool import FitPool
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import PrivateShared
from fedge.wire.messages import Role, iterate_blobs
from tests.support.simulation import digits, manifests, roles


class Paper(PmMoe):
    """With the paper's gate."""

    PRESET = "paper"


def method_of(rounds: int = 3, **options: object) -> PmMoe:
    return PmMoe(MethodSettings(rounds=rounds, sgd=Sgd(steps=5), options=options))


@pytest.mark.parametrize("base", ["fedper", "fedrep", "lg-fedavg", "fedrod", "dbe"])
async def test_stage_one_is_the_base_and_stage_two_ends_in_bundles(tmp_path, base) -> None:
    fleet, layout, first, _ = digits(tmp_path / "a", n=4, limit=400)
    method = method_of(base=base)
    state = await run_rounds(method, method.init(layout, first), fleet)
    alone, layout, first, _ = digits(tmp_path / "b", n=4, limit=400)
    plain = make_method(base, method.settings.__class__(rounds=3, sgd=Sgd(steps=5)))
    after = await run_rounds(plain, plain.init(layout, first), alone)
    assert state.model == after.model
    assert decode_state(encode_state(state), type(state)) == state
    assert set(state.installed) == {f"d{i:02d}" for i in range(4)}
    for i, manifest in manifests(fleet, state).items():
        assert manifest.max_abs_diff < 1e-4
        assert Role.PRIVATE in roles(fleet, state)[i]
        p = load_bundle(tmp_path / "a" / i / "bundles" / "1").predict(np.zeros((2, 1, 8, 8), np.float32)).probabilities
        np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-5)
    assert method.summarise(state)["base"] == base


async def test_the_pool_tells_no_names_and_each_device_its_own_number(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=5, limit=400)
    method = method_of()
    await run_rounds(method, method.init(layout, first), fleet)
    seen = fleet.sent(FitPool)
    modules = {a.device_id: a.result.module for a in fleet.heard if isinstance(a.result, PrivateShared)}
    assert sorted(action.own for action in seen.values()) == [0, 1, 2, 3, 4]
    everybody = [modules[i] for i in sorted(seen, key=lambda i: seen[i].own)]
    for action in seen.values():
        others = [None if k == action.own else module for k, module in enumerate(everybody)]
        assert list(action.pool) == others, "one pool for everybody, of which nobody fetches its own module"
    assert [i for i, _ in sorted(seen.items(), key=lambda item: item[1].own)] != sorted(seen), "shuffled"


async def test_stage_two_costs_one_module_up_and_those_of_the_others_down(tmp_path) -> None:
    """Section 8: M * s bytes up in total, (M - 1) * s down for each client; here with M = 4 and s with its header."""
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    before: dict[str, int] = {}
    fleet.before = lambda step, _: before.update({step: fleet.bytes_up})
    up: dict[str, int] = {}
    fleet.change = lambda step, _: up.update({step: fleet.bytes_up - before[step]})
    method = method_of()
    await run_rounds(method, method.init(layout, first), fleet)
    (s,) = {a.result.module.size_bytes for a in fleet.heard if isinstance(a.result, PrivateShared)}
    down = [sum(ref.size_bytes for ref in iterate_blobs(a.pool)) for a in fleet.sent(FitPool).values()]
    n_params = 32 * 10 + 10  # of this network's head
    assert 4 * n_params < s < 4 * n_params + 250
    assert (up["share"], up["pool"]) == (4 * s, 0)
    assert down == [3 * s] * 4


async def test_a_device_that_never_trained_installs_the_bases_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    method = method_of(rounds=2)
    state = method.init(layout, first)
    fleet.unresponsive = frozenset({"d03"})
    for _ in range(2):
        fleet.round = state.round + 1
        state = await method.advance(state, fleet)
    fleet.unresponsive = frozenset()
    fleet.round = 3
    state = await method.advance(state, fleet)
    assert set(state.installed) == {"d00", "d01", "d02", "d03"}
    assert len(roles(fleet, state)["d03"]) == 1


async def test_who_does_not_allow_it_keeps_its_module_and_installs_the_bases_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    fleet._rules["d01"] = Rules(PRESETS["default"])
    method = method_of(rounds=2)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02", "d03"}
    assert len(roles(fleet, state)["d01"]) == 1
    assert all(len(roles(fleet, state)[i]) in {1, 3} for i in ("d00", "d02", "d03"))


def test_an_anchored_gate_needs_two_places() -> None:
    with pytest.raises(ConfigError, match="without a gradient"):
        method_of(top=1)
    assert Paper(MethodSettings(options={"top": 1}))


@pytest.mark.parametrize("base", ["fedper", "lg-fedavg", "dbe"])
async def test_without_a_round_everybody_installs_the_first_model(tmp_path, base) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=2, limit=200)
    method = method_of(rounds=0, base=base)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01"}


async def test_more_devices_than_a_pool_takes_are_in_several(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coordinator.methods.papers.pm_moe.MAX_POOL", 3)
    fleet, layout, first, _ = digits(tmp_path, n=7, limit=500)
    method = method_of(rounds=1)
    state = await run_rounds(method, method.init(layout, first), fleet)
    seen = fleet.sent(FitPool)
    assert set(state.installed) == set(seen) == set(fleet.workers)
    assert sorted(len(action.pool) for action in seen.values()) == [2, 2, 2, 2, 3, 3, 3]
    assert len({module for action in seen.values() for module in action.pool if module}) == 7


def test_the_base_has_its_own_defaults_and_the_selection() -> None:
    method = method_of(base="dbe", selection="fastest")
    assert (method._base.name, method._base.options.kappa, method._base.selection) == ("dbe", 1.0, "fastest")
    assert method_of(base="fedrep")._base.options.head_steps == 10
