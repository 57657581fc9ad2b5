"""The messages of the wire: typed, versioned, schema-checked (MessagePack by msgspec).

A message is an envelope `[version, body]`; `body` is one of the structs below, told apart by its `type` field. Unknown
types, wrong types and values out of range are refused by `decode` before anybody sees them. Tensors are never part of a
message: a `BlobRef` names them by SHA-256, and `fedge.transfer` moves the bytes. What a device can be asked is not
listed here: an order names a step, whose contract is in `fedge.steps`.

Which message travels on which topic: `fedge.topics`. What each one reveals: docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import StrEnum
from types import NoneType
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from fedge.errors import MALFORMED, ProtocolError

MAX_MESSAGE_BYTES: Final = 60 * 1024
"""No message (chunks of tensors are not messages) is larger: it fits a 64 KiB packet with its topic."""
MAX_ROOTS: Final = 12
"""Of a repository in one announcement, some 2 KB each: a device that missed more of them needs one by hand."""

MAX_SITE: Final = 160
"""Devices behind one relay: with what they say of themselves they fit into its status."""
MAX_LEFT_S: Final = 24 * 3600.0
"""No order may take longer: one that was forged or lost is over within a day."""

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")]
OrderId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=1000)]


class Codec(StrEnum):
    """How the tensors of a blob are encoded (`fedge.codec`)."""

    FLOAT32 = "float32"  # plain safetensors, exact
    FLOAT32_ZSTD = "float32+zstd"  # exact, compressed
    BFLOAT16 = "bfloat16+zstd"  # about 3.3 times smaller than float32
    INT8 = "int8+zstd"  # one scale per tensor; about 8 times smaller
    TOP = "top1+zstd"  # the largest hundredth, in 8 bits; the rest waits on the device


class Role(StrEnum):
    """What a candidate of a device's mixture is (fedge.md section 1); the order is that of the mixture."""

    PRIVATE = "private"
    GLOBAL = "global"
    EXPERT = "expert"
    LOCAL = "local"

    @property
    def is_shared(self) -> bool:
        """Several devices have such a model; of those the top rule chooses."""
        return self in {Role.GLOBAL, Role.EXPERT}


class _Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Version 1: transfer and what runtimes and supervisors say to each other, unchanged since fedge 0.1."""

    VERSION: ClassVar[int] = 1


class _Message2(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Version 2: what agents and coordinators say to each other. Fields that we do not know are ignored."""

    VERSION: ClassVar[int] = 2


