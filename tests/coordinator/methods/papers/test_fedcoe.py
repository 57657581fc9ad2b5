"""FedCoE (docs/methods/fedcoe.md): rounds, the two presets, cold start, and what it does when things are missing."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import deploy
from coordinator.aggregation import correlation
from coordinator.aggregation.protection import Protection
from coordinator.fleet.fleet import Answer
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Samples, Server
from coordinator.methods.papers import fedcoe_newcomers as newcomers
from coordinator.methods.papers.fedcoe import PRESETS, FedCoE, FedCoEState, Preset
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.evaluation import predict_mixture
from coordinator.simulation.rounds import run_rounds
from coordinator.store.records import Device
from edge_agent.device.worker import Worker
from fedge.data import preprocessing
from fedge.errors import ConfigError
from fedge.steps.contract import Declined, Failed
from fedge.steps.descriptions.route import Routed
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tasks import DeviceData, load_pool, load_task
from fedge.tensors.layout import Codec, Layout, Model, Tensors
from fedge.wire.messages import BlobRef, Why
from tests.support.simulation import Fleet, digits

TASK = load_task("digits")


def held_out() -> Samples:
    """Samples that no device has: the devices of `digits(limit=1200)` draw from the first 1200 of the shuffled set."""
    samples = load_pool("digits", seed=0)
    used = load_pool("digits", seed=0, limit=1200).x.reshape(1200, -1)
    known = {row.tobytes() for row in used}
    free = [k for k, row in enumerate(samples.x.reshape(len(samples.x), -1)) if row.tobytes() not in known]
    return preprocessing.preprocess(TASK, samples.x[free]), samples.y[free]


X, Y = held_out()
SERVER_DATA = (X[:200], Y[:200])
TEST = (X[200:], Y[200:])


class Quick(FedCoE):
    """With a shorter pretraining."""

    PRETRAINING_EPOCHS = 8


def method_of(
    rounds: int = 2, *, kind: type[FedCoE] = Quick, seed: int = 0, weight_decay: float = 0.0, **options: Any
) -> FedCoE:
    """FedCoE with some options, and with some parameters of the preset that are none."""
    changes = {name: options.pop(name) for name in Preset.__struct_fields__ if name != "tau" and name in options}
    sgd = Sgd(steps=10, learning_rate=0.1, weight_decay=weight_decay)
    settings = MethodSettings(rounds=rounds, sgd=sgd, codec=Codec.FLOAT32, down="float32", seed=seed, options=options)

    class Changed(
        kind
    ):  # a round that runs again does so by another object of this class (`coordinator.service.proof`)
        def set_up(self) -> None:
            super().set_up()
            self.preset = msgspec.structs.replace(self.preset, **changes)

    return Changed(settings, Server(TASK, SERVER_DATA))


def federation(home: Path, *, n: int = 6, alpha: float = 0.3) -> tuple[Fleet, Layout, BlobRef]:
    fleet, layout, first, _ = digits(home, n=n, how="dirichlet", alpha=alpha, limit=1200)
    return fleet, layout, first


class Hiding(Fleet):
    """Devices that are `late` show themselves in the last round alone."""

    late: frozenset[str] = frozenset()
    last = 3

    def get_devices(self) -> tuple[Device, ...]:
        return tuple(d for d in super().get_devices() if self.round == self.last or d.id not in self.late)


def predict(method: FedCoE, state: FedCoEState, fleet: Fleet, x: np.ndarray) -> np.ndarray:
    """Class probabilities of the global model, (n, C)."""
    return predict_mixture(TASK, state.layout, newcomers.make_global_mixture(method, state, fleet), x)[0]


def params(fleet: Fleet, ref: BlobRef, layout: Layout) -> np.ndarray:
    return fleet.get(ref, layout).params.astype(np.float64)


# --------------------------------------------------------------------------------------------------------- one round


@pytest.mark.parametrize("ranking", ["affinity", "raw"])
async def test_a_round_is_that_of_section_5(tmp_path: Path, ranking: str) -> None:
    """Against the equations written down once more, sample by sample."""
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of(ranking=ranking, n_experts=3, tau=0.7)
    fleet.round = 1
    after = await method.advance(method.init(layout, first), fleet)

    before = await method._pretrain(method.init(layout, first), fleet)
    old = [params(fleet, ref, layout) for ref in before.experts]
    common = params(fleet, before.common, layout)
    np.testing.assert_allclose(common, np.mean(old, axis=0), atol=1e-6)
    order = Train(starts=(Start(model=before.common),), sgd=method.sgd, codec=Codec.FLOAT32)
    updates = select_updates(await fleet.run("train", {device.id: order for device in fleet.get_devices()}))
    theta = np.stack([common + params(fleet, u.update, layout) for u in updates.values()])
    gate = fleet.get_tensors(before.gate)
    m = np.zeros((3, 4))
    empty = np.zeros(0, np.float32), np.zeros(0, np.int64)
    scores = [method.server_data.compute_probabilities(Model(row.astype(np.float32), *empty)) for row in theta]
    for k, (y, p) in enumerate(zip(SERVER_DATA[1], method.server_data.compute_routing(gate), strict=True)):
        for i in range(4):
            m[:, i] += p * scores[i][k, y]
    m_e, m_c = m / m.sum(axis=1, keepdims=True), m / m.sum(axis=0, keepdims=True)
    experts = []
    for j in range(3):
        rank = (m_c if ranking == "affinity" else m_e)[j]
        chosen = sorted(range(4), key=lambda i: -rank[i])[:2]
        w = np.array([m_e[j, i] for i in chosen])
        experts.append(0.3 * old[j] + 0.7 * (w / w.sum()) @ theta[chosen])
    for j in range(3):
        np.testing.assert_allclose(params(fleet, after.experts[j], layout), experts[j], atol=1e-5)
    for i, device in enumerate(updates):
        expected = 0.3 * theta[i] + 0.7 * m_c[:, i] @ np.stack(experts)
        np.testing.assert_allclose(params(fleet, after.clients[device], layout), expected, atol=1e-5)
    assert after.gate == before.gate
    assert after.participations == dict.fromkeys(updates, 1)


async def test_repaired_keeps_experts_apart_and_printed_makes_them_one(tmp_path: Path) -> None:
    """Section 12's acceptance test, smaller: overlap and spread of the two presets."""
    found: dict[str, FedCoEState] = {}
    accuracy = {}
    for preset in ("repaired", "printed"):
        fleet, layout, first = federation(tmp_path / preset, n=6, alpha=0.1)
        method = method_of(rounds=8, kind=FedCoE, preset=preset)
        found[preset] = await run_rounds(method, method.init(layout, first), fleet)
        accuracy[preset] = (predict(method, found[preset], fleet, TEST[0]).argmax(axis=1) == TEST[1]).mean()
    repaired, printed = (found[preset].diagnostics[-1] for preset in ("repaired", "printed"))
    assert repaired.overlap < 0.7
    assert repaired.spread > 0.01
    assert printed.overlap > repaired.overlap
    assert printed.spread < repaired.spread
    assert repaired.gate_maximum > 0.9
    assert printed.gate_maximum < 0.41  # T_s = 1 and K = 5: 0.4046 at most, section 3
    assert accuracy["repaired"] > 0.8


