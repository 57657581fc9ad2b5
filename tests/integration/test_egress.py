"""What leaves devices, whatever the method: nothing that the owner withholds, and no canary in any encoding."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from coordinator.aggregation.protection import Protection
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import get_installed_methods, make_method
from coordinator.methods.method import Server
from coordinator.methods.settings import MethodSettings
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.rounds import run_rounds
from coordinator.store.store import Store
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.errors import FruitlessError
from fedge.models import build
from fedge.privacy.egress import ALL, PRESETS, Rules
from fedge.privacy.ledger import read_lines
from fedge.steps.contract import Reveals
from fedge.steps.sgd import Sgd
from fedge.tasks import Partitioning, Pool, load_pool, make_device_data, partition_pool, read_device_data
from fedge.tensors.layout import unflatten
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Context, Status, decode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.deploy.serve_process import process
from tests.deploy.served import body
from tests.support.simulation import of_method

STRICT = Rules(PRESETS["strict"])
RECEIVES = Rules(frozenset({Reveals.NOTHING}))
"""An owner who takes models and gives nothing."""
ROUNDS = {"fedge": 8}
"""fedge profiles after six rounds with everybody."""
NEEDS = {"fedgh": "class means", "q-fedavg": "losses"}
"""What methods learn from beside updates: they learn nothing where all owners withhold it."""
VARIANTS = [
    *("fedge:selection=uniform", "fedge:split=always", "fedge:clustering=labels", "fedge:mode=shift"),
    *("cfic:selection=ccmab", "fedepc:warm_up=1", "fedavg:selection=ccmab", "fedavg:selection=fastest"),
]


@pytest.fixture(scope="module")
def samples() -> Pool:
    return load_pool("digits", seed=0, limit=400)


# ------------------------------------------------------------------------------ every method with what owners withhold


@pytest.mark.statistical
@pytest.mark.parametrize("who", ["some", "all"])
@pytest.mark.parametrize("method", [*get_installed_methods(), *VARIANTS])
def test_a_run_ends_without_what_owners_withhold_and_every_device_has_a_bundle(
    method: str, who: str, samples: Pool, tmp_path: Path
) -> None:
    shares = partition_pool(samples, 4, Partitioning(partition="groups", sensitive=0.2, n_groups=2), seed=1)
    name, _, option = method.partition(":")
    spec = of_method(samples.spec, name)
    layout, first = build.make_initial_model(spec, 1)
    workers = {
        f"d{i}": Worker(f"d{i}", spec, make_device_data(spec, share), tmp_path / f"d{i}")
        for i, share in enumerate(shares)
    }
    rules = dict.fromkeys(workers, STRICT) if who == "all" else {"d1": STRICT, "d2": RECEIVES}
    fleet = SimulatedFleet(spec, layout, workers, seed=1, rules=rules)
    options = dict([option.split("=")]) if option else {}
    if "warm_up" in options:
        options["warm_up"] = int(options["warm_up"])  # type: ignore[assignment]
    settings = MethodSettings(rounds=ROUNDS.get(name, 4), seed=1, sgd=Sgd(steps=2), options=options)  # type: ignore[arg-type]
    x = (samples.x[:80] / 16).astype(np.float32).reshape(80, *samples.spec.input_shape)
    made = make_method(name, settings, Server(samples.spec, (x, samples.y[:80])))
    begin = made.init(layout, fleet.put(unflatten(first, layout)))
    if who == "all" and name in NEEDS:
        with pytest.raises(FruitlessError, match="nothing was learned"):
            asyncio.run(run_rounds(made, begin, fleet))
        return
    end = asyncio.run(run_rounds(made, begin, fleet))
    assert set(end.installed) == set(workers)
    assert all((tmp_path / i / "bundles" / str(done.release)).is_dir() for i, done in end.installed.items())


@pytest.mark.parametrize("who", [("d1",), ("d0", "d1", "d2", "d3", "d4")])
def test_a_masked_sum_is_of_devices_that_tell_no_number_of_samples_too(
    who: tuple[str, ...], samples: Pool, tmp_path: Path
) -> None:
    layout, first = build.make_initial_model(samples.spec, 1)
    shares = partition_pool(samples, 5, Partitioning(partition="groups", sensitive=0.2, n_groups=2), seed=1)
    workers = {
        f"d{i}": Worker(f"d{i}", samples.spec, make_device_data(samples.spec, share), tmp_path / f"d{i}")
        for i, share in enumerate(shares)
    }
    reticent = Rules(PRESETS["default"] - {Reveals.COUNT})
    fleet = SimulatedFleet(samples.spec, layout, workers, seed=1, rules=dict.fromkeys(who, reticent))
    masked = Protection(average="mean", masking=True)
    made = make_method(
        "fedavg", MethodSettings(rounds=1, sgd=Sgd(steps=1), protection=masked), Server(samples.spec, None)
    )
    begin = fleet.put(unflatten(first, layout))
    end = asyncio.run(run_rounds(made, made.init(layout, begin), fleet))
    assert end.model != begin
    assert set(end.installed) == set(workers)


# ---------------------------------------------------------------------------------------------- canaries on the wire


class Tap:
    """All that a broker passes on from devices: messages, and tensors put together again."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self._chunks: dict[str, dict[int, bytes]] = defaultdict(dict)

    async def hear(self, message: Inbound) -> None:
        levels = message.topic.split("/")
        if levels[3] == "agents" and levels[5] in {"orders", "acks", "predict"}:  # of others
            return
        if levels[3] == "agents" and levels[5] == "blobs":
            self._chunks[levels[6]][int(levels[7])] = message.payload
        elif levels[3] == "agents":
            self.messages.append((message.topic, message.payload))

    async def heard(self, leaf: str, n: int) -> None:
        """Wait for messages, by the last level of the topic."""
        async with asyncio.timeout(300):
            while sum(topic.split("/")[5] == leaf for topic, _ in self.messages) < n:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def payloads(self) -> list[bytes]:
        blobs = [b"".join(data for _, data in sorted(chunks.items())) for chunks in self._chunks.values()]
        return [topic.encode() + payload for topic, payload in self.messages] + blobs