class BlobRef(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names the bytes of some tensors: they are what hashes to `digest`, wherever they come from."""

    digest: Digest
    size_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    codec: Codec = Codec.FLOAT32  # of a file that holds no tensors it says nothing


# ---------------------------------------------------------------------------------------------- what a device is


class Presence(StrEnum):
    """Life of a device as its retained status says it."""

    ONLINE = "online"
    SLEEPING = "sleeping"  # said good-bye, will come back
    OFFLINE = "offline"  # the last will: the broker lost it


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a device can do, told at birth."""

    trains: bool  # False: an inference-only device, without torch
    fedge_version: Text = ""
    python_version: Text = ""
    machine: Text = ""  # such as "aarch64"
    cpu_count: Count = 1
    steps: dict[Id, Count] = {}  # the steps that the device knows, with their versions


class Status(_Message2, frozen=True, kw_only=True, tag="status"):
    """Birth and death certificate, retained, and the last will. `incarnation` is new at each start of the agent."""

    device_id: Id
    incarnation: Id
    presence: Presence
    task_fingerprint: Text = ""
    n_samples: Count = 0  # training samples not marked sensitive, |D_L|; how many are marked is never told
    release: Count = 0  # the highest of a bundle that the device has had
    capabilities: Capabilities | None = None
    withholds: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()  # kinds (`fedge.step.Reveals`) that may not leave
    site: Annotated[tuple[SiteDevice, ...], Meta(max_length=MAX_SITE)] | None = None  # of a relay: who is behind it


class Context(_Message2, frozen=True, kw_only=True, tag="context"):
    """What psutil sees on a device now; None where the device has no such sensor."""

    device_id: Id
    at: float | None = None  # seconds since the epoch, by the device's clock
    cpu_ghz: NonNegative | None = None
    load: NonNegative | None = None  # 1-minute load average / number of CPUs
    free_ram_gb: NonNegative | None = None
    free_disk_gb: NonNegative | None = None
    battery: Share | None = None  # 1 = full; None = mains
    temperature_c: float | None = None
    link_mbit_s: NonNegative | None = None  # mean of both ways; agents do not measure it
    n_samples: Count = 0  # samples whose model may be uploaded, |D_L|


class SiteDevice(Struct, frozen=True, array_like=True):
    """A device behind a relay, as its own status and context say it. `id`: its name on its site."""

    id: Id
    n_samples: Count
    incarnation: Annotated[str, Meta(max_length=100)]
    trains: bool
    drift: bool
    release: Count
    withholds: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    context: Context | None = None


# ---------------------------------------------------------------------------------------------- orders and reports


class Difference(Struct, frozen=True, kw_only=True):
    """Another way to a model: the model `base` and the bytes of `blob`, a difference (`fedge.codec.moved`)."""

    base: Digest
    blob: BlobRef


class Order(_Message2, frozen=True, kw_only=True, tag="order"):
    """One piece of work for one device. Repeated until its report is acknowledged; `id` is its identity.

    `body` is the action of the step (`fedge.step`); who does not know the step can still answer and store the order.
    `differences`: by the digest of a model that the action names, or of one on the way to it. A device may use them.
    """

    id: OrderId  # "{run}.{round}.{label}.{device}"; the same work has the same id after a restart of the coordinator
    device_id: Id
    run: Id
    round: Count
    label: Id  # what the method calls this piece of work; unique within a round
    seed: Count  # all of the device's random numbers in this order come from it
    task_fingerprint: Text
    left_s: Annotated[float, Meta(gt=0, le=MAX_LEFT_S)]  # from now on, whatever clocks say; also the message expiry
    step: Id
    version: Count = 1  # of the step
    body: bytes
    differences: Annotated[dict[Digest, Difference], Meta(max_length=256)] = {}


class Outcome(StrEnum):
    """How an order ended on its device."""

    DONE = "done"
    DECLINED = "declined"  # not now: RAM, temperature, battery, no data
    FAILED = "failed"
    UNSUPPORTED = "unsupported"  # the device does not know the step, or not in this version


class Why(StrEnum):
    """Why there is no result: all that a device tells of it. The rest is in its own log."""

    NO_DATA = "no-data"
    NO_TRAINING = "no-training"
    NOT_ALLOWED = "not-allowed"
    LEARNED_FROM_ALL = "learned-from-all"
    NOTHING_KEPT = "nothing-kept"
    DISK = "disk"
    MEMORY = "memory"
    HOT = "hot"
    BATTERY = "battery"
    BUDGET = "budget"
    OTHER_TASK = "other-task"
    TOO_FEW = "too-few"
    STRANGERS = "strangers"
    UNREACHABLE = "unreachable"
    MALFORMED = "malformed"
    NOT_FINITE = "not-finite"
    UNFIT = "unfit"
    ERROR = "error"
    UNKNOWN_STEP = "unknown-step"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Why | None:
        return cls.OTHER if isinstance(value, str) else None  # of a newer fedge

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]


_WORDS: Final = {
    Why.NO_DATA: "it has no samples that may be used for this",
    Why.NO_TRAINING: "it does not train",
    Why.NOT_ALLOWED: "its owner does not allow it",
    Why.LEARNED_FROM_ALL: "what it keeps has learned from all of its samples, and stays there",
    Why.NOTHING_KEPT: "it keeps nothing of this run",
    Why.DISK: "its disk has no room for the models",
    Why.MEMORY: "it has too little free memory",
    Why.HOT: "it is too hot",
    Why.BATTERY: "its battery is too low",
    Why.BUDGET: "its privacy budget is spent, or does not allow this",
    Why.OTHER_TASK: "its task is another one",
    Why.TOO_FEW: "the masked sum would cover too few devices, or differ by too few from an earlier one",
    Why.STRANGERS: "nobody of the federation vouches for a device that it was to be summed with",
    Why.UNREACHABLE: "it cannot fetch a model",
    Why.MALFORMED: "the order or a model in it cannot be read there",
    Why.NOT_FINITE: "training diverged, or a model in the order is not finite",
    Why.UNFIT: "the order does not fit what the device has",
    Why.ERROR: "its own code failed",
    Why.UNKNOWN_STEP: "it does not know the step in this version",
    Why.OTHER: "for a reason that this fedge does not know",
}


