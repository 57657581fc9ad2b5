"""The messages of the wire: typed, versioned, schema-checked (MessagePack by msgspec).

A message is an envelope `[version, body]`; `body` is one of the structs below, told apart by its `type` field. Unknown
types, unknown fields, wrong types and values out of range are refused by `decode` before anybody sees them. Tensors are
never part of a message: a `BlobRef` names them by SHA-256, and `fedge.transfer` moves the bytes.

Which message travels on which topic: `fedge.topics`. What each one reveals: docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from fedge.errors import ProtocolError

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 60 * 1024
"""No message (chunks of tensors are not messages) is larger: it fits a 64 KiB packet with its topic."""
MAX_ROOTS: Final = 12
"""Of a repository in one announcement, some 2 KB each: a device that missed more of them needs one by hand."""
MAX_FEATURES: Final = 4096
"""Numbers of a mean of features, 9 bytes each."""
MAX_STARTS: Final = 64
"""Models that a device may choose among in one order."""
MAX_POOL: Final = 400
"""Private modules of a pool: an order names each of them in about 100 bytes."""

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


class Role(StrEnum):
    """What a candidate of a device's mixture is (fedge.md section 1); the order is that of the mixture."""

    PRIVATE = "private"
    GLOBAL = "global"
    EXPERT = "expert"
    LOCAL = "local"


class Part(StrEnum):
    """Which tensors of a model: all, the head (the last linear layer), or the base (everything else)."""

    ALL = "all"
    BASE = "base"
    HEAD = "head"


class _Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    pass


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


