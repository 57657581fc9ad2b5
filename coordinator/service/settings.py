"""Settings of a coordinator, and of its helpers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from coordinator.aggregation import protection
from coordinator.methods import settings as methods
from coordinator.methods.settings import DEFAULT, MethodSettings, Option, make_method_settings
from coordinator.store.store import RECALLED_ROUNDS
from coordinator.watch.options import AttentionWebhook, OnAttention
from coordinator.watch.tracking import MLflow, TensorBoard
from fedge.data.augmentation import Augment
from fedge.membership.credentials import Broker, Credentials, FederationName
from fedge.models.weights import Adapt, Allow, ModelName, TaskName, Weights
from fedge.settings import AtLeastOne, Duration, Secret
from fedge.system.hardware import Processor
from fedge.system.text import Heading
from fedge.tasks.problems import ProblemName

NO_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({})


class CoordinatorSettings(Credentials, frozen=True, kw_only=True):
    """Section [coordinator] of the configuration."""

    broker: Broker
    federation: FederationName
    home: Annotated[Path, Heading.FOLDERS, "This folder holds the durable state of one coordinator."]
    store: Annotated[
        Secret | None,
        Heading.FOLDERS,
        "This database, postgresql://USER:PASSWORD@HOST/DATABASE, holds all but tensors; by default it is "
        "HOME/store.db.",
    ] = None
    blobs: Annotated[
        str | None,
        Heading.FOLDERS,
        "This bucket, s3://BUCKET/FOLDER, holds the tensors, for several machines; by default they are in HOME/blobs.",
    ] = None
    task: TaskName
    data: Annotated[
        Path | None, Heading.TASK, "These samples of all classes describe an image-folder or arrays task."
    ] = None
    problem: ProblemName = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    augment: Augment = None
    allow: Allow = ""
    role: Annotated[
        Literal["all", "intake", "blobs"],
        Heading.RUNS,
        "With intake or blobs this is one more process beside a coordinator, with the same settings.",
    ] = "all"
    method: methods.MethodName = "fedge"
    server_data: Annotated[
        Path | None,
        Heading.TASK,
        "These are labelled samples of the server, for fedcoe and fedepc: an .npz or a folder of images.",
    ] = None
    once: Annotated[
        bool,
        Heading.RUNS,
        "The coordinator ends after the last round. By default it stays: it watches the devices, takes requests and "
        "gives devices that come later a bundle (fedge, fedcoe), until Ctrl-C.",
    ] = False
    rounds: methods.Rounds = DEFAULT.rounds
    patience: methods.Patience = None
    campaign_rounds: Annotated[
        AtLeastOne | None,
        Heading.CAMPAIGNS,
        "A campaign after the first takes this many rounds; by default as many as the first began with.",
    ] = None
    every: Annotated[
        str | None,
        Heading.CAMPAIGNS,
        "A campaign begins this long after the last one began, such as 6h or 1d, if samples came or a bundle drifts.",
    ] = None
    when: Annotated[
        tuple[str, ...],
        Heading.CAMPAIGNS,
        "A campaign begins under this condition: new-samples=500, drift=0.1 (this share of the devices) or "
        "score-at-work=-0.05 (a fall). It may be repeated; in the environment the conditions are comma-separated.",
    ] = ()
    devices: Annotated[int, Meta(ge=1), Heading.DEVICES, "Round 1 waits for this many devices."] = 1
    participation: methods.Participation = DEFAULT.participation
    deadline_s: Annotated[
        Duration,
        Heading.RUNS,
        "One step of a round has at least this time. A device known to need longer gets longer, and one of unknown "
        "speed five times as long for a bundle.",
    ] = 60.0
    min_reports: methods.MinReports = DEFAULT.min_reports
    keep_rounds: Annotated[
        int,
        Meta(ge=RECALLED_ROUNDS),
        Heading.FOLDERS,
        "The store keeps the devices, orders and reports of this many rounds, for audits.",
    ] = RECALLED_ROUNDS
    seed: Annotated[int, Meta(ge=0), Heading.RUNS, "This seed decides all random numbers."] = 0
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
    readmit: Annotated[
        str,
        Heading.DEVICES,
        "These devices, comma-separated, leave quarantine now, and their evidence is forgotten.",
    ] = ""
    average: protection.AverageRule = DEFAULT.protection.average
    hostile: protection.HostileShare = DEFAULT.protection.hostile
    dp_epsilon: protection.DpEpsilon = DEFAULT.protection.dp_epsilon
    dp_campaigns: protection.DpCampaigns = DEFAULT.protection.dp_campaigns
    dp_noise: protection.DpNoise = DEFAULT.protection.dp_noise
    dp_delta: protection.DpDelta = DEFAULT.protection.dp_delta
    dp_clip: protection.DpClip = DEFAULT.protection.dp_clip
    masking: protection.Masking = DEFAULT.protection.masking
    min_cohort: protection.MinCohort = DEFAULT.protection.min_cohort
    ui: Annotated[
        str | None, Heading.SERVER, "A page at HOST:PORT shows the federation in a browser, as `fedge ui` does."
    ] = None
    on_attention: OnAttention = None
    attention_webhook: AttentionWebhook = None
    tensorboard: TensorBoard = None
    mlflow: MLflow = None
    train_on: Annotated[
        Processor, Heading.RUNS, "Networks of the server's own (fedcoe) are trained and asked on this processor."
    ] = Processor.CPU

    def make_method_settings(
        self, options: Mapping[str, Option] = NO_OPTIONS, last: int | None = None
    ) -> MethodSettings:
        """Make the settings for the method; `options` are its own, `last` as in `MethodSettings`."""
        return msgspec.structs.replace(make_method_settings(self, self.seed, options), last=last)
