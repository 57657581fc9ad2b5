"""States as bytes, methods and their options by name, the round's random numbers."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import deploy
from coordinator.fleet.fleet import Answer
from coordinator.methods.method import (
    ATTEMPTS,
    MethodSettings,
    dump,
    equip,
    insist,
    installed_methods,
    load,
    make,
    mean_loss,
    method_class,
    round_rng,
)
from coordinator.methods.options import check, method_and_options
from coordinator.methods.papers.fedge import FedgeState, LastUpdate, TrialOutcome
from coordinator.methods.parts.server_optimizer import ServerModel
from coordinator.selection import ccmab
from coordinator.simulation.rounds import run
from edge_agent.device.worker import Worker
from fedge.errors import ConfigError
from fedge.steps.contract import Action, Declined
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.tasks import DeviceData
from fedge.tensors.layout import Layout, TensorInfo
from fedge.wire.messages import BlobRef, blobs_of
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
        shared=ServerModel(model=ref("1"), velocity=ref("2")),
        last={"a": LastUpdate(update=ref("3"), n_samples=4)},
        groups=(("a", "b"),),
        bandits=(ccmab.State(),),
        trial=trial,
        experts=(ServerModel(model=ref("4")), ServerModel(model=ref("5"))),
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
        make("nothing", MethodSettings())


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
    *(f"fedge:rounds=8:clustering={how}:split=always" for how in ("k-means", "agglomerative", "aidc")),
    "fedge:gamma=0:rho=0.2:split=always",
    "fedge:rho=0.6:local_pilot=true",
    *(f"fedge:rounds=8:selection={how}" for how in ("uniform", "fastest", "stratified")),
    *(f"scmoe-pfl:clustering={how}" for how in ("k-means", "agglomerative")),
    "scmoe-pfl:top=1:private_steps=3",
    "scmoe-pfl:preset=paper:clustering=k-means",
    "scmoe-pfl:n_clusters=1:freeze_after=0:private_data=sensitive",
    "pm-moe:base=fedrep:selection=fastest",
    "pm-moe:denoise=0",
]


@pytest.mark.parametrize("text", EXCHANGES)
async def test_parts_are_exchanged_by_configuration_and_it_runs_to_its_end(text, tmp_path) -> None:
    """The papers' ablations and exchanges, as they are written on the command line."""
    fleet, layout, first, _ = digits(tmp_path, n=5, limit=300)
    name, options = method_and_options(text)
    rounds = options.pop("rounds", 3)
    settings = MethodSettings(rounds=rounds, participation=0.6, sgd=Sgd(steps=3), options=options)
    method = make(name, settings)
    state = await run(method, method.init(layout, first), fleet)
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
    data = DeviceData.unlabelled(x)
    others = {i: Worker(i, small.task, data, home / i, trains=False) for i in ("x", "y")}
    fleet = Watch(small.task, layout, dict(small.workers) | others, seed=0)
    fleet._blobs = small._blobs
    return fleet, layout, first


@pytest.mark.parametrize("name", ["fedavg", "fedge", "ditto"])
async def test_devices_that_do_not_train_end_with_the_global_model(tmp_path: Path, name: str) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    method = make(name, MethodSettings(rounds=2, sgd=Sgd(steps=3)))
    state = await run(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02", "x", "y"}
    assert set(state.participations) == {"d00", "d01", "d02"}
    assert {type(action) for i, action in fleet.given if i in "xy"} == {InstallBundle}
    assert state.installed["x"] == state.installed["y"]
    device = fleet.workers["d00"]
    x = device.data.x_val
    logits = device.network.logits(fleet.get(method.serves(state, "x"), layout), x)
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    how = device.task.preprocessing
    bundle = deploy.load(tmp_path / "y" / "bundles" / "1")
    assert bundle.manifest.release == state.installed["y"].release
    assert bundle.manifest.method == name
    np.testing.assert_allclose(bundle.predict((x * how.std + how.mean) * how.scale).probabilities, expected, atol=1e-4)


async def test_where_no_whole_model_travels_they_are_not_asked(tmp_path: Path) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    method = make("fedper", MethodSettings(rounds=1, sgd=Sgd(steps=1)))
    state = await run(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02"}
    assert not {i for i, _ in fleet.given} & {"x", "y"}


async def test_a_network_that_cannot_be_a_bundle_leaves_them_without_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, layout, first = with_two_that_do_not_train(tmp_path)
    fleet.task = msgspec.structs.replace(fleet.task, model="no_such_package:net")
    method = make("fedavg", MethodSettings(rounds=0))
    before = method.init(layout, first)
    after = await equip(method, before, fleet, dict.fromkeys(("x", "y"), first))
    assert after == before
    assert caplog.text.count("event=no_bundle") == 1
    assert "no_such_package" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cfic:correction=false:beta=0.5", "alpha and beta change nothing"),
        ("cfic:clustering=aidc:epsilon=1", "epsilon hides label features"),
        ("fedepc:clustering=labels:sigma_dp=0.1", "sigma_dp hides profiles"),
        ("fedepc:sigma_dp=0.1", "set extractor=server"),
        ("fedepc:n_clusters=3", "n_clusters changes nothing with clustering=aidc"),
        ("fedge:mode=shift:local_pilot=true", "local_pilot changes nothing"),
        ("pm-moe:noise=1", "give clip, too"),
        ("scmoe-pfl:clustering=labels:n_clusters=3", "n_clusters changes nothing"),
    ],
)
def test_what_was_asked_for_and_would_not_happen_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*method_and_options(text))


@pytest.mark.parametrize("name", installed_methods())
def test_an_option_that_there_is_not_says_why_or_what_replaces_it(name: str) -> None:
    kind = method_class(name)
    known = {field.name for field in msgspec.structs.fields(kind.Options)}
    for option, why in kind.REFUSED.items():
        own, _, word = option.partition("=")
        assert (own in known) == (bool(word) and own != "selection"), option
        with pytest.raises(ConfigError, match=re.escape(why)):
            check(name, {own: word or 1})


def test_the_selection_is_every_methods_and_the_first_is_the_default() -> None:
    assert {name for name in installed_methods() if not method_class(name).SELECTIONS} == {"fedbuff", "local"}
    assert make("fedavg", MethodSettings()).selection == "uniform"
    assert make("cfic", MethodSettings()).selection == "stratified"
    assert make("fedge", MethodSettings(options={"selection": "fastest"})).selection == "fastest"
    for given in ("fastes", 1):
        with pytest.raises(ConfigError, match="selection cannot be"):
            make("fedge", MethodSettings(options={"selection": given}))


def test_options_are_few() -> None:
    """Issue 10: what someone would set for a real fleet, and what a paper's headline comparison needs."""
    own = {name: len(msgspec.structs.fields(method_class(name).Options)) for name in installed_methods()}
    assert sum(own.values()) <= 45, own


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


def test_a_method_says_at_least_what_a_round_is() -> None:
    with pytest.raises(ConfigError, match="lacks round"):
        method_class("coordinator.methods:Method")
