"""Settings of `fedge agent`, needed both by its own process and by the one that trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edge_agent.device.own_task import read_own_task
from fedge.data.task import TaskSpec
from fedge.membership.credentials import Broker, Credentials, DeviceName, FederationName, KeepAlive
from fedge.models.weights import Allow, TaskName
from fedge.privacy.egress import RulesFile
from fedge.settings import CODE, Duration, Seconds
from fedge.steps.contract import Steps, load_known_steps
from fedge.steps.masked.mask_shares import MIN_COHORT
from fedge.system.hardware import Processor, TrainOn
from fedge.system.text import Heading


class AgentSettings(Credentials, frozen=True, kw_only=True):
    """Section [agent] of the configuration."""

    broker: Broker
    federation: FederationName
    id: DeviceName
    home: Annotated[
        Path, Heading.FOLDERS, "This folder is for this agent alone: private model, unfinished orders, bundles."
    ]
    task: TaskName
    data: Annotated[
        Path, Heading.TASK, "These are this device's samples: an .npz, or a folder with a folder per class."
    ]
    seed: Annotated[int, Meta(ge=0), Heading.TASK, "This seed decides the validation split, if the data have none."] = 0
    train_on: TrainOn = Processor.CPU
    inference_only: Annotated[
        bool, Heading.RUNS, "The agent never trains, but waits for a finished bundle; without torch it always does."
    ] = False
    student: Annotated[
        bool,
        Heading.BUNDLES,
        "In bundles, one network that is distilled from the mixture takes its place, unless it is worse "
        "(docs/methods/student.md).",
    ] = False
    egress: RulesFile = None
    max_epsilon: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Heading.EGRESS,
        "The samples are revealed only with noise, and no more once the total would exceed this epsilon, the privacy "
        "budget (docs/privacy.md).",
    ] = None
    delta: Annotated[
        float, Meta(gt=0, lt=1), Heading.EGRESS, "This is the delta of --max-epsilon, below 1 / samples."
    ] = 1e-5
    min_cohort: Annotated[
        int,
        Meta(ge=2),
        Heading.EGRESS,
        "The device declines masked sums of fewer devices, or that differ by fewer from an earlier one.",
    ] = MIN_COHORT
    min_free_ram_gb: Annotated[
        Annotated[float, Meta(ge=0, extra={"unit": "GB"})] | None,
        Heading.LOAD,
        "The device declines work if less memory is free.",
    ] = None
    max_temperature_c: Annotated[
        Annotated[float, Meta(extra={"unit": "C"})] | None,
        Heading.LOAD,
        "The device declines work if it is hotter; this needs a sensor.",
    ] = None
    min_battery: Annotated[
        Annotated[float, Meta(ge=0, le=1, extra={"unit": "0..1"})] | None,
        Heading.LOAD,
        "The device declines work on battery with less charge.",
    ] = None
    context_interval_s: Annotated[Duration, Heading.LOAD, "The device reports its state in these intervals."] = 10.0
    keep_worker_s: Annotated[
        Seconds | None,
        Heading.LOAD,
        "The training process waits this long for the next order before it frees its memory. By default it waits 60 s, "
        "or not at all if less than 0.5 GB is free.",
    ] = None
    steps: Annotated[
        str,
        CODE,
        Heading.CODE,
        "These steps of your own come beside the installed ones: package.module:Class, comma-separated.",
    ] = ""
    allow: Allow = ""
    keepalive_s: KeepAlive = 30

    @property
    def trains(self) -> bool:
        """Whether this installation can train, and should."""
        return not self.inference_only and find_spec("torch") is not None

    def make_spec(self) -> TaskSpec:
        """Read the description of the task, with the classes that have joined.

        Raises:
            ConfigError: the task is wrong.
        """
        return read_own_task(self.load_given_task(), self.home)

    def load_given_task(self) -> TaskSpec:
        """Load the task with which the agent was started.

        Raises:
            ConfigError: the task is wrong.
        """
        from fedge.tasks import load_task

        return load_task(self.task, self.data, allow=self.allow.split(","))

    def find_steps(self) -> Steps:
        """Return the steps that the device can be asked to do.

        Raises:
            ConfigError: a name given by the owner is not a step.
        """
        return load_known_steps(path for path in self.steps.split(",") if path)