async def test_a_uniform_gate_makes_equal_experts_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Section 13: with tau_E = 1 and raw ranking; section 11: the collapse is logged."""
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of(tau=1.0, ranking="raw", suitability_temperature=1e6, n_experts=3)
    with caplog.at_level(logging.WARNING):
        state = await run_rounds(method, method.init(layout, first), fleet)
    experts = [params(fleet, ref, layout) for ref in state.experts]
    assert state.diagnostics[-1].overlap == 1
    assert state.diagnostics[-1].spread < 1e-3
    assert state.diagnostics[-1].collapsed
    np.testing.assert_allclose(experts[1], experts[0], atol=1e-3)
    assert "event=collapse" in caplog.text


async def test_a_round_in_which_all_is_well_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The figures are in the summary; lines of every round would stand between those of `fedge compare`."""
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of(rounds=1)
    with caplog.at_level(logging.INFO, logger="fedge.method"):
        state = await run_rounds(method, method.init(layout, first), fleet)
    assert not state.diagnostics[-1].collapsed
    assert "event=experts" not in caplog.text


async def test_tau_zero_changes_nothing(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=3)
    method = method_of(tau=0.0)
    fleet.round = 1
    before = await method._pretrain(method.init(layout, first), fleet)
    after = await method.advance(before, fleet)
    assert after.experts == before.experts
    updates = select_updates(
        await fleet.run("train", {d.id: method._make_order(before, d.id) for d in fleet.get_devices()})
    )
    for i, update in updates.items():
        own = fleet.get(before.common, layout).params + fleet.get(update.update, layout).params
        np.testing.assert_array_equal(fleet.get(after.clients[i], layout).params, own)


