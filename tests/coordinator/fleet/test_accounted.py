"""Which methods go with differential privacy, what their devices then tell, and what the others are refused for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation.protection import Protection
from coordinator.fleet.accounted import AccountedFleet, add_noise
from coordinator.methods.catalogue import get_installed_methods, load_method_class, make_method
from coordinator.methods.method import Server
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from coordinator.store.records import Device
from edge_agent.privacy.dp_ledger import Ledger
from fedge.errors import ConfigError
from fedge.steps.contract import HARMLESS, Action, Unsupported, load_installed_steps
from fedge.steps.descriptions.mean_features import MeanFeatures
from fedge.steps.descriptions.profile import Profile
from fedge.steps.noise import Privacy
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import SharePrivate
from fedge.steps.training.train import Start, Train
from fedge.steps.training.train_dp import TrainDp
from fedge.tensors.layout import Layout, TensorInfo
from fedge.wire.messages import BlobRef
from tests.support.orders import LAYOUT
from tests.support.simulation import digits

REF = BlobRef(digest="0" * 64, size_bytes=1)
PRIVACY = Privacy(clip_norm=1.0, delta=1e-5, participations=2, epsilon=8.0)
DP = Protection(dp_epsilon=8.0)
PLAIN = ("fedadam", "fedavg", "fedavgm", "fedbuff", "fedper", "fedprox", "fedrep", "fedyogi", "lg-fedavg", "local")


def settings(**changes: Any) -> MethodSettings:
    return MethodSettings(**{"rounds": 2, "sgd": Sgd(steps=3), "protection": DP} | changes)


def test_each_method_goes_with_it_or_says_which_field_it_needs() -> None:
    goes = [name for name in get_installed_methods() if "dp" not in load_method_class(name).REFUSED]
    assert sorted(goes) == sorted((*PLAIN, *ANSWERS))
    for name in set(get_installed_methods()) - set(goes):
        why = load_method_class(name).REFUSED["dp"]
        named = re.findall(r"(\w+) of step (\w+)", why)
        assert named
        results = {step: load_installed_steps()[step].RESULT.get_revealed() for _, step in named}
        assert all(results[step][field] not in HARMLESS for field, step in named)
        with pytest.raises(ConfigError, match=f"{name} cannot have dp: it needs {named[0][0]}"):
            make_method(name, settings())


async def run_heard(name: str, settings_: MethodSettings, tmp_path: Path, **how: Any) -> tuple[Any, Any, list[Action]]:
    """The final state, the fleet, and what its devices were asked."""
    fleet, layout, first, _ = digits(tmp_path, **how)
    method: Any = make_method(name, settings_, Server(fleet.task, fleet.workers["d00"].data.training))
    asked: list[Action] = []
    ask = fleet._make_orders

    def heard(label: str, actions: Mapping[str, Action], deadline_s: float | None = None) -> Any:
        asked.extend(actions.values())
        return ask(label, actions, deadline_s)

    fleet._make_orders = heard  # type: ignore[method-assign]
    return await run_rounds(method, method.make_first_state(layout, first), fleet), fleet, asked


ANSWERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "cfic": ({}, {"describe_labels"}),
    "fedcoe": ({"participation": 0.5}, {"route", "install_bundle"}),
    "fedepc": ({}, {"profile"}),
    "fedge": (
        {"options": {"split": "always", "clustering": "aidc"}},
        {"profile", "trial", "fit_candidates", "fit_gate"},
    ),
    "haccs": ({}, {"label_shares"}),
    "pm-moe": ({}, {"share_private", "fit_pool"}),
    "scmoe-pfl": ({}, {"fit_mixture"}),
}
"""Settings, and the steps beside training and installing."""


@pytest.mark.parametrize("name", ANSWERS)
async def test_what_leaves_beside_updates_has_noise_and_keeps_the_promise(name: str, tmp_path: Path) -> None:
    changes, steps = ANSWERS[name]
    n = 4 if name == "fedge" else 2
    short = settings(rounds=3, sgd=Sgd(steps=2), **changes)
    state, fleet, asked = await run_heard(name, short, tmp_path, limit=100 * n, n=n, n_groups=2)
    found = {action.STEP for action in asked}
    assert steps - {"trial"} <= found <= steps | {"train_dp", "install"}, "noise may leave a single group, and no trial"
    assert all(not action.find_unaccounted() for action in asked)
    assert {action.STEP for action in asked if action.timed} <= {"install_bundle"}, "how long work on samples took"
    assert sorted(state.installed) == sorted(fleet.workers)
    spent = [Ledger(worker.home).compute_spent(1e-5) for worker in fleet.workers.values()]
    assert 0 < min(spent) < max(spent) * (1 + 1e-9) <= 8 * (1 + 2e-9)


@pytest.mark.parametrize("name", [*PLAIN, "fedavg+ft"])
async def test_devices_tell_nothing_without_noise_and_keep_the_promise(name: str, tmp_path: Path) -> None:
    state, fleet, asked = await run_heard(name, settings(), tmp_path)
    assert {type(action).STEP for action in asked} <= {"train_dp", "install"}
    assert sorted(state.installed) == sorted(fleet.workers)
    for worker in fleet.workers.values():
        charges = Ledger(worker.home).charges
        assert len(charges) == (0 if name == "local" else 2)
        assert Ledger(worker.home).compute_spent(1e-5) <= 8 * (1 + 1e-9)


async def test_what_the_method_did_not_say_is_refused_when_it_asks(tmp_path: Path) -> None:
    fleet, *_ = digits(tmp_path)
    with pytest.raises(ConfigError, match="mean of step mean_features"):
        await AccountedFleet(fleet, PRIVACY).run("features", {"d00": MeanFeatures(model=REF)})
    exact = SharePrivate(kept_by="train_ditto")
    with pytest.raises(ConfigError, match="module of step share_private"):
        add_noise(exact, PRIVACY)
    noisy = add_noise(SharePrivate(kept_by="train"), PRIVACY)
    assert (noisy, noisy.find_unaccounted()) == (SharePrivate(kept_by="train_dp"), {})


def test_a_device_that_would_answer_without_noise_is_not_asked() -> None:
    noisy = add_noise(Profile(extractor=REF), PRIVACY)
    old, new = (Device(id="d", n_samples=9, steps={"profile": 1, "recipe": known}) for known in (1, 2))
    assert new.prepare_action(noisy) == noisy == Profile(extractor=REF, privacy=PRIVACY)
    assert isinstance(refusal := old.prepare_action(noisy), Unsupported)
    assert "does not know noise" in refusal.reason


def test_an_order_to_train_becomes_one_with_noise_that_says_the_same() -> None:
    order = Train(starts=(Start(model=REF),), sgd=Sgd(steps=7, proximal_mu=0.1), head_steps=2)
    found = add_noise(order, PRIVACY)
    assert isinstance(found, TrainDp)
    assert (found.privacy, found.measure) == (PRIVACY, False)
    same = [name for name in Train.__struct_fields__ if name != "measure"]
    assert [getattr(found, name) for name in same] == [getattr(order, name) for name in same]


@pytest.mark.parametrize("selection", ["ccmab", "fastest"])
def test_selections_that_learn_from_devices_are_refused(selection: str) -> None:
    with pytest.raises(ConfigError, match=f"selection={selection} and dp do not combine: it needs"):
        make_method("fedavg", settings(options={"selection": selection}))


def test_a_network_with_running_statistics_is_refused_before_the_run() -> None:
    layout = Layout(tensors=(*LAYOUT.tensors, TensorInfo(name="bn.running_var", shape=(2,), kind="buffer")))
    with pytest.raises(ConfigError, match=r"bn\.running_var"):
        make_method("fedavg", settings()).make_first_state(layout, REF)
    assert make_method("fedavg", settings(protection=Protection())).make_first_state(layout, REF).model == REF


def test_settings_that_contradict_or_change_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        Protection(dp_epsilon=1.0, dp_noise=1.0)
    for alone in ({"dp_delta": 1e-6}, {"dp_clip": 2.0}):
        with pytest.raises(ConfigError, match="change nothing"):
            Protection(**alone)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--dp-delta 0\.5 promises nothing: .* 1 / samples of a device, as 1e-5 is"):
        Protection(dp_epsilon=1.0, dp_delta=0.5)
    assert Protection().make_privacy(5) is None
    assert Protection(dp_noise=2.0, dp_clip=3.0).make_privacy(0) == Privacy(
        clip_norm=3.0, delta=1e-5, participations=1, noise_multiplier=2.0
    )
    assert "dp" in DP.guards


async def test_what_else_it_is_asked_is_the_fleets(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    own = AccountedFleet(fleet, PRIVACY)
    assert (own.task, own.get_devices(), own.get_inference_devices(), own.get_busy_devices()) == (
        fleet.task,
        fleet.get_devices(),
        fleet.get_inference_devices(),
        fleet.get_busy_devices(),
    )
    np.testing.assert_array_equal(own.get(first, layout).params, fleet.get(first, layout).params)
    assert own.get_norms(first, layout) == fleet.get_norms(first, layout)
    ref = own.put({"a": np.zeros(2, np.float32)})
    assert list(own.get_tensors(ref)) == ["a"]
    assert own.put_bytes(b"x") == fleet.put_bytes(b"x")
    order = Train(starts=(Start(model=first),), sgd=Sgd(steps=1))
    fleet.round = 1
    answers = [answer async for answer in own.stream("train", {"d00": order})]
    assert [answer.result.loss_before for answer in answers] == [None]  # type: ignore[union-attr]


def test_an_epsilon_is_divided_among_campaigns() -> None:
    protection = Protection(dp_epsilon=8.0, dp_campaigns=3)
    privacy = protection.make_privacy(rounds=10)
    assert privacy is not None
    assert (privacy.epsilon, privacy.participations) == (8.0, 30)
    assert protection.describe_promise().startswith("epsilon at most 8 in 3 campaigns together, delta")
    with pytest.raises(ConfigError, match="--dp-campaigns changes nothing"):
        Protection(dp_campaigns=2)
