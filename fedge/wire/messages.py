"""The messages on the wire: typed, versioned, schema-checked (MessagePack by msgspec).

A message is an envelope `[version, body]`; `body` is one of the structs below, identified by its `type` field.
`decode_message` refuses unknown types, wrong types and values out of range. Tensors are never part of a message: a
`BlobRef` names them by SHA-256, and `fedge.wire.transfer` moves the bytes. Requests to devices are not listed here: an
order names a step, whose contract is in `fedge.steps`.

Topics: `fedge.wire.topics`. What each message reveals: docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import StrEnum
from types import NoneType
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from fedge.data.classes import AddedClasses
from fedge.errors import MALFORMED, ProtocolError
from fedge.system.text import Worded
from fedge.tensors.layout import Codec

MAX_MESSAGE_BYTES: Final = 60 * 1024
"""Largest message, so that it fits into a 64 KiB packet with its topic. Chunks of tensors are not messages."""
MAX_BODY_BYTES: Final = MAX_MESSAGE_BYTES - 8 * 1024
"""Largest action or result, so that its order or report has room for names, references and times."""
MAX_ROOTS: Final = 12
"""Most roots in one announcement, about 2 KB each. A device that missed more roots needs one installed by hand."""

MAX_TASK_BYTES: Final = 16 * 1024
"""Largest description of a task in a beacon; of a larger one, nobody learns in words what differs."""
MAX_SITE: Final = 160
"""Most devices behind one relay, so that the relay's status has room for all of their statuses."""
BEACON_S: Final = 60.0
"""Seconds between two beacons of a coordinator."""
MAX_AT: Final = 4e9
"""Latest time, in seconds since the epoch, that every platform's calendar can represent."""
MAX_LEFT_S: Final = 24 * 3600.0
"""Longest time limit of an order, so that a forged or lost order ends within a day."""

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")]
OrderId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Score = float
"""A score by the task's problem (`fedge.data.problems`): accuracy, macro F1, R^2 and so on; larger is better."""
Text = Annotated[str, Meta(max_length=1000)]


class Role(StrEnum):
    """The role of a candidate in a device's mixture (fedge.md section 1), in the order of the mixture."""

    PRIVATE = "private"
    GLOBAL = "global"
    EXPERT = "expert"
    LOCAL = "local"

    @property
    def is_shared(self) -> bool:
        """Whether several devices share a model in this role; the top rule chooses among such models."""
        return self in {Role.GLOBAL, Role.EXPERT}


class _Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Base of version 1 messages: transfer, runtimes and supervisors, as in fedge 0.1 but for `Health.outliers`."""

    VERSION: ClassVar[int] = 1


class _Message2(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of version 2 messages, between agents and coordinators. Unknown fields are ignored."""

    VERSION: ClassVar[int] = 2


class BlobRef(Struct, frozen=True, kw_only=True):
    """A reference to the bytes of some tensors by their hash, wherever they come from. Unknown fields are ignored."""

    digest: Digest
    size_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    codec: Codec = Codec.FLOAT32  # meaningless for a file without tensors


