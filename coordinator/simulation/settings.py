"""Task, devices and budget: the settings of `fedge demo`, `simulate`, `compare`, `tune` and `sample`.

They are also the arguments of the Python interface, and defined only here.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

from coordinator.methods import (
    BatchSize,
    Down,
    LearningRate,
    LocalEpochs,
    LocalSteps,
    MethodSettings,
    Momentum,
    Option,
    WeightDecay,
    settings_of,
)
from coordinator.protection import (
    AverageRule,
    DpClip,
    DpDelta,
    DpEpsilon,
    DpNoise,
    HostileShare,
    Masking,
    MinCohort,
)
from coordinator.tracking import MLflow, TensorBoard
from fedge.errors import ConfigError
from fedge.messages import Codec
from fedge.processor import Processor, TrainOn
from fedge.steps.mask_shares import MIN_COHORT
from fedge.weights import Adapt, ModelName, Weights


class Partition(StrEnum):
    """How the samples are partitioned (`fedge.tasks.partition`)."""

    DIRICHLET = "dirichlet"
    GROUPS = "groups"
    SHARDS = "shards"
    NATURAL = "natural"
    IID = "iid"
    GENERATED = "generated"


class Groups(StrEnum):
    """How planted groups differ."""

    ROTATION = "rotation"
    LABELS = "labels"
    CODES = "codes"


class Sizes(StrEnum):
    """Quantity skew."""

    EQUAL = "equal"
    LOG_NORMAL = "log-normal"
    POWER_LAW = "power-law"


class Marks(StrEnum):
    """The whole of which `sensitive` is a share."""

    SAMPLES = "samples"
    CLASSES = "classes"


class Engine(StrEnum):
    """What carries out the devices' orders."""

    LOCAL = "local"
    RAY = "ray"


class Hardware(StrEnum):
    """What the devices are (`coordinator.fleet.devices`)."""

    MIXED = "mixed"
    STEADY = "steady"
    NONE = "none"


class Partitioning(Struct, frozen=True, kw_only=True):
    """Samples, and their partition over devices."""

    task: Annotated[
        str,
        Meta(
            description="digits, mnist, fashion-mnist, uci-har, spoken-digits, image-folder, arrays, a table's"
            " schema (.toml) or package.module:Class."
        ),
    ] = "digits"
    data: Annotated[Path | None, Meta(description="Folder or file with the samples; digits need none.")] = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    devices: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="20; natural: as many as there are people.")
    ] = None
    partition: Annotated[
        Partition,
        Meta(
            description="dirichlet: label skew; groups: planted groups; shards: few classes each; natural: by person; "
            "iid: no skew; generated: as many devices as you like, each with samples turned, shifted and noised by its "
            "number."
        ),
    ] = Partition.DIRICHLET
    alpha: Annotated[float, Meta(gt=0, description="Label skew, Dirichlet's parameter; smaller is stronger.")] = 1.0
    groups: Annotated[
        Groups,
        Meta(
            description="rotation: cameras turned by 90 degrees each; labels: classes of their own; codes: each device "
            "of the first group names the classes in an order of its own."
        ),
    ] = Groups.ROTATION
    n_groups: Annotated[int, Meta(ge=1, description="Planted groups.")] = 4
    shards: Annotated[int, Meta(ge=1, description="Shards of sorted labels that each device gets.")] = 2
    iid_share: Annotated[float, Meta(ge=0, le=1, description="Share of the samples dealt evenly before shards.")] = 0.0
    sizes: Annotated[Sizes, Meta(description="Quantity skew, for dirichlet, groups and iid.")] = Sizes.EQUAL
    size_spread: Annotated[float, Meta(ge=0, le=5, description="Its sigma, or the power law's exponent.")] = 1.0
    min_samples: Annotated[
        int, Meta(ge=4, description="That each device has, whatever the skew: drawn again or moved if need be.")
    ] = 20
    samples: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Use so many samples; default: all.")] = None
    sensitive: Annotated[
        float, Meta(ge=0, le=1, description="Share of training samples that no upload may learn from.")
    ] = 0.0
    marks: Annotated[
        Marks, Meta(description="samples: as many of each class; classes: all of so many of a device's classes.")
    ] = Marks.SAMPLES


