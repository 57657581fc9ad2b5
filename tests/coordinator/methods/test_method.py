"""Methods run to their end, with parts exchanged by options."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.aggregation.protection import Protection
from coordinator.methods.catalogue import get_installed_methods, load_method_class, make_method
from coordinator.methods.method import Method, Server
from coordinator.methods.option_values import parse_options
from coordinator.methods.options import parse_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.data.preprocessing import preprocess
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.steps.sgd import Sgd
from fedge.tasks import DeviceData, Pool, load_pool, load_task
from fedge.tensors.heads import grow_tensors
from fedge.tensors.layout import Layout, unflatten
from fedge.wire.messages import BlobRef
from tests.support.simulation import Fleet, digits, predicted

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
    name, options = parse_method(text)
    rounds = options.pop("rounds", 3)
    settings = MethodSettings(rounds=rounds, participation=0.6, sgd=Sgd(steps=3), options=options)
    method = make_method(name, settings)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == set(fleet.workers)
    assert decode_state(encode_state(state), type(state)).installed == state.installed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fedavg", ""),
        ("cfic", ""),
        ("cfic:clustering=mctc", "it clusters by each device's update"),
        ("fedepc:clustering=mctc", "it clusters by each device's update"),
        ("fedepc", ""),
        ("fedbuff", "it takes answers one by one, and a relay gives those of its site together"),
        ("fedge", ""),
        ("fedge:buffer=3", "it takes answers one by one, and a relay gives those of its site together"),
        ("scmoe-pfl", "it goes by the model that each device has trained"),
        ("pm-moe", "devices hand their private modules to each other"),
    ],
)
def test_a_method_says_why_devices_cannot_be_behind_relays(text: str, why: str) -> None:
    """What is true of every method comes first: a rule that needs single updates."""
    name, options = parse_method(text)
    assert make_method(name, MethodSettings(options=options)).explain_no_relays() == why
    median = make_method(name, MethodSettings(options=options, protection=Protection(average="median")))
    assert median.explain_no_relays().startswith("--average median needs each device's update")


NO_SUM = "cannot have masking: its server needs more of updates than their sum"
NO_NOISE = "cannot have dp: it needs"


@pytest.mark.parametrize(
    ("name", "masked", "private"),
    [
        ("fedadam", "", ""),
        ("fedyogi", "", ""),
        ("q-fedavg", NO_SUM, f"{NO_NOISE} loss_before of step train"),
        ("scaffold", NO_SUM, f"{NO_NOISE} control of step train_scaffold"),
        ("feddyn", NO_SUM, f"{NO_NOISE} update of step train_feddyn"),
        ("ifca", NO_SUM, f"{NO_NOISE} cluster of step train"),
    ],
)
def test_what_a_rival_cannot_have_is_refused_before_its_first_round(name: str, masked: str, private: str) -> None:
    """Neither do they take answers one by one: no option says so."""

    def refuse(**given: Any) -> str:
        try:
            make_method(name, MethodSettings(**given))
        except ConfigError as error:
            return str(error)
        return ""

    guards = {masked: Protection(average="mean", masking=True), private: Protection(dp_noise=1.0)}
    for why, guard in guards.items():
        found = refuse(protection=guard)
        assert found.startswith(f"{name} {why}") if why else not found
    assert "buffer" in refuse(options={"buffer": 3})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fedavg", ""),
        ("cfic", ""),
        ("cfic:clustering=aidc", "all will share one model"),
        ("fedepc", "all will share one model"),
        ("fedepc:clustering=labels", ""),
        ("fedge", "all form one group when it is chosen who trains"),
        ("fedge:buffer=3", ""),
        ("fedge:buffer=3:clustering=aidc", "all will share one model"),
    ],
)
def test_a_method_says_what_becomes_of_it_in_a_network_without_a_relu(text: str, why: str) -> None:
    name, given = parse_method(text)
    kind = load_method_class(name)
    found = kind.without_profile(parse_options(kind, given)[0])
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("name", get_installed_methods())
async def test_a_second_campaign_of_every_method_goes_on_from_the_first(name: str, tmp_path: Path) -> None:
    """On samples that have not changed it is not worse, and has from its first round what the first has learned."""
    fleet, layout, first, _ = digits(tmp_path, n=6, limit=900, method=name)
    samples = tuple(
        np.concatenate(part) for part in zip(*(fleet.data(i).validation for i in fleet.workers), strict=True)
    )
    server, settings = Server(fleet.task, samples), MethodSettings(rounds=6, sgd=Sgd(steps=5))
    ends, right = [], []
    for _ in range(2):
        method = make_method(name, settings, server)
        changed = sorted(fleet.workers)[:2]
        begun = method.begin_campaign(ends[-1], changed) if ends else method.init(layout, first)
        ends.append(await run_rounds(method, begun, fleet))
        right.append(sum(count_right(fleet.workers[i], ends[-1].installed[i].release) for i in fleet.workers))
        settings = msgspec.structs.replace(settings, first=ends[-1].round)
    assert [(state.campaign, len(state.installed)) for state in ends] == [(1, 6), (2, 6)]
    assert right[1] >= right[0] - 5, "of about 180"
    before, after = ends[0].history, ends[1].history
    if name != "local":  # which has no rounds
        assert [line.round for line in after] == [*range(8, 14)]
    if name not in {"local", "fedge"}:  # which goes on from the shared model, until it has tested its split again
        assert after[0].accuracy > before[-1].accuracy - 0.1


def count_right(worker: Worker, release: int) -> int:
    """Validation samples that a bundle gets right."""
    x, y = worker.data.validation
    return int((predicted(worker, x, release).argmax(axis=1) == y).sum())


TAKE_NO_CLASSES = {"cfic", "fedcoe", "fedcp", "feddyn", "fedepc", "gpfl", "pm-moe", "scmoe-pfl"}
"""Methods that have more than models of the whole network, and do not begin it anew."""
SLOWER = {"fedgh": 12, "pfedme": 12, "q-fedavg": 12, "scaffold": 12}
"""Rounds of methods that take smaller steps."""


@pytest.mark.parametrize("name", get_installed_methods())
async def test_a_class_joins_and_the_others_are_not_forgotten(name: str, tmp_path: Path) -> None:
    if name in TAKE_NO_CLASSES:
        assert load_method_class(name).add_classes is Method.add_classes
        return
    pool, task = load_pool("digits", seed=0), load_task("digits")
    devices = {f"d{i}": np.arange(i, 1200, 5) for i in range(5)}
    right: list[list[float]] = []
    state: Any = None
    last: Any = None
    for n in (8, 9):
        few = msgspec.structs.replace(task, classes=task.classes[:n])
        layout, model = build.make_initial_model(few, 0)
        workers = {i: Worker(i, few, make_data(few, pool, mine), tmp_path / i) for i, mine in devices.items()}
        fleet = Fleet(few, layout, workers, seed=0)
        settings = MethodSettings(
            rounds=SLOWER.get(name, 6), sgd=Sgd(steps=10), first=0 if state is None else state.round
        )
        method = make_method(name, settings, Server(few))
        if state is None:
            begun = method.init(layout, fleet.put(unflatten(model, layout)))
        else:
            fleet._blobs = last._blobs
            grow = partial(grow_in, fleet, layout)
            begun = method.add_classes(method.begin_campaign(state, sorted(workers)), layout, grow)
            assert begun == method.add_classes(method.begin_campaign(state, sorted(workers)), layout, grow)
        state, last = await run_rounds(method, begun, fleet), fleet
        test = make_data(few, pool, np.arange(1200, len(pool.y)))
        right.append(measure_classes(workers["d0"], test, state.installed["d0"].release))
    assert right[1][8] > 0.7
    assert np.mean(right[1][:8]) > np.mean(right[0]) - 0.03


def make_data(task: TaskSpec, pool: Pool, chosen: NDArray[np.int64]) -> DeviceData:
    """The chosen samples of the pool whose classes the task has."""
    own = chosen[pool.y[chosen] < task.n_classes]
    return DeviceData.from_samples(preprocess(task, pool.x[own]), pool.y[own], seed=0)


def grow_in(fleet: Fleet, layout: Layout, ref: BlobRef) -> BlobRef:
    return fleet.put(grow_tensors(fleet.get_tensors(ref), layout))


def measure_classes(worker: Worker, data: DeviceData, release: int) -> list[float]:
    """The accuracy of a bundle on each class."""
    x, y = data.labelled
    right = predicted(worker, x, release).argmax(axis=1) == y
    return [float(right[y == c].mean()) for c in range(worker.task.n_classes)]