class NoGate(Quick):
    """W_g = 0 in Eq. 3."""

    TOP = 4

    def train_gate(self, experts: list[Model], start: Tensors | None, *, epochs: int, seed: int) -> Tensors:
        gate = super().train_gate(experts, start, epochs=epochs, seed=seed)
        return {name: np.zeros_like(value) for name, value in gate.items()}


async def test_without_a_gate_all_experts_count_alike(tmp_path: Path) -> None:
    """Section 12, "no gate (uniform p)": p = 1 / K on the server and for new devices, and the plain mean of outputs."""
    fleet, layout, first = federation(tmp_path, n=4)
    hiding = Hiding(TASK, layout, fleet.workers, seed=0)
    hiding._blobs = fleet._blobs
    hiding.late = frozenset({"d03"})
    method = method_of(kind=NoGate, n_experts=4, refresh_every=1)  # preset "printed" has refreshes
    state = await run_rounds(method, method.init(layout, first), hiding)
    assert state.diagnostics[-1].gate_maximum == pytest.approx(0.25)
    np.testing.assert_allclose(state.profiles["d03"], 0.25, atol=1e-6)
    experts = [method.server_data.compute_probabilities(hiding.get(ref, layout), TEST[0]) for ref in state.experts]
    np.testing.assert_allclose(predict(method, state, hiding, TEST[0]), np.mean(experts, axis=0), atol=1e-7)


async def test_clients_and_experts_learn_with_weight_decay(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=3)
    assert method_of().sgd.weight_decay == 5e-4  # section 5
    norms = []
    for decay in (0.0, 0.2):
        method = method_of(weight_decay=decay)
        fleet.round = 1
        before = await method._pretrain(method.init(layout, first), fleet)
        after = await method.advance(before, fleet)
        norms.append([np.linalg.norm(params(fleet, ref, layout)) for ref in (before.experts[0], after.clients["d00"])])
    assert norms[1][0] < norms[0][0]
    assert norms[1][1] < norms[0][1]


