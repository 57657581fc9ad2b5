"""A worker on three noisy classes and the coordinator's side of its orders, for tests of one device."""

from pathlib import Path

import numpy as np

from edge_agent.device.device import Device
from edge_agent.device.worker import Worker
from fedge.bundle import manifest
from fedge.bundle.manifest import Manifest
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.steps.contract import Action, Result, encode_body
from fedge.steps.mixture.install import Installed
from fedge.system.files import compute_digest
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.layers import Layers, cut
from fedge.tensors.layout import Codec, Layout, Model, Selector, Tensors, unflatten
from fedge.wire.messages import BlobRef, Order, Role

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 8})
LAYOUT, INITIAL = build.make_initial_model(TASK, 0)
D = 8  # features


class Blobs(dict[str, bytes]):
    """What the coordinator has sent, by digest; called, it is `fetch`. `fetched`: what was asked for."""

    def __init__(self, task: TaskSpec = TASK) -> None:
        self.task = task
        self.fetched: list[str] = []

    def __call__(self, ref: BlobRef) -> bytes:
        self.fetched.append(ref.digest)
        return self[ref.digest]

    def file(self, data: bytes) -> BlobRef:
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data))
        self[ref.digest] = data
        return ref

    def put(self, tensors: Tensors) -> BlobRef:
        return self.file(codecs.encode(tensors, Codec.FLOAT32))

    def model(self, seed: int, personal: Selector = (), scale: float = 1.0) -> BlobRef:
        """A model with weights of this seed, or what travels of it where some layers are personal."""
        layout, model = build.make_initial_model(self.task, seed)
        scaled = Model(model.params * np.float32(scale), model.buffers, model.counters)
        return self.put(tensors_of(scaled, layout.without(personal), layout))


def part_of(model: Model, selector: Selector) -> Tensors:
    """The tensors of a model of `TASK` that a selector means."""
    return tensors_of(model, LAYOUT.select(selector))


def tensors_of(model: Model, part: Layout, layout: Layout = LAYOUT) -> Tensors:
    """Some tensors of a model."""
    tensors = unflatten(model, layout)
    return {info.name: tensors[info.name] for info in part.tensors}


def layers_of(model: Model, selector: Selector) -> Layers:
    """Some layers of a model of `TASK`."""
    part = LAYOUT.select(selector)
    return Layers(part, cut(model, LAYOUT, part))


def samples(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    return (rng.normal(size=(n, 6)) + 2 * np.eye(6)[y]).astype(np.float32), y.astype(np.int64)


def device_data(n: int = 40, m: int = 15, sensitive: float = 0.25) -> DeviceData:
    """n training samples, a share of them sensitive, and m for validation."""
    (x, y), (x_val, y_val) = samples(n, 1), samples(m, 2)
    return DeviceData(x, y, np.arange(n) % 4 < 4 * sensitive, x_val, y_val)


def worker(home: Path, data: DeviceData | None = None) -> Worker:
    return Worker("d", TASK, data or device_data(), home)


def device(
    home: Path, action: Action, blobs: Blobs | None = None, data: DeviceData | None = None, **fields: object
) -> Device:
    """What a step may use while it carries out an order; `fields`: of `order`."""
    return worker(home, data).make_device(order(action, **fields), Blobs() if blobs is None else blobs)  # type: ignore[arg-type]


def order(
    action: Action,
    number: int = 1,
    *,
    run: str = "r",
    label: str = "step",
    seed: int | None = None,
    task: TaskSpec = TASK,
) -> Order:
    """An order of a round; its seed comes from the round."""
    return Order(
        id=f"{run}.{number}.{label}.d",
        device_id="d",
        run=run,
        round=number,
        label=label,
        seed=100 + number if seed is None else seed,
        task_fingerprint=task.compute_fingerprint(),
        left_s=60.0,
        step=action.STEP,
        version=action.VERSION,
        body=encode_body(action),
    )


def mixed_data(shared: tuple[np.ndarray, np.ndarray], sensitive: tuple[np.ndarray, np.ndarray]) -> DeviceData:
    """Training samples that may leave their mark on an update, then those that may not; none for validation."""
    (x, y), (x_s, y_s) = shared, sensitive
    marks = np.arange(len(y) + len(y_s)) >= len(y)
    return DeviceData(np.concatenate([x, x_s]), np.concatenate([y, y_s]), marks, x[:0], y[:0])


def manifest_of(home: Path, result: Result) -> Manifest:
    """What the bundle is that a step wrote."""
    assert isinstance(result, Installed), result
    return manifest.read_manifest(home / "bundles" / str(result.release))[0]


def roles_of(home: Path, result: Result) -> tuple[Role, ...]:
    """Of the candidates in the bundle that a step wrote."""
    return tuple(candidate.role for candidate in manifest_of(home, result).candidates)
