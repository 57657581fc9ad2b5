"""States as bytes, the names of methods, the round's random numbers."""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from coordinator.methods.moving import Moving
from edge_agent.cold_start import InferenceWorker
from numpy.typing import NDArray

import deploy
from coordinator.fleet import Answer
from coordinator.fleet.simulated import run
from coordinator.methods import (
    ATTEMPTS,
    METHODS,
    MethodSettings,
    dump,
    equip,
    insist,
    load,
    make,
    mean_loss,
    options_of,
    round_rng,
)
from coordinator.methods.fedge import FedgeState, LastUpdate, TrialOutcome
from coordinator.options import check, method_and_options
from coordinator.selection import ccmab
from fedge.errors import ConfigError
from fedge.loading import load_object
from fedge.messages import BlobRef, blobs_of
from fedge.sgd import Sgd
from fedge.step import Action, Declined
from fedge.steps.describe_labels import DescribeLabels
from fedge.steps.install_bundle import InstallBundle
from fedge.steps.train import Trained
from fedge.tensors import Layout, TensorInfo
from tests.support.simulation import Fleet, digits

LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))


def ref(letter: str) -> BlobRef:
    return BlobRef(digest=letter * 64, size_bytes=8)


def state() -> FedgeState:
    trial = TrialOutcome(
        ids=("a", "b"),
        clusters=(("a",), ("b",)),
        tau=0.5,
        separability=0.9,
        statistic=None,
        deltas={"a": 0.25},
        split=True,
        places=((0.5, 0.0), (-0.5, 0.0)),
    )
    return FedgeState(
        round=3,
        layout=LAYOUT,
        initial_model=ref("0"),
        shared=Moving(model=ref("1"), velocity=ref("2")),
        last={"a": LastUpdate(update=ref("3"), n_samples=4)},
        groups=(("a", "b"),),
        bandits=(ccmab.State(),),
        trial=trial,
        experts=(Moving(model=ref("4")), Moving(model=ref("5"))),
    )


def test_a_state_survives_the_way_to_bytes_and_back() -> None:
    before = state()
    after = load(dump(before), FedgeState)
    assert after.shared == before.shared
    assert after.last == before.last
    assert after.bandits == before.bandits
    assert after.bandits[0].lowest == (math.inf,) * 5
    assert after.trial is not None
    assert before.trial is not None
    assert after.trial == before.trial
    assert dump(after) == dump(before)


class TrialWithSimilarities(TrialOutcome, frozen=True, kw_only=True):
    similarity: NDArray[np.float64]


def test_a_state_that_still_holds_all_similarities_is_read_without_them() -> None:
    now = state()
    assert now.trial is not None
    trial = TrialWithSimilarities(similarity=np.eye(2), **msgspec.structs.asdict(now.trial))
    assert load(dump(msgspec.structs.replace(now, trial=trial)), FedgeState) == now


def test_every_stored_tensor_of_a_state_is_found() -> None:
    assert {ref.digest[0] for ref in blobs_of(state())} == set("012345")


def test_the_mean_loss_of_a_round_is_weighted_by_samples_and_needs_all_of_them() -> None:
    few, many = (Trained(update=ref("0"), n_samples=n, loss_before=loss) for n, loss in ((5, 1.0), (15, 2.0)))
    assert mean_loss([few, many]) == (5 * 1.0 + 15 * 2.0) / 20
    assert mean_loss([few, msgspec.structs.replace(many, loss_before=None)]) is None
    assert mean_loss([]) is None


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fedavg, fedavgm, "):
        make("fedavgg", MethodSettings())


def test_random_numbers_depend_on_seed_and_round_alone() -> None:
    settings = MethodSettings(seed=4)
    assert round_rng(settings, 2).integers(1 << 40) == round_rng(settings, 2).integers(1 << 40)
    assert round_rng(settings, 2).integers(1 << 40) != round_rng(settings, 3).integers(1 << 40)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_options_are_finite_for_no_message_holds_another_number(value: float) -> None:
    with pytest.raises(ConfigError):
        make("fedprox", MethodSettings(options={"proximal_mu": value}))


