"""Task, devices and budget: the settings of `fedge demo`, `simulate`, `compare`, `tune` and `sample`.

They are also the arguments of the Python interface, and defined only here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from coordinator import methods, protection
from coordinator.methods import DEFAULT, MethodSettings, Option, settings_of
from coordinator.tracking import MLflow, TensorBoard
from fedge.config import CODE, AtLeastOne, Duration
from fedge.messages import Share
from fedge.processor import Processor, TrainOn
from fedge.tasks.partition import How, Partitioning

Engine = Literal["local", "ray"]
"""What carries out the devices' orders."""
Hardware = Literal["mixed", "steady", "none"]
"""What the devices are (`coordinator.fleet.devices`)."""
RayAddress = Annotated[str | None, "Of a running cluster, auto: this machine's; by default one is started here."]
Results = Annotated[Path | None, "Folder for the results; a run found there is resumed. Default: a new folder."]


class Setup(Partitioning, frozen=True, kw_only=True):
    """Data, devices and local training, for demos and simulations."""

    rounds: methods.Rounds = DEFAULT.rounds
    participation: methods.Participation = DEFAULT.participation
    min_reports: methods.MinReports = DEFAULT.min_reports
    local_steps: methods.LocalSteps = DEFAULT.sgd.steps
    local_epochs: methods.LocalEpochs = None
    batch_size: methods.BatchSize = DEFAULT.sgd.batch_size
    learning_rate: methods.LearningRate = DEFAULT.sgd.learning_rate
    momentum: methods.Momentum = DEFAULT.sgd.momentum
    weight_decay: methods.WeightDecay = DEFAULT.sgd.weight_decay
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

    def for_method(self, seed: int, options: dict[str, Option]) -> MethodSettings:
        """The settings for the method."""
        return settings_of(self, seed, options)


class Scenario(Setup, frozen=True, kw_only=True):
    """Settings that the methods of a comparison share."""

    global_test: Annotated[
        float, Meta(ge=0, lt=1), "Share of all samples set apart as global test set before partitioning."
    ] = 0.1
    server_data: Annotated[
        float, Meta(ge=0, lt=1), "Share of the global test set that the server may learn from (fedcoe, fedepc)."
    ] = 0.5
    late_joiners: Annotated[
        int, Meta(ge=0), "Devices that come when training is over, drawn by lot: measured apart."
    ] = 0
    hardware: Annotated[
        Hardware,
        "mixed: Raspberry Pis and Jetsons that come, go and straggle; steady: the same, always there; none: no clock.",
    ] = "steady"
    deadline_s: Annotated[Duration | None, "Simulated time for one step."] = None
    train_on: TrainOn = Processor.CPU
    evaluate_every: Annotated[AtLeastOne | None, "Rounds between two points of the curve; default: a tenth."] = None

    measured: Annotated[
        AtLeastOne | None,
        "Devices whose accuracy is measured, and that install bundles, drawn by lot; default: all.",
    ] = None

    @property
    def spacing(self) -> int:
        """Rounds between two evaluations."""
        return self.evaluate_every or max(1, self.rounds // 10)


class Running(Scenario, frozen=True, kw_only=True):
    """The engine of a simulation or comparison; apart from the rounding of floats, figures do not depend on it."""

    engine: Annotated[Engine, "local: this process, of a comparison several; ray: a Ray cluster (fedge[ray])."] = (
        "local"
    )
    ray_address: RayAddress = None


class SimulationSettings(Running, frozen=True, kw_only=True):
    """Section [simulate] of the configuration."""

    method: Annotated[str, CODE, "A registered method; NAME+ft: fine-tuned at the end."] = "fedge"
    seed: Annotated[int, Meta(ge=0), "Of partition, first model and training."] = 0
    target: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, "Target accuracy; the report says what reaching it cost."
    ] = None
    out: Annotated[Path | None, "Keep the devices' folders, with their bundles, here."] = None
    tensorboard: TensorBoard = None
    mlflow: MLflow = None


class CompareSettings(Running, frozen=True, kw_only=True):
    """Section [compare] of the configuration."""

    methods: Annotated[
        str, CODE, "Methods, with commas; options of a method after colons: fedepc:clustering=k-means."
    ] = "local,fedavg,fedavg+ft,fedge"
    seeds: Annotated[str, "Seeds, with commas."] = "0,1,2"
    baseline: Annotated[str | None, CODE, "Whom the others are compared with; default: the first."] = None
    target: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        "Target accuracy; the report says what reaching it cost. Default: 95 % of the best mean.",
    ] = None
    jobs: Annotated[AtLeastOne | None, "Runs at the same time; default: a core each; 1 with cuda."] = None
    out: Results = None


class TuneSettings(Scenario, frozen=True, kw_only=True):
    """Section [tune] of the configuration."""

    method: Annotated[str, CODE, "A registered method; its options after colons stay as they are."] = "fedge"
    trials: Annotated[int, Meta(ge=2), "Configurations that are tried, the first one as it is."] = 20
    seed: Annotated[int, Meta(ge=0), "Of partition, first model, training and search."] = 0
    ray_address: RayAddress = None
    out: Results = None


class DemoSettings(Setup, frozen=True, kw_only=True):
    """Section [demo] of the configuration: fewer devices than in a simulation, since each is a process."""

    devices: Annotated[int, Meta(ge=1, le=200), "Devices, one process each."] = 12
    partition: Annotated[
        How,
        "groups: planted groups, by default cameras turned by 0, 90 or 180 degrees, label skew within; "
        "dirichlet: label skew; shards: few classes each; natural: by person; iid: no skew.",
    ] = "groups"
    n_groups: Annotated[int, Meta(ge=1), "Planted groups."] = 3
    samples: Annotated[AtLeastOne | None, "Use so many samples; by default all, of the large image sets 4000."] = None
    sensitive: Annotated[Share, "Share of training samples that no upload may learn from."] = 0.3
    rounds: Annotated[int, Meta(ge=1), "Rounds of training."] = 30
    participation: methods.Participation = 0.75
    method: Annotated[str, CODE, "A registered method; NAME+ft: fine-tuned at the end."] = "fedge"
    broker: Annotated[str, "auto, mosquitto or amqtt: a local one; HOST:PORT: yours."] = "auto"
    secure: Annotated[bool, "A certificate for each, by `fedge provision` and `fedge enrol`; needs Mosquitto."] = False
    seed: Annotated[int, Meta(ge=0), "Of partition, first model and training."] = 0
    out: Annotated[Path | None, "New folder for everything; by default named by the time."] = None

    @property
    def folder(self) -> Path:
        """`out`, once it is chosen."""
        assert self.out is not None
        return self.out


class SampleSettings(Partitioning, frozen=True, kw_only=True):
    """Section [sample] of the configuration."""

    devices: Annotated[int, Meta(ge=1), "Devices: one file each."] = 4
    seed: Annotated[int, Meta(ge=0), "Of the partition."] = 0
    out: Annotated[Path, "New folder for the files."] = Path("samples")