def opened(payload: bytes) -> Iterator[bytes]:
    """The payload, what zstd frames in it hold, and what base64 in it says."""
    yield payload
    for found in re.finditer(re.escape(b"\x28\xb5\x2f\xfd"), payload):
        with contextlib.suppress(zstandard.ZstdError):
            yield zstandard.ZstdDecompressor().decompressobj().decompress(payload[found.start() :])
    for found in re.finditer(rb"[A-Za-z0-9+/_-]{24,}", payload):
        for start in range(4):
            text = found.group()[start:].translate(bytes.maketrans(b"-_", b"+/"))
            text = text[: len(text) - (len(text) % 4 == 1)]
            yield base64.b64decode(text + b"=" * (-len(text) % 4))


def encodings(values: np.ndarray) -> Iterator[bytes]:
    """A row of numbers as bytes of several types, both ways round, and as text."""
    for kind in ("u1", "i1", "<i2", ">i2", "<i4", ">i4", "<i8", ">i8"):
        if (values == values.astype(kind)).all():
            yield values.astype(kind).tobytes()
    for kind in ("<f2", "<f4", ">f4", "<f8", ">f8"):
        yield values.astype(kind).tobytes()
    for kind in ("float32", "float64"):
        yield ",".join(map(str, values.astype(kind).tolist())).encode()
        yield b"".join(b"\xcb" + np.float64(v).astype(">f8").tobytes() for v in values.astype(kind))  # MessagePack
        yield b"".join(b"\xca" + np.float32(v).astype(">f4").tobytes() for v in values.astype(kind))
    if (values == values.astype("u1")).all():
        yield ",".join(map(str, values.astype(int).tolist())).encode()
        yield ", ".join(map(str, values.astype(int).tolist())).encode()


