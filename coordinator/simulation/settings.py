"""Task, devices and budget: the settings of `fedge demo`, `simulate`, `compare`, `tune` and `sample`.

The settings are also the arguments of the Python interface, and are defined only here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from coordinator.aggregation import protection
from coordinator.methods import settings as methods
from coordinator.methods.settings import DEFAULT, MethodSettings, Option, make_method_settings
from coordinator.watch.tracking import MLflow, TensorBoard
from fedge.settings import CODE, AtLeastOne, Duration
from fedge.system.hardware import Processor, TrainOn
from fedge.system.text import Heading
from fedge.tasks.shares import NGroups, Partitioning, Rule, Sensitive

Engine = Literal["local", "ray"]
"""The engine that carries out the devices' orders."""
Hardware = Literal["mixed", "steady", "none"]
"""The devices' hardware (`coordinator.fleet.simulated.devices`)."""
RayAddress = Annotated[
    str | None,
    Heading.RUNS,
    "The Ray cluster runs at this address, with auto on this machine; by default one is started here.",
]
Results = Annotated[
    Path | None,
    Heading.OUTPUT,
    "This folder gets the results, and a run found there is resumed; by default the folder is new.",
]
Seed = Annotated[int, Meta(ge=0), Heading.RUNS, "This seed decides partition, first model and training."]
TARGET_HELP: Final = "The report says what reaching this accuracy cost."


class Setup(Partitioning, frozen=True, kw_only=True):
    """Data, devices and local training, for demos and simulations."""

    rounds: methods.Rounds = DEFAULT.rounds
    patience: methods.Patience = None
    participation: methods.Participation = DEFAULT.participation
    min_reports: methods.MinReports = DEFAULT.min_reports
    local_steps: methods.LocalSteps = DEFAULT.sgd.steps
    local_epochs: methods.LocalEpochs = None
    batch_size: methods.BatchSize = DEFAULT.sgd.batch_size
    optimizer: methods.OptimizerName = "sgd"
    learning_rate: methods.LearningRate = None
    schedule: methods.Schedule = DEFAULT.schedule
    momentum: methods.Momentum = DEFAULT.sgd.momentum
    nesterov: methods.Nesterov = False
    weight_decay: methods.WeightDecay = None
    clip_norm: methods.ClipNorm = None
    label_smoothing: methods.LabelSmoothing = 0.0
    class_weights: methods.Weighting = "equal"
    codec: methods.Encoding = DEFAULT.codec
    down: methods.Down = DEFAULT.down
    average: protection.AverageRule = DEFAULT.protection.average
    hostile: protection.HostileShare = DEFAULT.protection.hostile
    dp_epsilon: protection.DpEpsilon = DEFAULT.protection.dp_epsilon
    dp_noise: protection.DpNoise = DEFAULT.protection.dp_noise
    dp_delta: protection.DpDelta = DEFAULT.protection.dp_delta
    dp_clip: protection.DpClip = DEFAULT.protection.dp_clip
    masking: protection.Masking = DEFAULT.protection.masking
    min_cohort: protection.MinCohort = DEFAULT.protection.min_cohort

    def make_method_settings(self, seed: int, options: dict[str, Option]) -> MethodSettings:
        """Make the settings for the method."""
        return make_method_settings(self, seed, options)


class Scenario(Setup, frozen=True, kw_only=True):
    """Settings that the methods of a comparison share."""

    global_test: Annotated[
        float,
        Meta(ge=0, lt=1),
        Heading.EVALUATION,
        "This share of all samples is set apart as global test set before partitioning.",
    ] = 0.1
    server_data: Annotated[
        float,
        Meta(ge=0, lt=1),
        Heading.EVALUATION,
        "The server may learn from this share of the global test set (fedcoe, fedepc).",
    ] = 0.5
    late_joiners: Annotated[
        int,
        Meta(ge=0),
        Heading.DEVICES,
        "This many devices, drawn by lot, come when training is over; they are measured apart.",
    ] = 0
    hardware: Annotated[
        Hardware,
        Heading.DEVICES,
        "Devices are Raspberry Pis and Jetsons that come, go and straggle (mixed), or are always there (steady). With "
        "none there is no clock.",
    ] = "steady"
    deadline_s: Annotated[Duration | None, Heading.RUNS, "One step has this much simulated time."] = None
    train_on: TrainOn = Processor.CPU
    student: Annotated[
        bool,
        Heading.BUNDLES,
        "Each device installs one network, distilled from its mixture, unless it is worse (docs/methods/student.md).",
    ] = False
    evaluate_every: Annotated[
        AtLeastOne | None,
        Heading.EVALUATION,
        "The curve has a point after this many rounds; by default it is a tenth of all.",
    ] = None
    measured: Annotated[
        AtLeastOne | None,
        Heading.EVALUATION,
        "This many devices, drawn by lot, install bundles and are measured; by default all do.",
    ] = None
    metric: Annotated[
        str | None,
        CODE,
        Heading.EVALUATION,
        "Your function package.module:function gives further figures about each device's answers to the results "
        "(docs/simulation.md).",
    ] = None

    @property
    def code(self) -> tuple[str, ...]:
        """The names of task, problem, network, metric and augmentation, which may be of the user's own code."""
        named = (self.task, self.problem, self.model, self.metric, *(self.augment or "").split(","))
        return tuple(name.strip() for name in named if name)

    @property
    def spacing(self) -> int:
        """Number of rounds between two evaluations."""
        return self.evaluate_every or max(1, self.rounds // 10)


class EngineScenario(Scenario, frozen=True, kw_only=True):
    """A scenario with its engine; apart from the rounding of floats, figures do not depend on the engine."""

    engine: Annotated[
        Engine,
        Heading.RUNS,
        "With local a simulation runs in this process, a comparison in several. With ray both run on a Ray cluster "
        "(fedge[ray]).",
    ] = "local"
    ray_address: RayAddress = None


class SimulationSettings(EngineScenario, frozen=True, kw_only=True):
    """Section [simulate] of the configuration."""

    method: methods.MethodName = "fedge"
    seed: Seed = 0
    target: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Heading.EVALUATION, TARGET_HELP] = None
    out: Annotated[Path | None, Heading.OUTPUT, "This folder keeps the devices' folders, with their bundles."] = None
    tensorboard: TensorBoard = None
    mlflow: MLflow = None


