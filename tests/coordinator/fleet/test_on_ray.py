"""Simulated devices on Ray: equal bits however many actors there are, and whatever dies."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

from coordinator.fleet.on_ray import Recipe, Shards
from coordinator.fleet.simulated import Execute
from coordinator.methods import Option, Server, make
from coordinator.ray import connected, ray
from coordinator.simulation.compare import compare
from coordinator.simulation.federation import Data, Federation, deal, gather
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import CompareSettings, Engine, Running, Scenario
from edge_agent import batched
from edge_agent.worker import Finished
from fedge.messages import Codec

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
SCENARIO = Scenario(devices=40, samples=1200, min_samples=10, rounds=2, codec=Codec.FLOAT32, local_steps=3)
SEED = 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A cluster of this machine, with one node of four processors."""
    from ray.cluster_utils import Cluster  # noqa: TID251

    head = {"num_cpus": 4, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    with connected(found.address):
        yield found
    found.shutdown()


@pytest.fixture(scope="module")
def federation() -> Federation:
    return deal(SCENARIO, SEED)


async def trained(
    federation: Federation, home: Path, execute: Execute, method_name: str = "fedavg", **options: Option
) -> bytes:
    """The global model after the rounds."""
    fleet, first, _ = gather(federation, SCENARIO, SEED, home, execute)
    method = make(method_name, SCENARIO.for_method(SEED, dict(options)), Server(federation.task, None))
    state = method.init(federation.layout, first)
    for number in range(1, SCENARIO.rounds + 1):
        fleet.round = number
        state = await method.round(state, fleet)
    return fleet.get(state.model, federation.layout).params.tobytes()


def shards(federation: Federation, home: Path, n: int) -> Shards:
    recipe = Recipe(task=federation.task, home=home)
    return Shards(recipe, Data(federation.task, federation.shares), (), n)


async def test_bits_do_not_depend_on_the_number_of_actors(cluster: object, federation: Federation, tmp_path: Path):
    of = {n: await trained(federation, tmp_path / str(n), shards(federation, tmp_path / str(n), n)) for n in (1, 2, 4)}
    assert of[1] == of[2] == of[4]
    here = await trained(federation, tmp_path / "here", batched.execute)
    np.testing.assert_allclose(np.frombuffer(of[1], np.float32), np.frombuffer(here, np.float32), rtol=1e-6, atol=1e-7)


async def test_bits_of_answers_as_they_come_do_not_either(cluster: object, federation: Federation, tmp_path: Path):
    of = [
        await trained(federation, tmp_path / str(n), shards(federation, tmp_path / str(n), n), "fedbuff", buffer=3)
        for n in (1, 2)
    ]
    assert of[0] == of[1]


async def test_a_killed_actor_changes_nothing(cluster: object, federation: Federation, tmp_path: Path):
    undisturbed = await trained(federation, tmp_path / "quiet", shards(federation, tmp_path / "quiet", 2))
    on_ray = shards(federation, tmp_path / "killed", 2)

    def and_kill(jobs: list[batched.Job]) -> list[Finished]:
        found = on_ray(jobs)
        ray.kill(on_ray._idle[0])
        return found

    assert await trained(federation, tmp_path / "killed", and_kill) == undisturbed


async def test_a_node_that_dies_under_way_changes_nothing(
    cluster: Any, federation: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = await trained(federation, tmp_path / "quiet", shards(federation, tmp_path / "quiet", 2))
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    on_ray = shards(federation, tmp_path / "lost", 6)
    loses = Timer(0.2, partial(cluster.remove_node, second, allow_graceful=False))

    def and_lose(jobs: list[batched.Job]) -> list[Finished]:
        if not loses.is_alive() and not loses.finished.is_set():
            ray.get(list(on_ray._coming))  # on both nodes
            loses.start()
        return on_ray(jobs)

    assert await trained(federation, tmp_path / "lost", and_lose) == undisturbed
    assert "shard_lost" in caplog.text


def test_a_simulation_on_ray_gives_the_figures_of_one_here(cluster: object, tmp_path: Path) -> None:
    on = Running(engine=Engine.RAY, ray_address="auto")
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
        compare(CompareSettings(**small, jobs=1, engine=engine), tmp_path / engine.value, lambda *_: None).runs
        for engine in Engine
    ]
    for here, there in zip(*runs, strict=True):
        assert (here.method, here.accuracy, here.bytes_up) == (there.method, there.accuracy, there.bytes_up)