async def test_one_expert_takes_all_clients_and_its_gate_is_constant(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of(rounds=1, n_experts=1)
    fleet.round = 1
    state = await method.advance(method.init(layout, first), fleet)
    assert not state.diagnostics[0].collapsed
    assert state.diagnostics[0].gate_maximum == 1
    own = np.stack([params(fleet, state.clients[d.id], layout) for d in fleet.get_devices()])
    assert np.linalg.norm(own - params(fleet, state.experts[0], layout), axis=1).max() < 1.0


async def test_the_gate_is_trained_again_when_it_is_time(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=3)
    method = method_of(rounds=4, refresh_every=2)
    state, gates = method.init(layout, first), []
    for number in range(1, 5):
        fleet.round = number
        state = await method.advance(state, fleet)
        gates.append(state.gate)
    assert gates[0] != gates[1] == gates[2] != gates[3]


# -------------------------------------------------------------------------------------------------------- the bundles


async def test_every_device_ends_with_its_own_model_as_a_bundle(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of()
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == set(state.clients) == {f"d{k:02d}" for k in range(4)}
    raw = load_pool("digits", seed=0).x[:20]
    x = preprocessing.preprocess(TASK, raw)
    for i, ref in state.clients.items():
        expected = method.server_data.compute_probabilities(fleet.get(ref, layout), x)
        runtime = deploy.load(tmp_path / i / "bundles" / "1")
        np.testing.assert_allclose(runtime.predict(raw).probabilities, expected, atol=1e-4)
        assert method.get_model(state, i) == ref
    assert len({ref.digest for ref in state.clients.values()}) == 4
    assert decode_state(encode_state(state), FedCoEState) == state
    summary = method.summarise(state)
    assert (summary["method"], summary["done"], len(summary["diagnostics"])) == ("fedcoe", True, 2)
    assert (summary["split"], summary["experts"], summary["top"]) == (False, 5, 2)


async def test_equal_seeds_give_equal_states(tmp_path: Path) -> None:
    states = []
    for turn in range(2):
        fleet, layout, first = federation(tmp_path / str(turn), n=4)
        method = method_of(seed=5, refresh_every=1)
        states.append(await run_rounds(method, method.init(layout, first), fleet))
    assert encode_state(states[0]) == encode_state(states[1])


@pytest.mark.parametrize("assemble", ["parameters", "functions"])
@pytest.mark.parametrize("prior", [True, False])
async def test_late_and_inference_only_devices_start_cold(tmp_path: Path, assemble: str, prior: bool) -> None:
    fleet, layout, first = federation(tmp_path, n=5)
    own = fleet.workers["d04"].data.x_train[:40]
    workers = dict(fleet.workers) | {"e": Worker("e", TASK, DeviceData.from_inputs(own), tmp_path / "e", trains=False)}
    hiding = Hiding(TASK, layout, workers, seed=0)
    hiding._blobs = fleet._blobs
    hiding.late = frozenset({"d03"})
    method = method_of(assemble=assemble, profile_prior=prior)
    state = await run_rounds(method, method.init(layout, first), hiding)
    assert set(state.installed) == {*workers}
    assert set(state.profiles) == {"d03", "e"}
    asked = [(step, i) for number, step, i in hiding.asked if number == 3]
    assert [i for step, i in asked if step == "route"] == ["d03", "e"] == [i for step, i in asked if step == "assemble"]
    assert [i for step, i in asked if step == "install"] == ["d00", "d01", "d02", "d04"]

    rho = np.array(state.profiles["e"])
    gate = hiding.get_tensors(state.gate)
    np.testing.assert_allclose(rho, method.server_data.compute_routing(gate, own).mean(axis=0), atol=1e-5)
    experts = [hiding.get(ref, layout) for ref in state.experts]
    x = TEST[0]
    if assemble == "parameters":
        expected = method.server_data.compute_probabilities(method.assemble(experts, rho), x)
        t = correlation.compute_profile_prior(
            rho, method.server_data.compute_routing(gate).mean(axis=0), method.groups, 0.02
        )
        expected = expected * np.exp(t * prior)
        expected /= expected.sum(axis=1, keepdims=True)
        pre = TASK.preprocessing
        raw = (x * pre.std + pre.mean) * pre.scale
        found = deploy.load(tmp_path / "e" / "bundles" / "1").predict(raw).probabilities
        np.testing.assert_allclose(found, expected, atol=1e-4)
    else:
        bundle = deploy.load(tmp_path / "e" / "bundles" / "1")
        assert len(bundle.manifest.candidates) == 2
        np.testing.assert_allclose([c.weight for c in bundle.manifest.candidates], weights_of_two_best(rho))


async def test_who_tells_nothing_gets_the_global_model(tmp_path: Path) -> None:
    """Section 7: a device without samples, one whose owner withholds the shares, and all with assemble=global."""

    class Withholding(Hiding):
        async def run(self, step: str, actions: Any) -> dict[str, Answer]:
            answers = await super().run(step, actions)
            declined = Declined(reason="", why=Why.NOT_ALLOWED)
            return {
                i: dataclasses.replace(a, result=declined) if step == "route" and i == "d01" else a
                for i, a in answers.items()
            }

    for assemble in ("parameters", "global"):
        home = tmp_path / assemble
        fleet, layout, first = federation(home, n=3)
        nothing = DeviceData.from_inputs(np.zeros((0, *TASK.input_shape), np.float32))
        workers = dict(fleet.workers) | {"e": Worker("e", TASK, nothing, home / "e", trains=False)}
        withholding = Withholding(TASK, layout, workers, seed=0)
        withholding._blobs = fleet._blobs
        withholding.late = frozenset({"d01", "d02"})
        method = method_of(assemble=assemble)
        state = await run_rounds(method, method.init(layout, first), withholding)
        asked = {i for _, step, i in withholding.asked if step == "route"}
        assert asked == ({"d01", "d02", "e"} if assemble == "parameters" else set())
        x = TEST[0]
        pre = TASK.preprocessing
        raw = (x * pre.std + pre.mean) * pre.scale
        for device in {"d01", "e"} | ({"d02"} - asked):
            found = deploy.load(home / device / "bundles" / "1").predict(raw)
            np.testing.assert_allclose(found.probabilities, predict(method, state, withholding, x), atol=1e-5)
            assert found.weights.shape == (len(x), 5)


async def test_a_newcomer_that_trains_starts_from_its_assembled_model(tmp_path: Path) -> None:
    """Section 7, Eq. 13; in the first round all start from the mean of the experts. With tau = 0 nothing moves them."""

    class Late(Fleet):
        starts: dict[str, BlobRef] = {}

        def get_devices(self) -> tuple[Device, ...]:
            return tuple(d for d in super().get_devices() if self.round > 1 or d.id != "d02")

        async def run(self, step: str, actions: Any) -> dict[str, Answer]:
            self.starts = {i: a.starts[0].model for i, a in actions.items()} if step == "train" else {}
            answers = await super().run(step, actions)
            self.trained = select_updates(answers)
            return answers

    fleet, layout, first = federation(tmp_path, n=3)
    late = Late(TASK, layout, fleet.workers, seed=0)
    late._blobs, late.round = fleet._blobs, 1
    method = method_of(tau=0.0)
    method.settings = msgspec.structs.replace(method.settings, protection=Protection(average="mean"))
    one = await method.advance(method.init(layout, first), late)
    assert not any(step == "route" for _, step, _ in late.asked)
    late.round = 2
    two = await method.advance(one, late)
    assert [i for _, step, i in late.asked if step == "route"] == ["d02"]
    p = method.server_data.compute_routing(late.get_tensors(one.gate), late.workers["d02"].data.shared[0])
    np.testing.assert_allclose(two.profiles["d02"], p.mean(axis=0), atol=1e-5)
    start = method.assemble(method.load_experts(one, late), newcomers.normalise(two.profiles["d02"]))
    np.testing.assert_array_equal(late.get(late.starts["d02"], layout).params, start.params)
    moved = start.params + late.get(late.trained["d02"].update, layout).params
    np.testing.assert_array_equal(late.get(two.clients["d02"], layout).params, moved)


def weights_of_two_best(rho: np.ndarray) -> np.ndarray:
    best = sorted(np.argsort(-rho)[:2])
    return rho[best] / rho[best].sum()


async def test_a_profile_that_is_none_is_refused(tmp_path: Path) -> None:
    class Lying(Hiding):
        async def run(self, step: str, actions: Any) -> dict[str, Answer]:
            answers = await super().run(step, actions)
            if step != "route":
                return answers
            lies = {"d00": Routed(shares=(0.5, 0.2, 0, 0, 0), n_samples=1), "d01": Routed(shares=(1.0,), n_samples=1)}
            return {i: dataclasses.replace(a, result=lies.get(i, a.result)) for i, a in answers.items()}

    fleet, layout, first = federation(tmp_path, n=4)
    lying = Lying(TASK, layout, fleet.workers, seed=0)
    lying._blobs = fleet._blobs
    lying.late = frozenset({"d00", "d01", "d02"})
    method = method_of()
    state = await run_rounds(method, method.init(layout, first), lying)
    assert set(state.profiles) == {"d02"}
    assert set(state.installed) == {"d02", "d03"}


# ----------------------------------------------------------------------------------------- what may be missing


async def test_an_unresponsive_device_keeps_its_model_and_comes_back(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of(rounds=3)
    fleet.round = 1
    one = await method.advance(method.init(layout, first), fleet)
    fleet.round, fleet.unresponsive = 2, frozenset({"d00"})
    two = await method.advance(one, fleet)
    assert two.clients["d00"] == one.clients["d00"]
    assert two.clients["d01"] != one.clients["d01"]
    assert two.experts != one.experts
    fleet.round, fleet.unresponsive = 3, frozenset()
    three = await method.advance(two, fleet)
    assert three.clients["d00"] != one.clients["d00"]
    assert three.participations == {"d00": 2, "d01": 3, "d02": 3, "d03": 3}


async def test_an_unresponsive_round_and_one_with_too_few_reports_change_nothing(tmp_path: Path) -> None:
    fleet, layout, first = federation(tmp_path, n=4)
    method = method_of()
    before = await method._pretrain(method.init(layout, first), fleet)
    fleet.round, fleet.unresponsive = 1, frozenset(d.id for d in fleet.get_devices())
    after = await method.advance(before, fleet)
    assert (after.round, after.experts, after.clients) == (1, before.experts, {})
    fleet.unresponsive = frozenset({"d00"})
    method.settings = msgspec.structs.replace(method.settings, min_reports=4)
    assert (await method.advance(before, fleet)).experts == before.experts


async def test_refusals_at_the_end_leave_the_others_alone(tmp_path: Path) -> None:
    class Refusing(Hiding):
        async def run(self, step: str, actions: Any) -> dict[str, Answer]:
            answers = await super().run(step, actions)
            refusals = {"route": Declined(reason="hot"), "assemble": Failed(reason="full")}
            return {
                i: dataclasses.replace(a, result=refusals[step]) if step in refusals and i == "d00" else a
                for i, a in answers.items()
            }

    fleet, layout, first = federation(tmp_path, n=3)
    refusing = Refusing(TASK, layout, fleet.workers, seed=0)
    refusing._blobs = fleet._blobs
    refusing.late = frozenset({"d00", "d01"})
    method = method_of()
    state = await run_rounds(method, method.init(layout, first), refusing)
    assert set(state.installed) == {"d01", "d02"}


# ------------------------------------------------------------------------------------------------------------ options


def test_without_a_reserved_set_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"--server-data.*fedavg"):
        make_method("fedcoe", MethodSettings(), Server(TASK))


def test_printed_is_what_the_paper_has_and_tau_stands_above_it() -> None:
    assert method_of(preset="printed").preset == PRESETS["printed"] == Preset(
        suitability_temperature=1.0, ranking="raw", tau=0.5, refresh_every=10, profile_prior=False
    )  # fmt: skip
    assert method_of(preset="printed", tau=0.8).preset == msgspec.structs.replace(PRESETS["printed"], tau=0.8)
    assert method_of().preset == Preset(
        suitability_temperature=0.1, ranking="affinity", tau=0.9, refresh_every=0, profile_prior=True
    )  # fmt: skip
    with pytest.raises(ConfigError, match="tau sets both"):
        method_of(tau_e=0.5)
    with pytest.raises(ConfigError, match="option"):
        method_of(tau=1.5)