class StreamedSettings(SimulationSettings, frozen=True, kw_only=True):
    """Section [simulate], as the command has it: perhaps a stream of campaigns."""

    stream: Annotated[
        AtLeastOne | None,
        Heading.STREAM,
        "There are this many campaigns, one after the other; samples arrive before each, and the world changes.",
    ] = None
    happens: Annotated[
        str | None,
        CODE,
        Heading.STREAM,
        "In a stream there are some of classes,seasons,turn,move,wrong-labels, or none. By default there are all "
        "that the samples allow (docs/simulation.md).",
    ] = None
    store: Annotated[
        AtLeastOne, Heading.STREAM, "In a stream, a device keeps at most this many samples of a class."
    ] = 100


class CompareSettings(EngineScenario, frozen=True, kw_only=True):
    """Section [compare] of the configuration."""

    methods: Annotated[
        str,
        CODE,
        Heading.METHOD,
        "These methods are compared; commas part them, and options of one follow colons: fedepc:clustering=k-means.",
    ] = "local,fedavg,fedavg+ft,fedge"
    seeds: Annotated[str, Heading.RUNS, "Each method runs with these seeds, parted by commas."] = "0,1,2"
    baseline: Annotated[
        str | None, CODE, Heading.METHOD, "The others are compared with this method; by default it is the first."
    ] = None
    target: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Heading.EVALUATION,
        f"{TARGET_HELP} By default it is 95 % of the best mean.",
    ] = None
    jobs: Annotated[
        AtLeastOne | None,
        Heading.RUNS,
        "This many runs go on at the same time; by default one per core, or one with cuda.",
    ] = None
    out: Results = None


class TuneSettings(Scenario, frozen=True, kw_only=True):
    """Section [tune] of the configuration."""

    method: Annotated[
        str,
        CODE,
        Heading.METHOD,
        "The method is one of `fedge methods`; its options after colons stay as they are.",
    ] = "fedge"
    trials: Annotated[int, Meta(ge=2), Heading.RUNS, "This many configurations are tried, the first one as it is."] = 20
    seed: Annotated[int, Meta(ge=0), Heading.RUNS, "This seed decides partition, first model, training and search."] = 0
    ray_address: RayAddress = None
    out: Results = None


class DemoSettings(Setup, frozen=True, kw_only=True):
    """Section [demo] of the configuration: fewer devices than in a simulation, since each is a process."""

    devices: Annotated[int, Meta(ge=1, le=200), Heading.DEVICES, "There are this many devices, one process each."] = 12
    partition: Rule = "groups"
    n_groups: NGroups = 3
    samples: Annotated[
        AtLeastOne | None,
        Heading.PARTITION,
        "This many samples are used; by default all are, of the large image sets 4000.",
    ] = None
    sensitive: Sensitive = 0.3
    rounds: Annotated[int, Meta(ge=1), Heading.TRAINING, methods.ROUNDS_HELP] = 30
    participation: methods.Participation = 0.5
    method: methods.MethodName = "fedge"
    broker: Annotated[
        str, Heading.BROKER, "The broker is a local one (auto, mosquitto or amqtt), or yours at HOST:PORT."
    ] = "auto"
    secure: Annotated[
        bool,
        Heading.IDENTITY,
        "Each process has a certificate, by `fedge provision` and `fedge enrol`; this needs Mosquitto.",
    ] = False
    seed: Seed = 0
    out: Annotated[
        Path | None, Heading.OUTPUT, "This new folder gets everything; by default it is named by the time."
    ] = None

    @property
    def folder(self) -> Path:
        """The folder `out`, once it is chosen."""
        assert self.out is not None
        return self.out


class SampleSettings(Partitioning, frozen=True, kw_only=True):
    """Section [sample] of the configuration."""

    devices: Annotated[int, Meta(ge=1), Heading.DEVICES, "There are this many devices, one file each."] = 4
    seed: Annotated[int, Meta(ge=0), Heading.RUNS, "This seed decides the partition."] = 0
    out: Annotated[Path, Heading.OUTPUT, "This new folder gets the files."] = Path("samples")