class Report(_Message2, frozen=True, kw_only=True, tag="report"):
    """What came of an order. Kept by the device and repeated until it is acknowledged."""

    order_id: OrderId
    device_id: Id
    seconds: NonNegative = 0.0  # time of the work on samples that are not marked; 0: not told
    outcome: Outcome
    why: Why | None = None  # of all but `done`
    body: bytes = b""  # of `done`: the result of the step (`fedge.step`)
    blobs: Annotated[tuple[BlobRef, ...], Meta(max_length=64)] = ()  # that the result names


class Ack(_Message2, frozen=True, kw_only=True, tag="ack"):
    """The coordinator's last word on a report. Also sent again for a report that is repeated."""

    order_id: OrderId
    device_id: Id
    accepted: bool
    reason: Text = ""  # why not: a ProtocolError name and detail


# ------------------------------------------------------------------------------------------------------- transfer


class Want(_Message, frozen=True, kw_only=True, tag="want"):
    """The receiver's request for the byte ranges [start, end) of a blob that it still lacks."""

    device_id: Id  # who asks, or, from the coordinator, whom it asks
    digest: Digest
    ranges: Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1, max_length=256)]
    listening: Count = 0  # drawn with each subscription, and when chunks on their way may be lost; 0: it does not say


# ------------------------------------------------------------------------------------------------------- rollouts


class RolloutState(StrEnum):
    """Where a rollout stands; devices install while it is running, and those that come late when it is done."""

    RUNNING = "running"
    PAUSED = "paused"
    ABORTED = "aborted"  # devices that run the new release go back to the one before
    DONE = "done"  # all stages are behind it


class Rollout(_Message, frozen=True, kw_only=True, tag="rollout"):
    """Which release how much of the fleet shall run. That the release is genuine the signed metadata say, not this.

    A device takes part if it is one of `canaries`, or if its place (`fedge.rollout.place`, in [0, 1)) is below `share`.
    `version` counts up with everything that is announced, also of other rollouts.
    """

    id: Id
    state: RolloutState
    target: Text  # of the signed metadata: the path of the bundle's manifest
    release: Count
    canaries: Annotated[tuple[Id, ...], Meta(max_length=256)] = ()
    share: Share
    metadata: Annotated[dict[Text, BlobRef], Meta(max_length=128)]  # files of the signed repository by name
    version: Count = 0


class Announcement(_Message, frozen=True, kw_only=True, tag="announcement"):
    """A rollout as it is published, retained: signed by the repository's role `timestamp`.

    rollout: a `Rollout`, encoded; signatures: in hex, by key, of `fedge.rollout.signed_bytes`; roots: the newest of the
    repository, by name: they say which key it is.
    """

    rollout: bytes
    signatures: Annotated[dict[Text, Text], Meta(max_length=16)]
    roots: Annotated[dict[Text, bytes], Meta(max_length=MAX_ROOTS)] = {}


class Phase(StrEnum):
    """What a device's runtime does with the release of a rollout."""

    SERVING = "serving"  # it answers; `reason`, if any: why the last announcement does not count
    FETCHING = "fetching"
    TRIAL = "trial"  # it answers, the old one is ready
    REFUSED = "refused"  # never switched to it
    ROLLED_BACK = "rolled_back"  # switched, then went back
    FAILED = "failed"  # could not be fetched or stored; will be tried again