def canaries(x: np.ndarray, y: np.ndarray, names: list[str]) -> set[bytes]:
    """What must be found nowhere: stretches of samples (raw, and as the network sees them), labels, names of files."""
    found = {name.encode() for name in names}
    for sample in x.reshape(len(x), -1).astype(np.float64):
        if len(np.unique(sample[24:40])) >= 5:  # not the blank margin of a picture, which tensors have, too
            for scale in (1.0, 16.0, 255.0, 255.0 / 16):
                found.update(e for e in encodings(sample[24:40] / scale) if len(e) >= 16)
    found.update(e for e in encodings(y[:32].astype(np.float64)) if len(e) >= 16)
    return found


def caught(payloads: list[bytes], wanted: set[bytes]) -> set[bytes]:
    layers = [layer for payload in payloads for layer in opened(payload)]
    haystack = b"\n--\n".join(layers)
    return {canary for canary in wanted if canary in haystack}


def test_the_tap_finds_canaries_in_every_encoding(samples: Pool) -> None:
    """What the next test looks for it would find."""
    wanted = canaries(samples.x[:40], samples.y[:40], ["grandmother-1943.npz"])
    assert len(wanted) > 500
    for canary in [*sorted(wanted)[::60], b"grandmother-1943.npz"]:
        around = b"\x93\xa5" + canary + b"\xc0"
        for hidden in (around, zstandard.compress(around * 3), base64.b64encode(b"x" + around)):
            assert caught([b"head" + hidden + b"tail"], wanted) >= {canary}


@contextlib.asynccontextmanager
async def agents(
    broker: LocalBroker, samples: Pool, folder: Path, names: Mapping[str, str], rules: Mapping[str, Rules]
) -> AsyncIterator[Tap]:
    """Agents in this process, and somebody who hears all that they say."""
    tap = Tap()
    settings = BrokerSettings(broker.host, broker.port)
    listening = Transport(settings, "tap")
    await listening.subscribe(f"{Topics('all').prefix}/#", tap.hear)
    running = []
    for device, name in names.items():
        data = read_device_data(samples.spec, folder / name, seed=1)
        make_worker = partial(Worker, device, samples.spec, data, folder / device)
        identity = Identity(device, "all", samples.spec, n_shared=data.n_shared)
        running.append(Agent(identity, settings, folder / device, make_worker, rules=rules[device]))
    async with listening, asyncio.TaskGroup() as group:
        for agent in running:
            group.create_task(agent.run())
        try:
            yield tap
        finally:
            for agent in running:
                agent.stop()


@pytest.mark.usefixtures("first_model_made_here")
@pytest.mark.parametrize("method", get_installed_methods())
async def test_no_canary_is_in_the_traffic_of_any_method(
    method: str, samples: Pool, mosquitto: LocalBroker, tmp_path: Path
) -> None:
    rules = {"d0": ALL if method == "pm-moe" else Rules(), "d1": ALL if method == "pm-moe" else Rules(), "d2": STRICT}
    names, wanted = {}, set[bytes]()
    for k, device in enumerate(rules):
        own = slice(100 * k, 100 * k + 100)
        names[device] = f"secret-diary-{device}.npz"
        sensitive = np.arange(100) % 4 == 0
        np.savez(tmp_path / names[device], x=samples.x[own], y=samples.y[own], sensitive=sensitive)
        wanted |= canaries(samples.x[own], samples.y[own], [names[device], "secret-diary", str(tmp_path)])
    np.savez(tmp_path / "server_data.npz", x=samples.x[300:], y=samples.y[300:])
    settings = CoordinatorSettings(
        broker=f"{mosquitto.host}:{mosquitto.port}",
        federation="all",
        home=tmp_path / "coordinator",
        task="digits",
        method=method,
        rounds=ROUNDS.get(method, 2),
        local_steps=5,
        devices=len(rules),
        once=True,
        server_data=tmp_path / "server_data.npz" if method == "fedcoe" else None,
    )
    async with agents(mosquitto, samples, tmp_path, names, rules) as tap:
        with contextlib.closing(Store(settings.home)) as store:
            summary: dict[str, Any] = await serve(settings, samples.spec, store, lambda *_: None, {})
    assert summary["done"]
    assert set(summary["installed"]) == set(rules)
    assert not {name for name in summary["refused"] if name != "replayed-report"}
    payloads = tap.payloads()
    assert caught(payloads, wanted) == set()
    for device in rules:
        _noted_as_sent(tmp_path / device, device, tap)
    statuses = [decode_message(p, Status) for topic, p in tap.messages if topic.endswith("/d2/status")]
    contexts = [decode_message(p, Context) for topic, p in tap.messages if topic.endswith("/d2/context")]
    assert {status.withholds for status in statuses} == {STRICT.withheld}
    assert {context.load for context in contexts} == {None}
    assert {kind for line in read_lines(tmp_path / "d2") for kind in line.kinds} <= set(STRICT.allowed)


