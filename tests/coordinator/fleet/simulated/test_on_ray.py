"""Simulated devices on Ray: equal bits however many actors there are, and whatever dies."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.fleet.simulated import on_ray
from coordinator.fleet.simulated.fleet import Execute, SimulatedFleet
from coordinator.fleet.simulated.on_ray import Shards, WorkerSpec
from coordinator.fleet.simulated.ray import connect, ray
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.parts.averaging import average_by_cluster
from coordinator.methods.settings import Option
from coordinator.simulation.compare import compare
from coordinator.simulation.federation import Federation, make_fleet, partition_samples
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import CompareSettings, EngineScenario, Scenario
from edge_agent.device.worker import FinishedOrder
from edge_agent.learning import batched
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Codec
from fedge.wire.messages import iterate_blobs

pytestmark = pytest.mark.process
SCENARIO = Scenario(devices=40, samples=1200, min_samples=10, rounds=2, codec=Codec.FLOAT32, local_steps=3)
SEED = 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A cluster of this machine, with one node of three processors."""
    from ray.cluster_utils import Cluster  # noqa: TID251

    head = {"num_cpus": 3, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    with connect(found.address):
        yield found
    found.shutdown()


@pytest.fixture(scope="module")
def federation() -> Federation:
    return partition_samples(SCENARIO, SEED)


async def trained(
    federation: Federation, home: Path, execute: Execute, method_name: str = "fedavg", **options: Option
) -> bytes:
    """The global model after the rounds."""
    fleet, first, _ = make_fleet(federation, SCENARIO, SEED, home, execute)
    method = make_method(method_name, SCENARIO.make_method_settings(SEED, dict(options)), Server(federation.task, None))
    state = method.init(federation.layout, first)
    for number in range(1, SCENARIO.rounds + 1):
        fleet.round = number
        state = await method.round(state, fleet)
    models = {ref.digest: ref for ref in iterate_blobs(state)}.values()
    return b"".join(tensor.tobytes() for ref in models for tensor in fleet.get_tensors(ref).values())


def shards(federation: Federation, home: Path, n: int) -> Shards:
    recipe = WorkerSpec(task=federation.task, layout=federation.layout, home=home)
    return Shards(recipe, federation.data, (), n)


@pytest.fixture(scope="module")
def undisturbed(cluster: object, federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The global model of fedavg with one actor."""
    home = tmp_path_factory.mktemp("quiet")
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(trained(federation, home, shards(federation, home, 1)))


async def test_bits_do_not_depend_on_the_number_of_actors(undisturbed: bytes, federation: Federation, tmp_path: Path):
    assert await trained(federation, tmp_path / "3", shards(federation, tmp_path / "3", 3)) == undisturbed
    here = np.frombuffer(await trained(federation, tmp_path / "here", batched.execute_jobs), np.float32)
    np.testing.assert_allclose(np.frombuffer(undisturbed, np.float32), here, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["fedadam", "q-fedavg", "scaffold", "feddyn", "ifca"])
async def test_a_method_on_ray_ends_where_it_does_here(
    name: str, cluster: object, federation: Federation, tmp_path: Path
) -> None:
    """Also one whose devices keep something of their own, or send more than one update."""
    there = await trained(federation, tmp_path / "2", shards(federation, tmp_path / "2", 2), name)
    here = await trained(federation, tmp_path / "here", batched.execute_jobs, name)
    np.testing.assert_allclose(np.frombuffer(there, np.float32), np.frombuffer(here, np.float32), rtol=1e-5, atol=1e-6)


async def test_bits_of_answers_as_they_come_do_not_either(cluster: object, federation: Federation, tmp_path: Path):
    of = [
        await trained(federation, tmp_path / str(n), shards(federation, tmp_path / str(n), n), "fedbuff", buffer=3)
        for n in (1, 2)
    ]
    assert of[0] == of[1]


async def test_a_killed_actor_changes_nothing(undisturbed: bytes, federation: Federation, tmp_path: Path):
    killed = shards(federation, tmp_path / "killed", 2)

    def and_kill(jobs: list[batched.Job]) -> list[FinishedOrder]:
        found = killed(jobs)
        ray.kill(killed._idle[0])
        return found

    assert await trained(federation, tmp_path / "killed", and_kill) == undisturbed


async def test_a_node_that_dies_under_way_changes_nothing(
    cluster: Any, undisturbed: bytes, federation: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    lossy = shards(federation, tmp_path / "lost", 4)
    loses = Timer(0.2, partial(cluster.remove_node, second, allow_graceful=False))

    def and_lose(jobs: list[batched.Job]) -> list[FinishedOrder]:
        if not loses.is_alive() and not loses.finished.is_set():
            ray.get(list(lossy._coming))  # on both nodes
            loses.start()
        return lossy(jobs)

    assert await trained(federation, tmp_path / "lost", and_lose) == undisturbed
    assert "shard_lost" in caplog.text


async def trained_once(
    federation: Federation, home: Path, execute: Execute
) -> tuple[SimulatedFleet, dict[str, Trained]]:
    """A fleet and the updates of its devices; on Ray they lie with the actors."""
    fleet, first, _ = make_fleet(federation, SCENARIO, SEED, home, execute)
    action = Train(starts=(Start(model=first),), sgd=Sgd(steps=3), codec=Codec.FLOAT32)
    answers = await fleet.run("train", {device.id: action for device in fleet.get_devices()})
    return fleet, {i: answer.result for i, answer in answers.items() if isinstance(answer.result, Trained)}


async def averaged(
    federation: Federation, fleet: SimulatedFleet, updates: dict[str, Trained], rules: tuple[str, ...]
) -> bytes:
    """The averages of all and of every second update, by each rule."""
    return b"".join([await averaged_by(federation, fleet, updates, rule) for rule in rules])


async def averaged_by(federation: Federation, fleet: SimulatedFleet, updates: dict[str, Trained], rule: str) -> bytes:
    scenario = msgspec.structs.replace(SCENARIO, average=rule)
    method = make_method("fedavg", scenario.make_method_settings(SEED, {}), Server(federation.task, None))
    ids = list(updates)
    whole, half, nobody = await average_by_cluster(method, fleet, updates, [ids, ids[::2], []], federation.layout)
    assert nobody is None
    assert whole is not None
    assert half is not None
    return whole.params.tobytes() + half.params.tobytes()


RULES = ("clipped", "mean", "median")


@pytest.fixture(scope="module")
def few_blocks() -> Iterator[None]:
    """Blocks large enough for the object store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ray, "BLOCKS", 3)
        yield


@pytest.fixture(scope="module")
def averages(
    cluster: object, few_blocks: None, federation: Federation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """By rule, with one actor."""

    async def compute() -> dict[str, bytes]:
        home = tmp_path_factory.mktemp("averages")
        fleet, updates = await trained_once(federation, home, shards(federation, home, 1))
        return {rule: await averaged_by(federation, fleet, updates, rule) for rule in RULES}

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(compute())


async def test_averages_do_not_depend_on_which_actors_die(
    averages: dict[str, bytes], federation: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = await averaged(federation, *await trained_once(federation, tmp_path / "here", batched.execute_jobs), RULES)
    expected = b"".join(averages[rule] for rule in RULES)
    np.testing.assert_allclose(np.frombuffer(expected), np.frombuffer(here), rtol=1e-6, atol=1e-9)
    there = shards(federation, tmp_path / "there", 2)
    fleet, updates = await trained_once(federation, tmp_path / "there", there)
    assert await averaged(federation, fleet, updates, RULES) == expected
    for shard in there._idle:
        ray.kill(shard)
    assert await averaged(federation, fleet, updates, RULES) == expected
    assert "updates_lost" not in caplog.text


@pytest.mark.parametrize("rules", [("clipped", "mean"), ("median",)])
async def test_averages_do_not_depend_on_a_node_that_alone_had_the_updates(
    rules: tuple[str, ...],
    cluster: Any,
    averages: dict[str, bytes],
    federation: Federation,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    lossy = shards(federation, tmp_path, 4)
    actors = dict(lossy._coming)
    ray.get(list(actors))
    for shard in [shard for shard in actors.values() if node_of(shard) != second.node_id]:
        ray.kill(shard)
    fleet, updates = await trained_once(federation, tmp_path, lossy)
    cluster.remove_node(second, allow_graceful=False)
    assert await averaged(federation, fleet, updates, rules) == b"".join(averages[rule] for rule in rules)
    assert "updates_lost" in caplog.text


def node_of(shard: Any) -> str:
    return str(ray._private.state.actors(shard._actor_id.hex())["Address"]["NodeID"])


async def test_only_sums_travel(cluster: object, federation: Federation, tmp_path: Path) -> None:
    there = shards(federation, tmp_path, 1)
    fleet, updates = await trained_once(federation, tmp_path, there)
    there.fetch = None  # type: ignore[assignment, method-assign]
    await averaged(federation, fleet, updates, ("clipped",))


def test_a_simulation_on_ray_gives_the_figures_of_one_here(cluster: object, tmp_path: Path) -> None:
    on = EngineScenario(engine="ray", ray_address="auto")
    here, there = (
        simulate(SCENARIO, "fedge", {}, SEED, tmp_path / name, lambda _: None, "fedge", how)
        for name, how in (("here", None), ("there", on))
    )
    assert there.bundles == here.bundles == SCENARIO.devices
    assert there.accuracy == pytest.approx(here.accuracy, abs=0.01)
    assert (there.bytes_up, there.bytes_down) == (here.bytes_up, here.bytes_down)


def test_a_comparison_on_ray_gives_the_runs_of_one_here(cluster: object, tmp_path: Path) -> None:
    small = {"methods": "local,fedavg", "seeds": "0", "devices": 3, "samples": 200, "rounds": 1}
    runs = [
        compare(CompareSettings(**small, jobs=1, engine=engine), tmp_path / engine, lambda *_: None).runs
        for engine in ("local", "ray")
    ]
    for here, there in zip(*runs, strict=True):
        assert (here.method, here.accuracy, here.bytes_up) == (there.method, there.accuracy, there.bytes_up)
