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

from edge_agent.device.files import Files, list_numbers
from edge_agent.device.student import replace_mixture
from fedge.bundle.campaign import make_campaign_files
from fedge.bundle.manifest import compute_bundle_digest
from fedge.errors import MALFORMED, DamagedError, FedgeError, ProtocolError, TransportError, raise_as
from fedge.models import weights
from fedge.steps.contract import Failed, Steps, load_device_half
from fedge.steps.mixture.install import Installed
from fedge.system.files import compute_digest, find_highest_release, remove_unread
from fedge.system.moved import alias_members
from fedge.system.stopping import Stop, never
from fedge.tensors.heads import grow_tensors
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Codec, Model, flatten, to_bytes, unflatten, view_bytes
from fedge.wire.messages import BlobRef, Order, Why

if TYPE_CHECKING:
    from edge_agent.device.room import StoredUpdate
    from export import Mixture, Pool
    from fedge.data.task import TaskSpec
    from fedge.models.training import Network
    from fedge.tasks import DeviceData
    from fedge.tensors.codecs import Norms
    from fedge.tensors.layout import Layout, Tensors

log = logging.getLogger("fedge.agent")

CACHED_MODELS: Final = 8
"""Most models that a device keeps beyond its open orders, those used last; the next order often names the same ones."""
KEPT_BUNDLES: Final = 3
"""Newest bundles of the device's own that stay in HOME/bundles."""
PERSONAL: Final = "personal"
"""Name of the files in which a training step keeps what stays on the device."""
T = TypeVar("T")
Fetch = Callable[[BlobRef], "bytes | UnpackedModel"]
"""(reference) -> its blob; unencoded only in a simulation."""
Source = Callable[[int], bytes]
"""(n) -> n random bytes."""
Accepted = Callable[[str], "bool | None"]
"""(id of an order) -> whether the coordinator accepted the order's report; None if no verdict came."""
_NOISE: Final = 78
"""Keeps a simulation's noise apart from the other uses of an order's seed."""


def _decode_model(data: bytes, codec: Codec, layout: Layout) -> Model:
    from fedge.tensors.codecs import decode  # needs zstandard, which an inference-only device may lack

    return decode(data, codec, layout)


_decode = ContextVar("decode", default=_decode_model)


@contextmanager
def cache_models(n_models: int = 8) -> Iterator[None]:
    """Cache the last models that orders name, for simulated devices that get the same ones."""
    before = _decode.set(lru_cache(n_models)(_decode_model))  # cheap: bytes cache their hash
    try:
        yield
    finally:
        _decode.reset(before)


class FailedError(Exception):
    """An order cannot be carried out; the text goes into the log."""


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """A model or an update before encoding (`edge_agent.device.encoding`), read-only."""

    kept: Model | StoredUpdate
    layout: Layout
    norms: Norms

    @property
    def model(self) -> Model:
        """The numbers, read from the disk if they are on it (`edge_agent.device.room`)."""
        return self.kept if isinstance(self.kept, Model) else self.kept.read()


def encode_blob(blob: bytes | UnpackedModel, codec_: Codec) -> bytes:
    """Return the bytes of a blob, which is encoded now if necessary."""
    if isinstance(blob, bytes):
        return blob
    from fedge.tensors.codecs import encode

    return encode(unflatten(blob.model, blob.layout), codec_)


class Reported(Struct, frozen=True, kw_only=True):
    """The last report of a step that asked whether its previous report was accepted, and the answer that it got."""

    order_id: str
    counted: bool | None


class KeptTensors(Struct, frozen=True, kw_only=True):
    """What a training step kept: the step's name, the tensors, and whether they learned from D_L alone."""

    step: str
    tensors: bytes
    shareable: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """The owner's privacy budget at `delta` for all orders. If `max_epsilon` is None: no limit, no accounting."""

    max_epsilon: float | None = None
    delta: float = 1e-5


def make_secret_source(_: Order) -> Source:
    """Return a source of random bytes from the operating system."""
    return os.urandom


def make_repeatable_source(order: Order) -> Source:
    """Return a source of random bytes that anyone with the order can reproduce."""
    return np.random.default_rng((order.seed, _NOISE)).bytes