class Quality(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bundle on those of a device's own samples that are not marked sensitive; None where nothing was measured."""

    n: Count  # validation samples that are not marked
    accuracy: Share | None = None  # on labelled validation samples
    gate_entropy: Share | None = None  # mean over samples, 1 where all candidates have equal shares; None: only one
    free_energy: float | None = None  # mean over samples, in deviations from the bundle's reference
    latency_ms: NonNegative | None = None  # median of single samples


class Health(_Message, frozen=True, kw_only=True, tag="health"):
    """How a device's runtime is; retained, published at each change and now and then."""

    device_id: Id
    at: NonNegative  # seconds since the epoch, by the device's clock
    phase: Phase
    release: Count  # of the bundle that answers; 0: none
    bundle_digest: Digest | None = None  # of a bundle that came by a rollout; what others hold stays on the device
    rollout: Id | None = None  # the last one that it took part in
    reason: Text = ""
    before: Quality | None = None  # the bundle that answered when the rollout's came, if it came by one, too
    now: Quality | None = None  # the rollout's
    temperature_c: float | None = None
    n_predictions: Count = 0  # since the start of the process
    n_failed: Count = 0
    drift: bool = False  # energies or gate have left the bundle's reference


Message = Status | Context | Order | Report | Ack | Want | Rollout | Announcement | Health

M = TypeVar("M", Status, Context, Order, Report, Ack, Want, Rollout, Announcement, Health)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Serialise a message.

    Raises:
        ValueError: it is larger than `MAX_MESSAGE_BYTES` or holds a NaN or an infinity (a bug of ours: never sent).
    """
    data = _encoder.encode((message.VERSION, message))
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    if not all_finite(msgspec.to_builtins(message)):
        raise ValueError(f"{type(message).__name__} holds a number that is not finite")
    return data


def decode(data: bytes | bytearray | memoryview, kind: type[M]) -> M:
    """Parse bytes from outside into a message of the kind that its topic carries.

    Raises:
        ProtocolError: `oversized`, `malformed`, `version`, `unexpected-type` or `not-finite`.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("oversized", f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES} allowed")
    try:
        version, body = _decoder.decode(data)
    except MALFORMED as error:
        raise ProtocolError("malformed", str(error)) from error
    if version != kind.VERSION:
        raise ProtocolError("version", f"peer speaks version {version}, we speak {kind.VERSION}: update the older side")
    try:
        message = _body_decoder.decode(body)
    except MALFORMED as error:
        raise ProtocolError("malformed", str(error)) from error
    if not isinstance(message, kind):
        raise ProtocolError("unexpected-type", f"{type(message).__name__} where {kind.__name__} belongs")
    if not all_finite(msgspec.to_builtins(message)):
        raise ProtocolError("not-finite", f"{kind.__name__} holds NaN or infinity")
    return message


def is_outdated(data: bytes | bytearray | memoryview) -> bool:
    """Whether these bytes are a message between agent and coordinator of a version before ours."""
    try:
        version, _ = _decoder.decode(data)
    except MALFORMED:
        return False
    return 0 < version < Status.VERSION


def all_finite(value: object) -> bool:
    """Whether no number in a value of plain containers is NaN or infinite."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(all_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(all_finite(item) for item in value)
    return True


def blobs_of(value: object) -> Iterator[BlobRef]:
    """All tensors that a message, or any other value made of structs and containers, names."""
    if isinstance(value, BlobRef):
        yield value
        return
    held: Iterable[object] = ()
    if isinstance(value, Struct):
        held = (getattr(value, field) for field in value.__struct_fields__)
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, list | tuple):
        held = value
    for item in held:
        if not isinstance(item, _PLAIN):  # most of a large state is: no generator for each
            yield from blobs_of(item)


_PLAIN: Final = (int, float, str, bytes, NoneType)


def back_from(ref: BlobRef, differences: Mapping[str, Difference]) -> Iterator[tuple[str, Difference]]:
    """The differences that lead to a model, the last one first, as long as together they are smaller than it is.

    With each the digest of the model that it leads to.
    """
    digest, left, untried = ref.digest, ref.size_bytes, dict(differences)
    while (found := untried.pop(digest, None)) is not None and (left := left - found.blob.size_bytes) > 0:
        yield digest, found
        digest = found.base


def way_to(
    ref: BlobRef, differences: Mapping[str, Difference], held: Container[str]
) -> tuple[str, tuple[BlobRef, ...]] | None:
    """How to come to a model from one that is held: its digest, and the differences in their order; None: no way."""
    steps: tuple[BlobRef, ...] = ()
    for _, difference in back_from(ref, differences):
        steps = (difference.blob, *steps)
        if difference.base in held:
            return difference.base, steps
    return None