class FileRef(BlobRef, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A reference in a message of version 1, which refuses unknown fields."""


# ---------------------------------------------------------------------------------------------- what a device is


class Presence(StrEnum):
    """A device's presence, as given by its retained status."""

    ONLINE = "online"
    SLEEPING = "sleeping"  # said goodbye, will come back
    OFFLINE = "offline"  # the last will: the broker lost the connection


class Capabilities(Struct, frozen=True, kw_only=True):
    """A device's abilities, announced in its birth certificate."""

    trains: bool  # False: an inference-only device, without torch
    fedge_version: Text = ""
    python_version: Text = ""
    machine: Text = ""  # such as "aarch64"
    cpu_count: Count = 1
    steps: dict[Id, Count] = {}  # known steps with their versions


class Status(_Message2, frozen=True, kw_only=True, tag="status"):
    """A device's retained birth certificate, death certificate or last will; `incarnation` is new at each start."""

    device_id: Id
    incarnation: Id
    presence: Presence
    task_fingerprint: Text = ""
    n_samples: Count = 0  # non-sensitive training samples, |D_L|; the number of marked ones is never sent
    data_version: Count = 0  # rises when the non-sensitive samples have changed
    n_arrived: Count = 0  # non-sensitive labelled samples that ever came; never falls
    release: Count = 0  # the highest release of a bundle the device has had
    capabilities: Capabilities | None = None
    withholds: Annotated[
        tuple[Id, ...], Meta(max_length=64)
    ] = ()  # kinds (`fedge.steps.contract.Reveals`) that may not leave
    site: Annotated[tuple[SiteDevice, ...], Meta(max_length=MAX_SITE)] | None = None  # a relay's devices, else None
    other_task: Text = ""  # in words, what its task is that the federation's is not; empty if both are the same


class Context(_Message2, frozen=True, kw_only=True, tag="context"):
    """Present measurements of a device; None where a sensor is missing or the link's rate is not yet known."""

    device_id: Id
    at: float | None = None  # seconds since the epoch, device clock
    cpu_ghz: NonNegative | None = None
    load: NonNegative | None = None  # 1-minute load average / number of CPUs
    free_ram_gb: NonNegative | None = None
    free_disk_gb: NonNegative | None = None
    battery: Share | None = None  # 1 if full; None if on mains
    temperature_c: float | None = None
    link_mbit_s: NonNegative | None = None  # rate at which models arrive; in simulations the mean of both ways
    n_samples: Count = 0  # samples whose model may be uploaded, |D_L|


class SiteDevice(Struct, frozen=True, array_like=True):
    """A device behind a relay, from its own status and context. `id` is the device's name on its site."""

    id: Id
    n_samples: Count
    incarnation: Annotated[str, Meta(max_length=100)]
    trains: bool
    drift: bool
    release: Count
    withholds: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    context: Context | None = None
    data_version: Count = 0
    n_arrived: Count = 0
    drift_kind: DriftKind | None = None


# ---------------------------------------------------------------------------------------------- orders and reports


class Difference(Struct, frozen=True, kw_only=True):
    """Another way to get a model: add the difference in `blob` to `base` (`fedge.tensors.codecs.apply_differences`)."""

    base: Digest
    blob: BlobRef


class Order(_Message2, frozen=True, kw_only=True, tag="order"):
    """One piece of work for one device, identified by `id` and repeated until its report is acknowledged.

    `body` is the action of the step (`fedge.steps.contract`); a peer that does not know the step can still store and
    answer the order. `differences` are optional shortcuts to models that the action names, or to intermediate models,
    by the model's digest.
    """

    id: OrderId  # "{run}.{round}.{label}.{device}"; stable across restarts of the coordinator
    device_id: Id
    run: Id
    round: Count
    label: Id  # the method's name for this work; unique within a round
    seed: Count  # seeds all of the device's random numbers for this order
    task_fingerprint: Text
    left_s: Annotated[float, Meta(gt=0, le=MAX_LEFT_S)]  # time left, independent of clocks; also the message expiry
    step: Id
    version: Count = 1  # version of the step
    body: bytes
    differences: Annotated[dict[Digest, Difference], Meta(max_length=256)] = {}


class Outcome(StrEnum):
    """The end of an order on its device."""

    DONE = "done"
    DECLINED = "declined"  # not now: RAM, temperature, battery, no data
    FAILED = "failed"
    UNSUPPORTED = "unsupported"  # step unknown, or not in this version


class Why(Worded):
    """The reason for a missing result, which is all that a device reveals; details stay in its own log."""

    NO_DATA = "no-data", "it has no samples that it may use for this"
    NO_TRAINING = "no-training", "it does not train"
    NOT_ALLOWED = "not-allowed", "its owner does not allow it"
    LEARNED_FROM_ALL = "learned-from-all", "what it keeps has learned from all of its samples, and stays there"
    NOTHING_KEPT = "nothing-kept", "it keeps nothing of this run"
    DISK = "disk", "its disk has no room for the models"
    MEMORY = "memory", "it has too little free memory"
    HOT = "hot", "it is too hot"
    BATTERY = "battery", "its battery is too low"
    BUDGET = "budget", "its privacy budget is spent, or does not allow this"
    OTHER_TASK = "other-task", "it has another task"
    TOO_FEW = "too-few", "the masked sum would cover too few devices, or differ by too few from an earlier one"
    STRANGERS = "strangers", "no member of the federation vouches for a device of its masked sum"
    UNREACHABLE = "unreachable", "it cannot fetch a model"
    MALFORMED = "malformed", "it cannot read the order or a model in it"
    NOT_FINITE = "not-finite", "training diverged, or a model in the order is not finite"
    UNFIT = "unfit", "the order does not fit what the device has"
    ERROR = "error", "its own code failed"
    UNKNOWN_STEP = "unknown-step", "it does not know the step in this version"
    OTHER = "other", "for a reason that this fedge does not know"

    @classmethod
    def _missing_(cls, value: object) -> Why | None:
        return cls.OTHER if isinstance(value, str) else None  # the code is from a newer fedge


class Report(_Message2, frozen=True, kw_only=True, tag="report"):
    """The outcome of an order. The device keeps and repeats it until it is acknowledged."""

    order_id: OrderId
    device_id: Id
    seconds: NonNegative = 0.0  # time spent on unmarked samples; 0: not disclosed
    outcome: Outcome
    why: Why | None = None  # except for `done`
    body: bytes = b""  # the result of the step if `done` (`fedge.steps.contract`)
    blobs: Annotated[tuple[BlobRef, ...], Meta(max_length=64)] = ()  # named in the result
    again: Count = 0  # how often the broker took the report before from this agent process, without an answer


class Ack(_Message2, frozen=True, kw_only=True, tag="ack"):
    """The coordinator's final word on a report, repeated if the report is."""

    order_id: OrderId
    device_id: Id
    accepted: bool
    reason: Text = ""  # why not: a ProtocolError name and detail


class Beacon(_Message2, frozen=True, kw_only=True, tag="beacon"):
    """The coordinator's time, version and task, retained; published at its start and every `BEACON_S` seconds."""

    at: NonNegative  # seconds since the epoch, the coordinator's clock
    fedge_version: Text = ""
    classes: AddedClasses | None = None  # the classes that joined, and the task's fingerprint
    task: Annotated[bytes, Meta(max_length=MAX_TASK_BYTES)] = b""  # a `TaskSpec` in JSON, only to say what differs


class Claim(_Message2, frozen=True, kw_only=True, tag="claim"):
    """A coordinator's announcement that it is connected to the broker or about to begin."""

    incarnation: Annotated[str, Meta(min_length=1, max_length=100)]  # new at each start
    since: Annotated[float, Meta(ge=0, le=MAX_AT)]  # time of its start by its clock, in seconds since the epoch
    where: Text = ""  # its machine and home
    works: bool = False  # it has checked that it is the only coordinator
    to: Annotated[str, Meta(max_length=100)] = ""  # incarnation of the coordinator that is answered; empty if for all


# ------------------------------------------------------------------------------------------------------- transfer


class Want(_Message, frozen=True, kw_only=True, tag="want"):
    """A request for the byte ranges [start, end) of a blob that the receiver still lacks."""

    device_id: Id  # the sender, or, from the coordinator, the addressee
    digest: Digest
    ranges: Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1, max_length=256)]
    listening: Count = 0  # drawn at each subscription and when chunks in flight may be lost; 0 if not given