@alias_members(
    rng="make_rng",
    model="fetch_model",
    take_back="take_update",
    keep="save_kept",
    kept="load_kept",
    overlaid="overlay_kept",
    release="reserve_release",
    untimed="pause_timing",
)
@dataclass
class Device:
    """A device as the step of one order sees it.

    Attributes:
        id: the device's name in the federation.
        task: the task of the federation.
        fingerprint: the task's fingerprint.
        data: the device's samples.
        home: the device's own folder, for what lasts across federations.
        steps: the steps that the device knows, by name.
        min_cohort: fewest devices in a masked sum, as the owner sets it.
        budget: the owner's privacy budget for all orders together.
        order: the order under way.
        source: random bytes for this order's noise; only a simulation can repeat them.
        stop: called between batches; returns whether to stop.
        blobs: the bytes that the result refers to, by digest.
        unpacked: updates that the result refers to and that are not encoded yet, by digest.
        untimed_s: seconds that do not count in the reported duration (`pause_timing`).
        n_updates: number of updates sent in this order so far (`edge_agent.device.encoding`).
        campaign: the campaign whose introduction lets this order's bundle into service; 0 if it enters it at once.
        student: whether the owner wants one network in place of a mixture (docs/methods/student.md).
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
    unpacked: dict[str, UnpackedModel] = field(default_factory=dict)
    untimed_s: float = 0.0
    n_updates: int = 0
    campaign: int = 0
    student: bool = False
    _keeps: bool = False
    _asks: bool = False

    @contextmanager
    def pause_timing(self) -> Iterator[None]:
        """Leave the work within this context, on sensitive samples, out of the reported duration."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.untimed_s += time.perf_counter() - began

    @cached_property
    def network(self) -> Network:
        """The task's network. All devices of a thread share it, so do not rely on its present weights."""
        frozen = weights.find_device_weights(self.task)
        if frozen is not None and not weights.has_weights(frozen.digest):
            weights.store_weights(self.fetch(frozen))
        return self._network()

    @property
    def layout(self) -> Layout:
        """The layout of the network."""
        return self.network.layout

    @property
    def seed(self) -> int:
        """The seed of this order."""
        return self.order.seed

    def make_rng(self, *stream: int) -> np.random.Generator:
        """Make this order's generator of random numbers for a stream; without a number, it is stream 0."""
        return np.random.default_rng([self.seed, *stream] if stream else self.seed)

    @cached_property
    def files(self) -> Files:
        """The device's durable files of this federation and method."""
        return Files(self.home, self.order.run, self.order.round)

    # ------------------------------------------------------------------------------------------------------ reports

    def was_counted(self) -> bool | None:
        """Return whether the coordinator accepted this step's last report; None without a report or a verdict.

        A report is accepted if it came in time and answered its order. The device does not learn how its round used
        the report. Only reports of orders in which the step asked are known, so a step asks in each order or in none.
        A refusal is no report. A repeated order gets the same answer again.

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
        last = decode_kept(data, Reported)
        return last.counted if last.order_id == self.order.id else self._accepted(last.order_id)

    @property
    def _reported(self) -> str:
        return f"reported-{self.order.step}"

    def record_report(self) -> None:
        """Remember that this order ends with a report, for a step that asks whether it was accepted.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self._asks:
            report = Reported(order_id=self.order.id, counted=self._counted)
            self.files.write(self._reported, msgspec.msgpack.encode(report))

    # ------------------------------------------------------------------------------------------------------- models

    def fetch(self, ref: BlobRef) -> bytes:
        """Return the bytes of a blob that an order names."""
        return encode_blob(self._fetch(ref), ref.codec)

    def fetch_model(self, ref: BlobRef, layout: Layout | None = None) -> Model:
        """Return a model that an order names, or the part that `layout` describes. Do not change the returned model."""
        blob, layout = self._fetch(ref), layout or self.layout
        if isinstance(blob, UnpackedModel) and blob.layout == layout:
            return blob.model
        return _decode.get()(encode_blob(blob, ref.codec), ref.codec, layout)

    def send(self, data: bytes, codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Attach bytes to the result, and return the reference for it. `codec_`: the codec if they are tensors."""
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data), codec=codec_)
        self.blobs[ref.digest] = data
        return ref

    def take_update(self, ref: BlobRef) -> Model:
        """Withdraw an update of the whole network that was to be sent, and return it."""
        if (kept := self.unpacked.pop(ref.digest, None)) is not None:
            return kept.model
        return _decode_model(self.blobs.pop(ref.digest), ref.codec, self.layout)

    def save_kept(self, layers: Layers | Tensors, *, shareable: bool = False) -> None:
        """Keep layers on the device, or tensors by name, for later rounds of this step and for the bundle.

        `shareable`: whether they learned from D_L alone, so that the owner may let them leave.

        Raises:
            FailedError: this order has kept tensors already, which these would replace.
        """
        if self._keeps:
            raise FailedError("a step keeps tensors once in an order: give all to one call of device.save_kept")
        self._keeps = True
        tensors = layers.get_tensors() if isinstance(layers, Layers) else layers
        kept = KeptTensors(step=self.order.step, tensors=to_bytes(tensors), shareable=shareable)
        self.files.write(PERSONAL, msgspec.msgpack.encode(kept))

    def may_share_kept(self) -> bool:
        """Return whether what was kept last may leave the device, if its owner agrees."""
        data = self.files.read(PERSONAL)
        return data is not None and decode_kept(data, KeptTensors).shareable

    def load_kept(self, step: str, layout: Layout, *, before: int | None = None) -> Layers | None:
        """Return what a training step kept last, up to this round or `before` another; None if nothing.

        If classes have joined since, it has their outputs, too.

        Raises:
            FailedError: another step kept the tensors.
            ProtocolError: `layout`, because the tensors belong to another network.
            StoreError: the file cannot be read.
        """
        data = self.files.read(PERSONAL, before=before)
        if data is None:
            return None
        found = decode_kept(data, KeptTensors)
        if found.step != step:
            raise FailedError(f"step {found.step} kept the tensors on this device, but the order names {step}")
        return Layers(layout, flatten(grow_tensors(view_bytes(found.tensors), layout), layout))

    def overlay_kept(self, step: str, model: Model, kept: Layers | None) -> Model:
        """Combine a model and what a training step kept into one network with their joint predictions."""
        return model if kept is None else overlay_tensors(self.steps, step, model, kept, self.layout)

    # ------------------------------------------------------------------------------------------------------ bundles

    def write_bundle(
        self, made: Mixture | Pool, method: str, metrics: Mapping[str, float], *, before: Mixture | None = None
    ) -> Installed:
        """Write a bundle with the next release number, and return the result of the step.

        The bundle is checked against torch on unmarked validation samples alone, since a failure is reported. A
        repeated order writes the same release as before. `before` is the mixture before its models learned from the
        validation samples, if they have. If the owner wants a student, the bundle has it in place of the mixture,
        unless it is worse (docs/methods/student.md).
        """
        from export import write_bundle

        if self.student:
            made, metrics = replace_mixture(self, made, metrics)
        release, data = self.reserve_release(), self.data
        write_bundle(
            self.home / "bundles" / str(release),
            task=self.task,
            layout=self.layout,
            mixture=made,
            validation=data.x_val,
            targets=data.y_val,
            before=before,
            compared=data.shared_validation[0] if data.has_sensitive else None,
            release=release,
            method=method,
            metrics=metrics,
            beside=make_campaign_files(self.campaign),
            quarters=data.quarters,
        )
        prune_bundles(self.home)
        return Installed(release=release)

    def reserve_release(self) -> int:
        """Return the release of this order's bundle: the next release, or that of the first try if it is repeated."""
        with suppress(*MALFORMED):
            order_id, number = msgspec.msgpack.decode(self.files.read("release") or b"", type=tuple[str, int])
            if order_id == self.order.id:
                return number
        number = find_highest_release(self.home) + 1
        self.files.write("release", msgspec.msgpack.encode((self.order.id, number)))
        return number


def prune_bundles(home: Path) -> None:
    """Delete old bundles in HOME/bundles, keeping the `KEPT_BUNDLES` highest releases.

    The bundle in service, the bundle to revert to (HOME/slot-a, slot-b: `deploy.updates.slots`) and bundles that are
    being read stay, too.
    """
    slots = set()
    for slot in home.glob("slot-?"):
        with suppress(OSError):
            slots.add(compute_bundle_digest(slot))
    for number in sorted(list_numbers(home / "bundles"))[:-KEPT_BUNDLES]:
        folder = home / "bundles" / str(number)
        with suppress(OSError):  # in use, or damaged and worth a look by the owner
            if compute_bundle_digest(folder) not in slots:
                remove_unread(folder)


def overlay_tensors(steps: Steps, step: str, model: Model, kept: Layers, layout: Layout) -> Model:
    """Combine a model with what a training step kept, by the step's device half.

    Raises:
        FailedError: the device does not know the step.
    """
    if step not in steps:
        raise FailedError(f"step {step} kept tensors on this device, but is not installed any more")
    result: Model = load_device_half(steps[step]).overlay(model, kept, layout)
    return result


def decode_kept(data: bytes, kind: type[T]) -> T:
    """Decode a struct of this kind that a step kept in `Device.files`, from MessagePack.

    Raises:
        DamagedError: it is damaged.
    """
    with raise_as(DamagedError, "what was kept for later rounds cannot be read", on=msgspec.DecodeError):
        return msgspec.msgpack.decode(data, type=kind)


def make_failure(error: Exception) -> Failed:
    """Map an error to a code for the coordinator; the error's text goes into the log."""
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
