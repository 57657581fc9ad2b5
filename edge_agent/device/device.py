"""All that a step may use of a device: task, network, data, random numbers, durable files, blobs.

All randomness comes from the order's seed, so repeating an order gives the same bytes. State that stays on the device
between orders is kept in `Device.files`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from edge_agent.device.files import Files, numbers_in
from fedge.bundle.manifest import digest_in
from fedge.errors import MALFORMED, DamagedError, FedgeError, ProtocolError, TransportError, failing_as
from fedge.models import weights
from fedge.steps.contract import Failed, Steps, device_half
from fedge.steps.mixture.install import Installed
from fedge.system.files import digest_of, highest_release, remove_unread
from fedge.system.stopping import Stop, never
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Codec, Model, flatten, to_bytes, unflatten, views_of
from fedge.wire.messages import BlobRef, Order, Why

if TYPE_CHECKING:
    from edge_agent.device.room import Stored
    from export import Mixture, Pool
    from fedge.data.task import TaskSpec
    from fedge.models.training import Network
    from fedge.tasks import DeviceData
    from fedge.tensors.codecs import Norms
    from fedge.tensors.layout import Layout, Tensors

log = logging.getLogger("fedge.agent")

CACHED_MODELS: Final = 8
"""Models that a device keeps beyond its open orders, those used last: the next order often names the same ones."""
KEPT_BUNDLES: Final = 3
"""Bundles of the device's own that stay in HOME/bundles."""
PERSONAL: Final = "personal"
"""Name of the files in which a training step keeps what stays on the device."""
T = TypeVar("T")
Fetch = Callable[[BlobRef], "bytes | Unpacked"]
"""ref -> its blob; unencoded only without a real device."""
Source = Callable[[int], bytes]
"""n -> n random bytes."""
Accepted = Callable[[str], "bool | None"]
"""Id of an order -> whether the coordinator accepted its report; None: no word of it came."""
_NOISE: Final = 78
"""Keeps a simulation's noise apart from the other uses of an order's seed."""


def _plainly(data: bytes, codec: Codec, layout: Layout) -> Model:
    from fedge.tensors.codecs import decode  # needs zstandard, which an inference-only device may lack

    return decode(data, codec, layout)


_decode = ContextVar("decode", default=_plainly)


@contextmanager
def remembering(n_models: int = 8) -> Iterator[None]:
    """Context in which the last models named by orders are cached, for simulated devices that get the same ones."""
    before = _decode.set(lru_cache(n_models)(_plainly))  # cheap: bytes cache their hash
    try:
        yield
    finally:
        _decode.reset(before)


class FailedError(Exception):
    """The order cannot be done; the text goes into the log."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A model or an update before encoding (`edge_agent.device.encoding`): read-only, what decoding its bytes gives."""

    kept: Model | Stored
    layout: Layout
    norms: Norms

    @property
    def model(self) -> Model:
        """The numbers, read from the disk if they are there (`edge_agent.device.room`)."""
        return self.kept if isinstance(self.kept, Model) else self.kept.read()


def as_bytes(blob: bytes | Unpacked, codec_: Codec) -> bytes:
    """The bytes of a blob, which are encoded now if they are not yet."""
    if isinstance(blob, bytes):
        return blob
    from fedge.tensors.codecs import encode

    return encode(unflatten(blob.model, blob.layout), codec_)


class Reported(Struct, frozen=True, kw_only=True):
    """The last report of a step that asked whether the one before it counted, and what it was told."""

    order_id: str
    counted: bool | None


class Kept(Struct, frozen=True, kw_only=True):
    """What a training step kept: its name, the tensors, and whether they learned from D_L alone."""

    step: str
    tensors: bytes
    shareable: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """The privacy budget at `delta` that the device's owner sets for all orders; None: no limit, no accounting."""

    max_epsilon: float | None = None
    delta: float = 1e-5


def secret(_: Order) -> Source:
    """Random bytes from the operating system."""
    return os.urandom


def repeatable(order: Order) -> Source:
    """Random bytes that anyone with the order can reproduce, for repeatable simulations."""
    return np.random.default_rng((order.seed, _NOISE)).bytes