class Setup(Partitioning, frozen=True, kw_only=True):
    """Data, devices and local training, for demos and simulations."""

    rounds: Annotated[int, Meta(ge=0, description="Rounds of training.")] = 30
    participation: Annotated[float, Meta(gt=0, le=1, description="Share of the devices asked in a round.")] = 1.0
    min_reports: Annotated[int, Meta(ge=1, description="Updates without which a round changes nothing.")] = 1
    local_steps: LocalSteps = 10
    local_epochs: LocalEpochs = None
    batch_size: BatchSize = 32
    learning_rate: LearningRate = 0.05
    momentum: Momentum = 0.9
    weight_decay: WeightDecay = 0.0
    codec: Annotated[Codec, Meta(description="Of the updates.")] = Codec.INT8
    down: Down = "int8"
    average: AverageRule = "clipped"
    hostile: HostileShare = 0.2
    dp_epsilon: DpEpsilon = None
    dp_noise: DpNoise = None
    dp_delta: DpDelta = 1e-5
    dp_clip: DpClip = 1.0
    masking: Masking = False
    min_cohort: MinCohort = MIN_COHORT


class Scenario(Setup, frozen=True, kw_only=True):
    """Settings that the methods of a comparison share."""

    global_test: Annotated[
        float, Meta(ge=0, lt=1, description="Share of all samples set apart as global test set before partitioning.")
    ] = 0.1
    server_data: Annotated[
        float,
        Meta(ge=0, lt=1, description="Share of the global test set that the server may learn from (fedcoe, fedepc)."),
    ] = 0.5
    late_joiners: Annotated[
        int, Meta(ge=0, description="Devices that come when training is over, drawn by lot: measured apart.")
    ] = 0
    hardware: Annotated[
        Hardware,
        Meta(
            description="mixed: Raspberry Pis and Jetsons that come, go and straggle; steady: the same, always there; "
            "none: no clock."
        ),
    ] = Hardware.STEADY
    deadline_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Simulated time for one step.", extra={"unit": "s"})
    ] = None
    train_on: TrainOn = Processor.CPU
    evaluate_every: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Rounds between two points of the curve; default: a tenth.")
    ] = None

    measured: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Devices whose accuracy is measured, and that install bundles, drawn by lot; default: all."),
    ] = None

    def for_method(self, seed: int, options: dict[str, Option]) -> MethodSettings:
        """The settings for the method."""
        return settings_of(self, seed, options)

    @property
    def spacing(self) -> int:
        """Rounds between two evaluations."""
        return self.evaluate_every or max(1, self.rounds // 10)


_ONLY_FOR: Final = {
    "alpha": (Partition.DIRICHLET, Partition.GROUPS, Partition.GENERATED),
    "groups": (Partition.GROUPS,),
    "n_groups": (Partition.GROUPS, Partition.GENERATED),
    "shards": (Partition.SHARDS,),
    "iid_share": (Partition.SHARDS,),
}
"""Settings that have an effect only with some partitions."""


def check_partitioning(given: Partitioning) -> None:
    """Refuse settings without effect, which would mislead.

    Raises:
        ConfigError: a setting has no effect with this partition or task; the text says which.
    """
    defaults = type(given)()
    for name, partitions in _ONLY_FOR.items():
        if given.partition not in partitions and getattr(given, name) != getattr(defaults, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} changes nothing with --partition {given.partition}: it is for "
                f"{' and '.join(partitions)}"
            )
    asked = (given.partition, given.n_groups) != (defaults.partition, defaults.n_groups)
    if asked and given.partition is Partition.GROUPS and given.n_groups > (given.devices or given.n_groups):
        raise ConfigError(f"{given.devices} devices cannot be in {given.n_groups} groups: use --n-groups")
    if given.sizes is Sizes.EQUAL and given.size_spread != defaults.size_spread:
        raise ConfigError("--size-spread changes nothing with equal sizes: it is for --sizes log-normal and power-law")
    if given.marks is not defaults.marks and not given.sensitive:
        raise ConfigError("--marks changes nothing without --sensitive, the share that is marked")
    if given.task == "digits" and given.data is not None:
        raise ConfigError("the digits come with fedge: leave out --data, or name another --task")


class Running(Scenario, frozen=True, kw_only=True):
    """The engine of a simulation or comparison; apart from the rounding of floats, figures do not depend on it."""

    engine: Annotated[
        Engine, Meta(description="local: this process, of a comparison several; ray: a Ray cluster (fedge[ray]).")
    ] = Engine.LOCAL
    ray_address: Annotated[
        str | None, Meta(description="Of a running cluster, auto: this machine's; by default one is started here.")
    ] = None