EXCHANGES = [
    *(f"cfic:clustering={how}" for how in ("aidc", "k-means", "agglomerative")),
    *(f"cfic:selection={how}" for how in ("uniform", "fastest", "ccmab")),
    "cfic:registration=lazy:clustering=aidc:selection=ccmab",
    *(f"fedge:rounds=8:clustering={how}:split=always" for how in ("k-means", "agglomerative", "aidc")),
    "fedge:gamma=0:rho=0.2:split=always:prior=none:local=always:energy=false:shrinkage=0.001",
    "fedge:prior=fixed:local=never:final_fit=false:guard=false",
    "fedge:split=statistic:prior=shared:temperature=false:weights=uniform:gate=untrained",
    *(f"fedge:split=always:candidates={which}" for which in ("private+expert", "private", "global", "expert")),
    "fedge:private_steps=2:private_start=initial:rho=0.6",
    *(f"fedge:rounds=8:selection={how}" for how in ("uniform", "fastest", "stratified")),
    *(f"scmoe-pfl:clustering={how}" for how in ("k-means", "agglomerative")),
    *(f"scmoe-pfl:{o}" for o in ("alone=average", "alone=best", "gate=uniform", "energy=false", "top=1")),
    "scmoe-pfl:energy_offset=always",
    "scmoe-pfl:preset=paper:clustering=k-means:alone=best",
    *(
        f"scmoe-pfl:{o}"
        for o in ("space=logit", "temperature=2", "n_components=2", "component_energy=0.9", "theta=0.5")
    ),
    "scmoe-pfl:centred=true",
    "scmoe-pfl:n_clusters=1:energy=false",
    "pm-moe:base=fedrep:head_steps=2:gate_epochs=2",
    "pm-moe:base=dbe:kappa=50:gate_epochs=2",
    "pm-moe:denoise=0:gate_epochs=2",
]


@pytest.mark.parametrize("text", EXCHANGES)
async def test_parts_are_exchanged_by_configuration_and_it_runs_to_its_end(text, tmp_path) -> None:
    """The papers' ablations and exchanges, as they are written on the command line."""
    fleet, layout, first, _ = digits(tmp_path, n=5, limit=300)
    name, options = method_and_options(text)
    rounds = options.pop("rounds", 3)
    settings = MethodSettings(rounds=rounds, participation=0.6, sgd=Sgd(steps=3), options=options)
    method = make(name, settings)
    state = await run(method, method.initial(layout, first), fleet)
    assert set(state.installed) == set(fleet.workers)
    assert load(dump(state), type(state)).installed == state.installed