@dataclass
class Device:
    """One device during one order.

    Attributes:
        id: the device's name in the federation.
        task: what is learned.
        fingerprint: of the task.
        data: the device's samples.
        home: its own folder, for what lasts across federations.
        steps: the steps that it knows, by name.
        min_cohort: fewest devices in a masked sum, as the owner sets it.
        budget: the owner's privacy budget for all orders together.
        order: what it is asked.
        source: random bytes for this order's noise; only a simulation can repeat them.
        stop: whether to stop, asked between batches.
        blobs: what the result refers to, by digest.
        unpacked: the same, of updates that are not encoded yet.
        untimed_s: see `untimed`.
        n_updates: those that were sent in this order so far (`edge_agent.device.encoding`).
    """

    id: str
    task: TaskSpec
    fingerprint: str
    data: DeviceData
    home: Path
    steps: Steps
    min_cohort: int
    budget: Budget
    order: Order
    source: Source
    _fetch: Fetch
    _network: Callable[[], Network]
    _accepted: Accepted
    stop: Stop = never
    blobs: dict[str, bytes] = field(default_factory=dict)
    unpacked: dict[str, Unpacked] = field(default_factory=dict)
    untimed_s: float = 0.0
    n_updates: int = 0
    _keeps: bool = False
    _asks: bool = False

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Work on sensitive samples; its duration is not reported."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.untimed_s += time.perf_counter() - began

    @cached_property
    def network(self) -> Network:
        """The task's network, shared by all devices of a thread: do not rely on its present weights."""
        frozen = weights.needed_on_devices(self.task)
        if frozen is not None and not weights.has(frozen.digest):
            weights.keep(self.fetch(frozen))
        return self._network()

    @property
    def layout(self) -> Layout:
        """Of the network."""
        return self.network.layout

    @property
    def seed(self) -> int:
        """Of this order."""
        return self.order.seed

    def rng(self, *stream: int) -> np.random.Generator:
        """Random numbers of this order, separate for each stream. Stream 0 is the one without a number."""
        return np.random.default_rng([self.seed, *stream] if stream else self.seed)

    @cached_property
    def files(self) -> Files:
        """Durable files of this federation and method."""
        return Files(self.home, self.order.run, self.order.round)

    # ------------------------------------------------------------------------------------------------------ reports

    def counted(self) -> bool | None:
        """Whether the coordinator accepted this step's last report; None: there was none, or no word of it came.

        It is accepted if it came in time and answered its order; how much its round made of it, nobody tells the
        device. Only reports of orders in which the step asked are known, so a step asks in each, or in none; a refusal
        is no report. A repeated order is told the same again.

        Raises:
            StoreError: it cannot be read.
        """
        self._asks = True
        return self._counted

    @cached_property
    def _counted(self) -> bool | None:
        data = self.files.read(self._reported)
        if data is None:
            return None
        last = decoded(data, Reported)
        return last.counted if last.order_id == self.order.id else self._accepted(last.order_id)

    @property
    def _reported(self) -> str:
        return f"reported-{self.order.step}"

    def note_report(self) -> None:
        """Remember that this order ends with a report, for a step that asks whether it counted.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self._asks:
            report = Reported(order_id=self.order.id, counted=self._counted)
            self.files.write(self._reported, msgspec.msgpack.encode(report))

    # ------------------------------------------------------------------------------------------------------- models

    def fetch(self, ref: BlobRef) -> bytes:
        """The bytes of a blob that an order names."""
        return as_bytes(self._fetch(ref), ref.codec)

    def model(self, ref: BlobRef, layout: Layout | None = None) -> Model:
        """A model of the task's network that an order names, or the part that `layout` describes; not to be changed."""
        blob, layout = self._fetch(ref), layout or self.layout
        if isinstance(blob, Unpacked) and blob.layout == layout:
            return blob.model
        return _decode.get()(as_bytes(blob, ref.codec), ref.codec, layout)

    def send(self, data: bytes, codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Attach bytes to the result, which refers to them by the returned reference; `codec_`: of tensors."""
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data), codec=codec_)
        self.blobs[ref.digest] = data
        return ref

    def take_back(self, ref: BlobRef) -> Model:
        """Withdraw an update of the whole network that was to be sent."""
        if (kept := self.unpacked.pop(ref.digest, None)) is not None:
            return kept.model
        return _plainly(self.blobs.pop(ref.digest), ref.codec, self.layout)

    def keep(self, layers: Layers | Tensors, *, shareable: bool = False) -> None:
        """Keep layers on the device, or tensors by name, for later rounds of this step and for the bundle.

        `shareable`: whether they learned from D_L alone, so that the owner may let them leave.

        Raises:
            FailedError: this order has kept some already, which these would replace.
        """
        if self._keeps:
            raise FailedError("a step keeps tensors once in an order: give all of them to one call of device.keep")
        self._keeps = True
        tensors = layers.tensors() if isinstance(layers, Layers) else layers
        kept = Kept(step=self.order.step, tensors=to_bytes(tensors), shareable=shareable)
        self.files.write(PERSONAL, msgspec.msgpack.encode(kept))

    def may_share_kept(self) -> bool:
        """Whether what was kept last may leave the device, if its owner agrees."""
        data = self.files.read(PERSONAL)
        return data is not None and decoded(data, Kept).shareable

    def kept(self, step: str, layout: Layout, *, before: int | None = None) -> Layers | None:
        """What a training step of this name kept last, up to this round or before another; None: nothing.

        Raises:
            FailedError: another step kept it.
            ProtocolError: `layout`: it belongs to another network.
            StoreError: it cannot be read.
        """
        data = self.files.read(PERSONAL, before=before)
        if data is None:
            return None
        found = decoded(data, Kept)
        if found.step != step:
            raise FailedError(f"step {found.step} kept something here, the order speaks of {step}")
        return Layers(layout, flatten(views_of(found.tensors), layout))

    def overlaid(self, step: str, model: Model, kept: Layers | None) -> Model:
        """One network that predicts what `model` and what a training step kept predict together."""
        return model if kept is None else overlay(self.steps, step, model, kept, self.layout)

    # ------------------------------------------------------------------------------------------------------ bundles

    def write_bundle(self, made: Mixture | Pool, method: str, metrics: Mapping[str, float]) -> Installed:
        """Write a bundle with the next release number; returns the result of the step.

        It is checked against torch on unmarked validation samples alone, since a failure is reported. A repeated order
        writes the same release as before.
        """
        from export import write_bundle

        release, data = self.release(), self.data
        write_bundle(
            self.home / "bundles" / str(release),
            task=self.task,
            layout=self.layout,
            mixture=made,
            validation=data.x_val,
            compared=data.shared_validation[0] if data.any_sensitive else None,
            release=release,
            method=method,
            metrics=metrics,
        )
        prune_bundles(self.home)
        return Installed(release=release)

    def release(self) -> int:
        """The release of this order's bundle: the next one, or that of the first attempt if repeated."""
        with suppress(*MALFORMED):
            order_id, number = msgspec.msgpack.decode(self.files.read("release") or b"", type=tuple[str, int])
            if order_id == self.order.id:
                return number
        number = highest_release(self.home) + 1
        self.files.write("release", msgspec.msgpack.encode((self.order.id, number)))
        return number


def prune_bundles(home: Path) -> None:
    """Delete old bundles in HOME/bundles, keeping the `KEPT_BUNDLES` highest releases.

    The bundle in service, the one to revert to (HOME/slot-a, slot-b: `deploy.updates.slots`) and any that is being read
    stay, too.
    """
    slots = set()
    for slot in home.glob("slot-?"):
        with suppress(OSError):
            slots.add(digest_in(slot))
    for number in sorted(numbers_in(home / "bundles"))[:-KEPT_BUNDLES]:
        folder = home / "bundles" / str(number)
        with suppress(OSError):  # in use, or damaged and worth a look by the owner
            if digest_in(folder) not in slots:
                remove_unread(folder)


def overlay(steps: Steps, step: str, model: Model, kept: Layers, layout: Layout) -> Model:
    """Combine a model with what a training step kept, by the step's device half.

    Raises:
        FailedError: the device does not know the step.
    """
    if step not in steps:
        raise FailedError(f"step {step} kept something here, and is not installed any more")
    result: Model = device_half(steps[step]).overlay(model, kept, layout)
    return result


def decoded(data: bytes, kind: type[T]) -> T:
    """A struct of this kind that a step kept in `Device.files`, as MessagePack.

    Raises:
        DamagedError: it is damaged.
    """
    with failing_as(DamagedError, "what was kept for later rounds cannot be read", on=msgspec.DecodeError):
        return msgspec.msgpack.decode(data, type=kind)


def failed(error: Exception) -> Failed:
    """Map an error to a code for the coordinator; its text goes into the log."""
    match error:
        case ProtocolError(name="not-finite"):
            why = Why.NOT_FINITE
        case TransportError() | ProtocolError(name="stalled"):
            why = Why.UNREACHABLE
        case ProtocolError():
            why = Why.MALFORMED
        case FedgeError() | FailedError() | ValueError():
            why = Why.UNFIT
        case _:
            return Failed(why=Why.ERROR, reason=f"{type(error).__name__}: {error}")
    return Failed(why=why, reason=str(error))