class Capabilities(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a device can do, told at birth."""

    trains: bool  # False: an inference-only device, without torch
    codecs: tuple[Codec, ...] = tuple(Codec)
    fedge_version: Text = ""
    python_version: Text = ""
    machine: Text = ""  # such as "aarch64"
    cpu_count: Count = 1


class Status(_Message, frozen=True, kw_only=True, tag="status"):
    """Birth and death certificate, retained, and the last will. `incarnation` is new at each start of the agent."""

    device_id: Id
    incarnation: Id
    presence: Presence
    task_fingerprint: Text = ""
    n_samples: Count = 0  # training samples not marked sensitive, |D_L|; how many are marked is never told
    capabilities: Capabilities | None = None


class Context(_Message, frozen=True, kw_only=True, tag="context"):
    """What psutil sees on a device now; None where the device has no such sensor."""

    device_id: Id
    cpu_ghz: NonNegative | None = None
    load: NonNegative | None = None  # 1-minute load average / number of CPUs
    free_ram_gb: NonNegative | None = None
    free_disk_gb: NonNegative | None = None
    battery: Share | None = None  # 1 = full; None = mains
    temperature_c: float | None = None
    link_mbit_s: NonNegative | None = None  # mean of both ways; agents do not measure it
    n_samples: Count = 0  # samples whose model may be uploaded, |D_L|


# ---------------------------------------------------------------------------------------------- orders: what to do


class Sgd(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local training: SGD with momentum (buffer reset at the start), mean cross-entropy."""

    steps: Annotated[int, Meta(ge=0, le=10**7)] = 10
    epochs: Annotated[int, Meta(ge=0, le=10**5)] = 0  # > 0: as many passes over the samples, instead of `steps`
    batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 32
    learning_rate: Annotated[float, Meta(gt=0, le=100)] = 0.05
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    proximal_mu: NonNegative = 0.0  # FedProx; 0 is plain SGD
    weight_decay: Share = 0.0  # times the weights, added to the gradient as in torch.optim.SGD

    def steps_for(self, n: int) -> int:
        """How many steps a model takes that learns from n samples: `steps`, or as many as `epochs` passes need."""
        return -(-self.epochs * n // max(1, min(self.batch_size, n))) if self.epochs else self.steps


class Start(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model to start from: the global model (cluster -1) or the expert of a cluster."""

    model: BlobRef
    cluster: Annotated[int, Meta(ge=-1, le=2**31)] = -1


class KeepPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="keep_part"):
    """Model split (pm_moe.md section 4): `private` is trained with the rest but stays on the device.

    FedPer: the head; LG-FedAvg: the base; FedRep: the head, trained alone for `head_steps`, then the base alone.
    """

    private: Part
    head_steps: Count = 0  # 0: base and head are trained together


class KeepModel(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="keep_model"):
    """Ditto: besides the shared model a personal one learns with (lambda/2) ||v - w||^2, w the start of the round."""

    proximal_lambda: NonNegative


class KeepHead(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="keep_head"):
    """FedRoD: the shared model learns with balanced softmax; a second head on its features stays here."""


class KeepOffset(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="keep_offset"):
    """DBE: a vector that is added to the features stays here; their mean is drawn to the global one."""

    global_mean: BlobRef  # {"mean": (D,) float32}
    momentum: Annotated[float, Meta(gt=0, le=1)] = 1.0
    kappa: NonNegative = 1.0


Keep = KeepPart | KeepModel | KeepHead | KeepOffset
"""What a device trains for itself in a round of training. It is stored on the device and never sent by `Train`."""


Choice = Literal["loss", "accuracy"]
"""How a device picks among models, on its validation samples: the smallest loss with prior (fedge.md section 5), or
the highest accuracy, then the smallest loss (scmoe_pfl.md section 8); the first on a tie."""


class Train(_Message, frozen=True, kw_only=True, tag="train"):
    """Train on D_L from the best of `starts` (by `choose`; one start: no look-up).

    `part`: the tensors that travel: those of the starts and of the update; the others a device takes from what it kept,
    at first from `initial`.
    """

    starts: Annotated[tuple[Start, ...], Meta(min_length=1, max_length=MAX_STARTS)]
    sgd: Sgd
    codec: Codec = Codec.INT8
    choose: Choice = "loss"
    part: Part = Part.ALL
    keep: Keep | None = None
    initial: BlobRef | None = None  # all tensors; needed with `keep` and for a part
    measure: bool = True  # whether losses and the gradient's norm are wanted: as much work as an epoch


class Profile(_Message, frozen=True, kw_only=True, tag="profile"):
    """ReLU-sparsity profile (SPRE) of `extractor` over the device's training samples.

    `noise`: sigma_dp of Gaussian noise that the device adds; it is drawn once and stored. 0: none.
    """

    extractor: BlobRef
    noise: NonNegative = 0.0


class Trial(_Message, frozen=True, kw_only=True, tag="trial"):
    """Validation loss of the trial's global model minus that of the trial's expert (fedge.md section 5)."""

    global_model: BlobRef
    expert: BlobRef


class FitCandidates(_Message, frozen=True, kw_only=True, tag="fit_candidates"):
    """Train the private and the local model, choose the primary expert; losses over the (T, kappa) grid.

    `private_steps` None: as many as validation asks for. `private_start` best: the primary expert, or the global model.
    """

    global_model: BlobRef
    experts: Annotated[tuple[Start, ...], Meta(max_length=MAX_STARTS)] = ()
    initial_model: BlobRef
    sgd: Sgd
    private_start: Literal["initial", "best"] = "best"
    private_steps: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    local_steps: Count


class Calibration(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Temperature T_k > 0 and prior strength kappa_k >= 0 of one candidate, the same on all devices."""

    temperature: Annotated[float, Meta(gt=0, le=100)]
    kappa: Annotated[float, Meta(ge=0, le=100)]


Weights = Annotated[dict[Role, Share], Meta(min_length=1)]


class FitWeights(_Message, frozen=True, kw_only=True, tag="fit_weights"):
    """EM weights from each pooled mean in `pooled` (without and with the local model)."""

    calibration: dict[Role, Calibration]
    pooled: Annotated[tuple[Weights, ...], Meta(min_length=1, max_length=4)]
    shrinkage: Annotated[float, Meta(gt=0)]


class FitEnergy(_Message, frozen=True, kw_only=True, tag="fit_energy"):
    """Per pooled mean: loss of the pooled mixture, and of the own mixture for each beta of the grid."""

    calibration: dict[Role, Calibration]
    pooled: Annotated[tuple[Weights, ...], Meta(min_length=1, max_length=4)]
    shrinkage: Annotated[float, Meta(gt=0)]


class FitGate(_Message, frozen=True, kw_only=True, tag="fit_gate"):
    """Gate, final fit, guard; writes the bundle. `pooled` holds "local" only if the pool took the local model in."""

    calibration: dict[Role, Calibration]
    pooled: Weights
    shrinkage: Annotated[float, Meta(gt=0)]
    beta: NonNegative
    sgd: Sgd
    gate: Literal["validation", "untrained"] = "validation"  # fedge.md section 9; untrained: r = 0
    final_fit: bool = True  # fedge.md section 10
    guard: bool = True  # fedge.md section 11
    release: Count


class FineTune(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training on all of the device's training samples that ends in a bundle; nothing of it is sent.

    `checkpoints`: numbers of steps that compete on validation loss, the smaller on a tie; one alone is simply done.
    """

    sgd: Sgd  # its `steps` are not used
    checkpoints: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=32)]
    otherwise: Count  # steps where there are no validation samples and several checkpoints


class Install(_Message, frozen=True, kw_only=True, tag="install"):
    """Write a bundle of one model: the given one, with what `Train(keep=...)` left on the device put over it."""

    global_model: BlobRef
    release: Count
    method: Text
    part: Part = Part.ALL  # which tensors `global_model` holds
    keep: Keep | None = None  # as in Train; None: the model as it is
    initial: BlobRef | None = None  # with `keep`, for a device that never trained
    fine_tune: FineTune | None = None


GateData = Literal["validation", "training", "training+validation", "untrained", "uniform"]
"""What SCMoE-PFL's gate learns from; untrained: nothing, the energies decide; uniform: nor they, all count the same."""
Alone = Literal["average", "best", "private"]
"""One model in place of SCMoE-PFL's mixture: the mean of the experts, the best of them, or the private model."""


class FitMixture(_Message, frozen=True, kw_only=True, tag="fit_mixture"):
    """SCMoE-PFL sections 10 and 11 in one order: private model, gate over it and the experts, bundle."""

    experts: Annotated[tuple[Start, ...], Meta(max_length=MAX_STARTS)]
    initial_model: BlobRef
    sgd: Sgd  # of the private model; `steps` are its steps
    private_data: Literal["sensitive", "all"] = "all"
    private_start: Literal["initial", "best"] = "best"
    gate: GateData = "validation"
    energy: bool = True
    energy_offset: Literal["never", "untrained", "always"] = "untrained"
    alone: Alone | None = None
    near_best: bool = False  # of experts that the device does not know yet: those within 0.02 of the best, at most 3
    top: Annotated[int, Meta(ge=1, le=64)] = 2
    space: Literal["prob", "logit"] = "prob"  # what is mixed, 11.3
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # T of the energies, 11.2
    release: Count


class MeanFeatures(_Message, frozen=True, kw_only=True, tag="mean_features"):
    """Mean of the base's features over D_L (DBE, before its second phase)."""

    model: BlobRef


class SharePrivate(_Message, frozen=True, kw_only=True, tag="share_private"):
    """PM-MoE's one upload: what `Train(keep=...)` kept. Off unless the operator turned it on (docs/privacy.md).

    `clip`, `noise`: the whole module is clipped to that norm and gets N(0, (noise * clip)^2); None: as it is.
    """

    keep: Keep
    clip: Annotated[float, Meta(gt=0)] | None = None
    noise: NonNegative = 0.0


class FitPool(_Message, frozen=True, kw_only=True, tag="fit_pool"):
    """PM-MoE stage 2: denoise the pool, train the gate, write the bundle (pm_moe.md sections 5 to 7)."""

    global_model: BlobRef
    part: Part = Part.ALL
    keep: Keep  # of stage 1
    initial: BlobRef
    pool: Annotated[tuple[BlobRef | None, ...], Meta(min_length=1, max_length=MAX_POOL)]  # None: not to be had
    own: Count  # index in the pool, where None stands: the own module is read from the device's own store
    preset: Literal["paper", "anchored"] = "anchored"
    top: Annotated[int, Meta(ge=1)] | None = None  # k; None: ceil(M / 2)
    denoise: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    epochs: Count = 50
    batch_size: Annotated[int, Meta(ge=1)] = 32
    learning_rate: Annotated[float, Meta(gt=0)] = 0.1
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    guard: bool = True
    release: Count


class DescribeLabels(_Message, frozen=True, kw_only=True, tag="describe_labels"):
    """CFIC's label feature psi of D_L (cfic.md section 3); `epsilon`: by randomised response, drawn once and stored."""

    mode: Literal["signed", "abs"] = "signed"
    epsilon: Annotated[float, Meta(gt=0)] | None = None


class Route(_Message, frozen=True, kw_only=True, tag="route"):
    """FedCoE's cold start, first half: mean output of the gate over the device's samples. Needs no torch."""

    gate: BlobRef  # an ONNX file: x (n, *input_shape) -> p (n, K)


class InstallBundle(_Message, frozen=True, kw_only=True, tag="install_bundle"):
    """Put a finished bundle in place: its files by name. Needs no torch."""

    files: Annotated[dict[Text, BlobRef], Meta(min_length=3, max_length=64)]
    release: Count


Action = (
    Train
    | Profile
    | Trial
    | FitCandidates
    | FitWeights
    | FitEnergy
    | FitGate
    | Install
    | FitMixture
    | MeanFeatures
    | SharePrivate
    | FitPool
    | DescribeLabels
    | Route
    | InstallBundle
)


class Order(_Message, frozen=True, kw_only=True, tag="order"):
    """One piece of work for one device. Repeated until its report is acknowledged; `id` is its identity."""

    id: OrderId  # "{run}.{round}.{step}.{device}"; the same work has the same id after a restart of the coordinator
    device_id: Id
    round: Count
    step: Id
    seed: Count  # all of the device's random numbers in this order come from it
    task_fingerprint: Text
    deadline: float  # seconds since the epoch; also the message expiry
    action: Action


# ------------------------------------------------------------------------------------------- reports: what was done


class Trained(_Message, frozen=True, kw_only=True, tag="trained"):
    """`update` holds (trained - start) of the trainable tensors, and the buffers as they are.

    Losses and norm are None where the order does not ask for them (`measure`).
    """

    update: BlobRef
    n_samples: Count  # |D_L|
    cluster: Annotated[int, Meta(ge=-1)] = -1  # of the start that was chosen
    loss_before: float | None = None  # mean training loss on D_L at the start model, without proximal term
    loss_after: float | None = None
    gradient_norm: NonNegative | None = None  # L2 norm of the gradient of the mean loss at the start model
    val_accuracy: Share | None = None  # of the start model on the validation samples


class Profiled(_Message, frozen=True, kw_only=True, tag="profiled"):
    """Share of exact zeros per unit, in [0, 1]; `halves`: D_raw between the even and the odd samples' profiles.

    `extractor`: digest of the network that made the profile. `halves` is None with noise, or fewer than 2 samples.
    """

    extractor: Digest
    profile: Annotated[tuple[Share, ...], Meta(min_length=1, max_length=4096)]
    halves: NonNegative | None = None
    n_samples: Count


class Tried(_Message, frozen=True, kw_only=True, tag="tried"):
    """delta = loss(G) - loss(E); None without validation samples."""

    delta: float | None = None


GridLosses = Annotated[tuple[float, ...], Meta(min_length=16, max_length=16)]


class CandidatesFitted(_Message, frozen=True, kw_only=True, tag="candidates_fitted"):
    """Per candidate the 16 sums of validation losses over the grid (T outermost), and m_i."""

    losses: dict[Role, GridLosses]
    n_validation: Count
    cluster: Annotated[int, Meta(ge=-1)] = -1  # of the primary expert


class WeightsFitted(_Message, frozen=True, kw_only=True, tag="weights_fitted"):
    """omega_i for each pooled mean of the order."""

    weights: Annotated[tuple[Weights, ...], Meta(min_length=1, max_length=4)]
    n_validation: Count


class EnergyFitted(_Message, frozen=True, kw_only=True, tag="energy_fitted"):
    """Per pooled mean of the order: sum of validation losses of the pooled mixture, and one per beta in (0, 0.5, 1)."""

    pooled_losses: Annotated[tuple[float, ...], Meta(min_length=1, max_length=4)]
    beta_losses: Annotated[tuple[tuple[float, float, float], ...], Meta(min_length=1, max_length=4)]
    n_validation: Count


class Installed(_Message, frozen=True, kw_only=True, tag="installed"):
    """The bundle is written. Its digest is that of the manifest."""

    bundle_digest: Digest
    roles: Annotated[tuple[Role, ...], Meta(min_length=1)]
    max_abs_diff: NonNegative  # torch against ONNX Runtime, probabilities, own validation samples
    guarded: bool = False


class FeaturesMeasured(_Message, frozen=True, kw_only=True, tag="features_measured"):
    """Mean feature vector (D,) of D_L."""

    mean: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MAX_FEATURES)]
    n_samples: Count


class PrivateShared(_Message, frozen=True, kw_only=True, tag="private_shared"):
    """The private module, as tensors of its own names; codec float32."""

    module: BlobRef


class LabelsDescribed(_Message, frozen=True, kw_only=True, tag="labels_described"):
    """Label feature 0..C-1, or -1 without samples."""

    feature: Annotated[int, Meta(ge=-1, le=2**31)]
    n_samples: Count


class Routed(_Message, frozen=True, kw_only=True, tag="routed"):
    """rho: shares of the experts, (K,), which sum to 1."""

    shares: Annotated[tuple[Share, ...], Meta(min_length=1, max_length=1024)]
    n_samples: Count


class Declined(_Message, frozen=True, kw_only=True, tag="declined"):
    """The device will not do it now (RAM, temperature, battery, no data): no fault, no update."""

    reason: Text


class Failed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The device tried and could not (a missing blob, a model that does not fit, an exception)."""

    reason: Text


Result = (
    Trained
    | Profiled
    | Tried
    | CandidatesFitted
    | WeightsFitted
    | EnergyFitted
    | Installed
    | FeaturesMeasured
    | PrivateShared
    | LabelsDescribed
    | Routed
    | Declined
    | Failed
)


class Report(_Message, frozen=True, kw_only=True, tag="report"):
    """What came of an order. Kept by the device and repeated until it is acknowledged."""

    order_id: OrderId
    device_id: Id
    seconds: NonNegative  # time the work took on the device
    result: Result


class Ack(_Message, frozen=True, kw_only=True, tag="ack"):
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

    SERVING = "serving"  # it answers; `reason` is empty
    FETCHING = "fetching"
    TRIAL = "trial"  # it answers, the old one is ready
    REFUSED = "refused"  # never switched to it
    ROLLED_BACK = "rolled_back"  # switched, then went back
    FAILED = "failed"  # could not be fetched or stored; will be tried again


class Quality(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bundle on one device's own samples; None where nothing was measured."""

    n: Count  # validation samples
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
    bundle_digest: Digest | None = None
    rollout: Id | None = None  # the last one that it took part in
    reason: Text = ""
    before: Quality | None = None  # the bundle that answered when the rollout's came
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
    data = _encoder.encode((PROTOCOL_VERSION, message))
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    if not _all_finite(msgspec.to_builtins(message)):
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", str(error)) from error
    if version != PROTOCOL_VERSION:
        raise ProtocolError("version", f"peer speaks version {version}, we speak {PROTOCOL_VERSION}")
    try:
        message = _body_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", str(error)) from error
    if not isinstance(message, kind):
        raise ProtocolError("unexpected-type", f"{type(message).__name__} where {kind.__name__} belongs")
    if not _all_finite(msgspec.to_builtins(message)):
        raise ProtocolError("not-finite", f"{kind.__name__} holds NaN or infinity")
    return message


def _all_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_all_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_all_finite(item) for item in value)
    return True


def blobs_of(value: object) -> Iterator[BlobRef]:
    """All tensors that a message, or any other value made of structs and containers, names."""
    if isinstance(value, BlobRef):
        yield value
    elif isinstance(value, Struct):
        for field in value.__struct_fields__:
            yield from blobs_of(getattr(value, field))
    elif isinstance(value, dict):
        for item in value.values():
            yield from blobs_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from blobs_of(item)