def _noted_as_sent(home: Path, device: str, tap: Tap) -> None:
    """Whatever was heard of a device was noted, and nothing in other words."""
    heard = defaultdict(int)
    for topic, _ in tap.messages:
        if topic.split("/")[4] == device:
            heard[topic.split("/")[5]] += 1
    noted = defaultdict(int)
    for line in read_lines(home):
        noted[line.message] += line.n
    assert {message for message in heard if noted[message] < heard[message]} == set()


@pytest.mark.usefixtures("first_model_made_here")
async def test_no_canary_is_in_what_a_serving_device_says(
    samples: Pool, mosquitto: LocalBroker, tmp_path: Path
) -> None:
    """Health and answers on MQTT and over HTTP: of what the bundle was trained on, and of what is asked."""
    name = "secret-diary.npz"
    np.savez(tmp_path / name, x=samples.x[:200], y=samples.y[:200], sensitive=np.arange(200) % 4 == 0)
    asked = samples.x[300:340]
    wanted = canaries(samples.x[:200], samples.y[:200], [name, "secret-diary", str(tmp_path)])
    wanted |= canaries(asked, samples.y[300:340], [])
    broker = f"{mosquitto.host}:{mosquitto.port}"
    settings = CoordinatorSettings(
        broker=broker,
        federation="all",
        home=tmp_path / "coordinator",
        task="digits",
        method="ditto",
        rounds=2,
        local_steps=5,
        devices=1,
        once=True,
    )
    async with agents(mosquitto, samples, tmp_path, {"d0": name}, {"d0": Rules()}) as tap:
        with contextlib.closing(Store(settings.home)) as store:
            assert (await serve(settings, samples.spec, store, lambda *_: None, {}))["done"]
        said: list[bytes] = []
        words = ("--home", tmp_path / "d0", "--broker", broker, "--federation", "all", "--id", "d0")
        async with process(*words) as (_, _, http):
            sensor = Transport(BrokerSettings(mosquitto.host, mosquitto.port), "sensor")
            async with sensor:
                await tap.heard("health", 1)  # it is connected
                for k, x in enumerate(asked):
                    fields = {"parameters": {"label": samples.spec.classes[0]}} if k % 2 else {}
                    await sensor.publish(
                        Topics("all").make_agent_topic("d0", "predict"), body(x[None], id=str(k), **fields)
                    )
                    paths = ("", "/models/digits", "/models/digits/config", "/models/digits/ready", "/health/live")
                    for path in paths if k == 30 else ():
                        async with http.get(f"/v2{path}") as answer:
                            said += [str(answer.headers).encode(), await answer.read()]
                    async with http.post("/v2/models/digits/infer", data=body(x[None], id=str(k), **fields)) as answer:
                        assert answer.status == 200
                        said += [str(answer.headers).encode(), await answer.read()]
                    async with http.post("/v2/models/digits/infer", data=body(x[:1], id=str(k))) as answer:
                        assert answer.status == 400
                        said += [str(answer.headers).encode(), await answer.read()]
                await tap.heard("predictions", len(asked))
    assert caught([*tap.payloads(), *said], wanted) == set()