# ------------------------------------------------------------------------------------------------------- rollouts


class RolloutState(StrEnum):
    """The state of a rollout. Devices install while it is running; late ones when it is done."""

    RUNNING = "running"
    PAUSED = "paused"
    ABORTED = "aborted"  # devices with the new release return to the previous one
    DONE = "done"  # all stages completed

    @classmethod
    def _missing_(cls, value: object) -> RolloutState | None:
        return cls.PAUSED if isinstance(value, str) else None  # the state is from a newer fedge: begin nothing


class Rollout(_Message, frozen=True, forbid_unknown_fields=False, kw_only=True, tag="rollout"):
    """Which part of the fleet should run which release; the signed metadata prove the release genuine.

    A device takes part if it is one of `canaries`, or if its place (`fedge.wire.rollout.compute_place`, in [0, 1)) is
    below `share`. `version` increases with every announcement, across rollouts. Unknown fields are ignored.

    In the introduction of a campaign's personal bundles, `release` is the campaign's number, and nothing is signed.
    """

    id: Id
    state: RolloutState
    target: Text  # path of the bundle manifest in the signed metadata
    release: Count
    canaries: Annotated[tuple[Id, ...], Meta(max_length=256)] = ()
    share: Share
    metadata: Annotated[dict[Text, FileRef], Meta(max_length=128)]  # files of the signed repository by name
    version: Count = 0