class Watch(Fleet):
    """A fleet that notes every action."""

    async def run(self, step: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.given = [*getattr(self, "given", []), *actions.items()]
        return await super().run(step, actions)


def with_two_that_do_not_train(home: Path) -> tuple[Watch, Layout, BlobRef]:
    """Three devices of digits and the devices x and y, which only predict."""
    small, layout, first, _ = digits(home, n=3, limit=200)
    x = small.workers["d00"].data.x_val
    others = {i: InferenceWorker(i, small.task, x, home / i) for i in ("x", "y")}
    fleet = Watch(small.task, layout, dict(small.workers) | others, seed=0)
    fleet._blobs = small._blobs
    return fleet, layout, first


@pytest.mark.parametrize("name", ["fedavg", "fedge", "ditto"])
async def test_devices_that_do_not_train_end_with_the_global_model(tmp_path: Path, name: str) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    method = make(name, MethodSettings(rounds=2, sgd=Sgd(steps=3)))
    state = await run(method, method.initial(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02", "x", "y"}
    assert set(state.participations) == {"d00", "d01", "d02"}
    assert {type(action) for i, action in fleet.given if i in "xy"} == {InstallBundle}
    assert state.installed["x"] == state.installed["y"]
    device = fleet.workers["d00"]
    x = device.data.x_val
    logits = device.logits(fleet.get(method.serves(state, "x"), layout), x)
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    how = device.task.preprocessing
    bundle = deploy.load(tmp_path / "y" / "bundles" / "1")
    assert bundle.digest == state.installed["y"].bundle_digest
    assert bundle.manifest.method == name
    np.testing.assert_allclose(bundle.predict((x * how.std + how.mean) * how.scale).probabilities, expected, atol=1e-4)


async def test_where_no_whole_model_travels_they_are_not_asked(tmp_path: Path) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    method = make("fedper", MethodSettings(rounds=1, sgd=Sgd(steps=1)))
    state = await run(method, method.initial(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02"}
    assert not {i for i, _ in fleet.given} & {"x", "y"}


async def test_a_network_that_cannot_be_a_bundle_leaves_them_without_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    fleet.task = msgspec.structs.replace(fleet.task, model="no_such_package:net")
    method = make("fedavg", MethodSettings(rounds=0))
    before = method.initial(layout, first)
    after = await equip(method, before, fleet, dict.fromkeys(("x", "y"), first))
    assert after == before
    assert caplog.text.count("event=no_bundle") == 1
    assert "no_such_package" in caplog.text


ANOTHER = {
    "alpha": 0.3, "beta": 0.3, "norm": "tensor", "scale": "relative", "psi": "abs", "epsilon": 1.0,
    "registration": "lazy", "clustering": "k-means", "n_clusters": 3, "search": "batch", "budget": 2.0,
    "extractor": "proxy", "sigma_dp": 0.1, "unit": 1.0, "gamma": 2.0, "eta": 3.0, "theta_merge": 0.1,
    "theta_split": 0.3, "final_fit": False, "guard": False, "local_pilot": True, "shrinkage": 5.0,
    "prior": "fixed", "local": "always", "energy": False, "refresh_epochs": 7, "refresh_every": 3,
    "suitability_temperature": 2.0, "n_top": 4, "ranking": "raw", "delta": 0.1, "top": 3, "tau": 0.1,
    "distinct": False, "centres_join": False, "update": "batch", "theta": 0.5, "gate": "training",
    "energy_offset": "always", "temperature": 2.0, "space": "logit", "private_data": "sensitive",
    "private_start": "initial", "private_steps": 3, "gate_batch_size": 8, "gate_learning_rate": 0.2,
    "dropout": 0.5, "feature_momentum": 0.5, "candidates": "private", "weights": "uniform",
    "fedge temperature": False, "fedge gate": "untrained",
}  # fmt: skip
"""Of each option that is idle somewhere, if need be of one method, a value that is not the default."""
NEEDED = {"n_clusters": {"clustering": "k-means"}, "refresh_epochs": {"refresh_every": 2}}
"""What some of them need to have an effect."""
IDLE = [
    (method, name, {other: value})
    for method in METHODS
    for names, where, _ in getattr(load_object(METHODS[method]).Options, "IDLE", ())
    if len(where) == 1
    for name in names
    for other, values in where.items()
    for value in values
] + [
    ("cfic", "registration", {"selection": "uniform", "correction": False}),
    ("cfic", "clustering", {"selection": "uniform", "correction": False}),
    ("fedcoe", "top", {"gate": "uniform", "assemble": "parameters"}),
]


def chosen(method, options):
    return options_of(MethodSettings(options=options), load_object(METHODS[method]).Options)


@pytest.mark.parametrize(("method", "name", "others"), IDLE, ids=str)
def test_an_option_that_would_change_nothing_is_refused_with_the_reason(method, name, others) -> None:
    """Only then, and only where it was set to something else than the default."""
    defaults = load_object(METHODS[method]).Options()
    another = ANOTHER.get(f"{method} {name}", ANOTHER.get(name))
    with pytest.raises(ConfigError, match=f"{name} changes nothing with .*: .*; leave one"):
        chosen(method, others | {name: another})
    chosen(method, others)
    assert getattr(chosen(method, NEEDED.get(name, {}) | {name: another}), name) == another
    if (default := getattr(defaults, name)) is not None:
        assert getattr(chosen(method, others | {name: default}), name) == default


def test_an_option_is_not_refused_while_one_of_two_others_needs_it() -> None:
    for needs in ({"selection": "uniform"}, {"correction": False}):
        assert chosen("cfic", needs | {"clustering": "mctc", "n_clusters": 2}).n_clusters == 2


def test_what_a_preset_says_is_not_refused_and_what_it_makes_idle_is() -> None:
    check("fedcoe", {"preset": "printed", "gate": "uniform"})  # of the preset are a temperature and refreshes
    check("fedcoe", {"preset": "printed", "refresh_epochs": 7})  # which only the preset gives a use
    with pytest.raises(ConfigError, match="refresh_epochs changes nothing with refresh_every=0"):
        check("fedcoe", {"refresh_epochs": 7})
    check("scmoe-pfl", {"preset": "paper", "clustering": "labels"})
    assert chosen("scmoe-pfl", {"preset": "paper", "tau": 0.3}).tau == 0.3
    with pytest.raises(ConfigError, match="delta changes nothing with profile_prior=false"):
        check("fedcoe", {"preset": "printed", "delta": 0.1})


class Deaf:
    """Devices that answer when they are asked for the n-th time. `asked`: step and devices, in order."""

    def __init__(self, **hears: int) -> None:
        self._hears = dict(hears)
        self.asked: list[tuple[str, list[str]]] = []

    async def run(self, step: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.asked.append((step, list(actions)))
        self._hears = {i: n - (i in actions) for i, n in self._hears.items()}
        return {i: Answer(i, Declined(reason=step) if self._hears[i] <= 0 else None) for i in actions}


async def test_who_does_not_answer_the_last_step_is_asked_again_a_few_times() -> None:
    fleet = Deaf(a=1, b=2, never=99)
    answers = await insist(fleet, "install", dict.fromkeys(("a", "b", "never"), DescribeLabels()))  # type: ignore[arg-type]
    assert [(i, a.result and a.result.reason) for i, a in answers.items()] == [  # type: ignore[union-attr]
        ("a", "install"), ("b", "install-2"), ("never", None),
    ]  # fmt: skip
    assert fleet.asked == [
        ("install", ["a", "b", "never"]), ("install-2", ["b", "never"]), ("install-3", ["never"]),
    ]  # fmt: skip
    assert len(fleet.asked) == ATTEMPTS