class SimulationSettings(Running, frozen=True, kw_only=True):
    """Section [simulate] of the configuration."""

    method: Annotated[str, Meta(description="A registered method; NAME+ft: fine-tuned at the end.")] = "fedge"
    seed: Annotated[int, Meta(ge=0, description="Of partition, first model and training.")] = 0
    target: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="Accuracy whose cost is told.")] = (
        None
    )
    out: Annotated[Path | None, Meta(description="Keep the devices' folders, with their bundles, here.")] = None
    tensorboard: TensorBoard = None
    mlflow: MLflow = None


class CompareSettings(Running, frozen=True, kw_only=True):
    """Section [compare] of the configuration."""

    methods: Annotated[
        str, Meta(description="Methods, with commas; options of a method after colons: fedepc:clustering=k-means.")
    ] = "local,fedavg,fedavg+ft,fedge"
    seeds: Annotated[str, Meta(description="Seeds, with commas.")] = "0,1,2"
    baseline: Annotated[str | None, Meta(description="Whom the others are compared with; default: the first.")] = None
    target: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Accuracy whose cost is told; default: 95 % of the best mean accuracy."),
    ] = None
    jobs: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Runs at the same time; default: a core each; 1 with cuda.")
    ] = None
    out: Annotated[
        Path | None, Meta(description="Folder of the results, gone on with if it has some; by default a new one.")
    ] = None


class TuneSettings(Scenario, frozen=True, kw_only=True):
    """Section [tune] of the configuration."""

    method: Annotated[str, Meta(description="A registered method; its options after colons stay as they are.")] = (
        "fedge"
    )
    trials: Annotated[int, Meta(ge=2, description="Configurations that are tried, the first one as it is.")] = 20
    seed: Annotated[int, Meta(ge=0, description="Of partition, first model, training and search.")] = 0
    ray_address: Annotated[
        str | None, Meta(description="Of a running cluster, auto: this machine's; by default one is started here.")
    ] = None
    out: Annotated[
        Path | None, Meta(description="Folder of the results, gone on with if it has some; by default a new one.")
    ] = None


class DemoSettings(Setup, frozen=True, kw_only=True):
    """Section [demo] of the configuration: fewer devices than in a simulation, since each is a process."""

    devices: Annotated[int, Meta(ge=1, le=200, description="Devices, one process each.")] = 12
    partition: Annotated[
        Partition,
        Meta(
            description="groups: planted groups, by default cameras turned by 0, 90 or 180 degrees, label skew within; "
            "dirichlet: label skew; shards: few classes each; natural: by person; iid: no skew."
        ),
    ] = Partition.GROUPS
    n_groups: Annotated[int, Meta(ge=1, description="Planted groups.")] = 3
    samples: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Use so many samples; by default all, of the large image sets 4000."),
    ] = None
    sensitive: Annotated[
        float, Meta(ge=0, le=1, description="Share of training samples that no upload may learn from.")
    ] = 0.3
    rounds: Annotated[int, Meta(ge=1, description="Rounds of training.")] = 30
    participation: Annotated[float, Meta(gt=0, le=1, description="Share of the devices asked in a round.")] = 0.75
    method: Annotated[str, Meta(description="A registered method; NAME+ft: fine-tuned at the end.")] = "fedge"
    broker: Annotated[str, Meta(description="auto, mosquitto or amqtt: a local one; HOST:PORT: yours.")] = "auto"
    secure: Annotated[
        bool, Meta(description="A certificate for each, by `fedge provision` and `fedge enrol`; needs Mosquitto.")
    ] = False
    seed: Annotated[int, Meta(ge=0, description="Of partition, first model and training.")] = 0
    out: Annotated[Path | None, Meta(description="New folder for everything; by default named by the time.")] = None

    @property
    def folder(self) -> Path:
        """`out`, once it is chosen."""
        assert self.out is not None
        return self.out

    def for_method(self, participation: float) -> MethodSettings:
        """The settings for a baseline with this share of the devices in each round."""
        given = {name: getattr(self, name) for name in Setup.__struct_fields__} | {"participation": participation}
        return settings_of(Setup(**given), self.seed, {})


class SampleSettings(Partitioning, frozen=True, kw_only=True):
    """Section [sample] of the configuration."""

    devices: Annotated[int, Meta(ge=1, description="Devices: one file each.")] = 4
    seed: Annotated[int, Meta(ge=0, description="Of the partition.")] = 0
    out: Annotated[Path, Meta(description="New folder for the files.")] = Path("samples")