class Announcement(_Message, frozen=True, kw_only=True, tag="announcement"):
    """A published, retained rollout, signed by the repository's role `timestamp`.

    `rollout` is an encoded `Rollout`. `signatures` holds hexadecimal signatures of
    `fedge.wire.rollout.make_signed_bytes`, by key. `roots` holds the repository's newest roots, by name; they define
    that key.
    """

    rollout: bytes
    signatures: Annotated[dict[Text, Text], Meta(max_length=16)]
    roots: Annotated[dict[Text, bytes], Meta(max_length=MAX_ROOTS)] = {}


class Phase(StrEnum):
    """The phase of a device's runtime with respect to a rollout's release."""

    SERVING = "serving"  # in service; `reason`, if any, says why the last announcement was ignored
    FETCHING = "fetching"
    TRIAL = "trial"  # in service, with the old bundle ready
    KEPT = "kept"  # never activated, because the bundle in service is more accurate here; no failure
    REFUSED = "refused"  # never activated
    ROLLED_BACK = "rolled_back"  # activated, then reverted
    FAILED = "failed"  # not fetched or stored; will be retried

    @classmethod
    def _missing_(cls, value: object) -> Phase | None:
        return cls.FAILED if isinstance(value, str) else None  # the phase is from a newer fedge: it is not waited for


class Quality(Struct, frozen=True, kw_only=True):
    """A bundle's quality on the device's own non-sensitive samples; None where nothing was measured."""

    n: Count  # non-sensitive validation samples
    accuracy: Score | None = None  # the score by the task's problem, on labelled validation samples
    gate_entropy: Share | None = None  # mean over samples; 1 if all shares are equal; None for one candidate
    free_energy: float | None = None  # mean over samples, in deviations from the bundle's reference
    latency_ms: NonNegative | None = None  # median of single samples


class Outliers(Struct, frozen=True, kw_only=True):
    """Samples that the bundle in service has seen in this process, and how many of them it flagged as outliers."""

    seen: Count
    flagged: Count


class DriftKind(StrEnum):
    """In which way a device's recent samples differ from those that its bundle is for."""

    SHARES = "shares"  # the classes come in other shares
    INPUTS = "inputs"  # the samples look different
    LABELS = "labels"  # labelled samples contradict the bundle

    @classmethod
    def _missing_(cls, value: object) -> DriftKind | None:
        return cls.INPUTS if isinstance(value, str) else None  # the kind is from a newer fedge: it needs another bundle


class AtWork(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers of the bundle in service that were labelled later, on the device's non-sensitive samples.

    `covered` is the share whose prediction set held the target, and `coverage` what was wanted; None without sets.
    """

    right: Count
    wrong: Count
    recent: Share | None = None  # accuracy on the latest of them; None if there are few
    covered: Share | None = None
    coverage: Share | None = None


class Health(_Message, frozen=True, forbid_unknown_fields=False, kw_only=True, omit_defaults=True, tag="health"):
    """The health of a device's runtime; retained, published on change and from time to time.

    Unknown fields are ignored. Earlier versions of fedge refuse them, so defaults are left out.
    """

    device_id: Id
    at: NonNegative  # seconds since the epoch, device clock
    phase: Phase
    release: Count  # release of the bundle in service; 0 if none
    bundle_digest: Digest | None = None  # only for a bundle from a rollout; other digests stay on the device
    rollout: Id | None = None  # the last rollout in which the device took part
    reason: Text = ""
    before: Quality | None = None  # quality of the previous bundle, if it also came from a rollout
    now: Quality | None = None  # quality of the rollout's bundle
    temperature_c: float | None = None
    n_predictions: Count = 0  # since the process started
    n_failed: Count = 0
    drift: bool = False  # recent samples differ from those that the bundle is for
    outliers: Outliers | None = None  # only for a bundle from a rollout, if it has a reference
    drift_kind: DriftKind | None = None  # None without drift, and from a runtime that cannot tell
    drift_release: Count = 0  # release of the bundle whose answers showed the drift; older than `release` if it is new
    at_work: AtWork | None = None  # score at work; only if the owner allows it
    serving: bool = True  # False: the runtime has ended; in its last will or its goodbye, whose other fields are older

    @property
    def in_service(self) -> Quality | None:
        """Quality of the bundle that answers: of the two compared the earlier one, if it was kept or has come back."""
        if self.phase in {Phase.KEPT, Phase.REFUSED, Phase.ROLLED_BACK}:
            return self.before
        return None if self.bundle_digest is None else self.now  # the one that was measured is no longer in service


Message = Status | Context | Order | Report | Ack | Beacon | Claim | Want | Rollout | Announcement | Health

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Serialise a message.

    Raises:
        ValueError: the message exceeds `MAX_MESSAGE_BYTES`, or holds NaN or infinity. That is our own bug, so nothing
            is sent.
    """
    data = _encoder.encode((message.VERSION, message))
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    if not are_all_finite(msgspec.to_builtins(message)):
        raise ValueError(f"{type(message).__name__} holds a number that is not finite")
    return data


def decode_message(data: bytes | bytearray | memoryview, kind: type[M]) -> M:
    """Parse untrusted bytes into a message of the kind that belongs on the topic.

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
        raise ProtocolError("unexpected-type", f"got {type(message).__name__}, but {kind.__name__} belongs there")
    if not are_all_finite(msgspec.to_builtins(message)):
        raise ProtocolError("not-finite", f"{kind.__name__} holds NaN or infinity")
    return message


def is_outdated(data: bytes | bytearray | memoryview) -> bool:
    """Return whether bytes are an agent's or coordinator's message of an older version."""
    try:
        version, _ = _decoder.decode(data)
    except MALFORMED:
        return False
    return 0 < version < Status.VERSION


def are_all_finite(value: object) -> bool:
    """Return whether no number in a value of plain containers is NaN or infinite."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(are_all_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(are_all_finite(item) for item in value)
    return True


def iterate_blobs(value: object) -> Iterator[BlobRef]:
    """Yield all blob references in a message, or in any other value of structs and containers."""
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
        if not isinstance(item, _PLAIN):  # a large state consists mostly of these: avoid a generator for each
            yield from iterate_blobs(item)


_PLAIN: Final = (int, float, str, bytes, NoneType)


def iterate_differences(ref: BlobRef, differences: Mapping[str, Difference]) -> Iterator[tuple[str, Difference]]:
    """Yield the chain of differences that leads to a model, last first.

    Each difference comes with the digest of the model that it makes. The chain ends before the differences together
    become as large as the model itself.
    """
    digest, left, untried = ref.digest, ref.size_bytes, dict(differences)
    while (found := untried.pop(digest, None)) is not None and (left := left - found.blob.size_bytes) > 0:
        yield digest, found
        digest = found.base


def find_way(
    ref: BlobRef, differences: Mapping[str, Difference], held: Container[str]
) -> tuple[str, tuple[BlobRef, ...]] | None:
    """Return the digest of a model in `held` and the differences from there to `ref`, in order, or None."""
    steps: tuple[BlobRef, ...] = ()
    for _, difference in iterate_differences(ref, differences):
        steps = (difference.blob, *steps)
        if difference.base in held:
            return difference.base, steps
    return None


def find_shared_bases(refs: Iterable[BlobRef], differences: Mapping[str, Difference]) -> list[BlobRef]:
    """Return models from which several of `refs` derive; if these are fetched first, shared differences come once."""
    found: dict[str, set[BlobRef]] = {}
    for ref in refs:
        if (known := differences.get(ref.digest)) is not None:
            found.setdefault(known.base, set()).add(ref)
    return [
        BlobRef(digest=base, size_bytes=min(ref.size_bytes for ref in derived))
        for base, derived in found.items()
        if len(derived) > 1
    ]
