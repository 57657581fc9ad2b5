"""Settings of `fedge agent`, needed both by its own process and by the one that trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from fedge.config import CODE, Duration, Name, Seconds
from fedge.credentials import Broker, Credentials, KeepAlive
from fedge.egress import RulesFile
from fedge.processor import Processor, TrainOn
from fedge.step import Steps, known_steps
from fedge.steps.mask_shares import MIN_COHORT
from fedge.task import TaskSpec
from fedge.weights import Allow, TaskName


class AgentSettings(Credentials, frozen=True, kw_only=True):
    """Section [agent] of the configuration."""

    broker: Broker
    federation: Annotated[Name, "Name of the federation to take part in."]
    id: Annotated[Name, "Name of this device, unique in the federation: letters, digits, dot, dash, underscore."]
    home: Annotated[Path, "Folder of this agent alone: private model, unfinished orders, bundles."]
    task: TaskName
    data: Annotated[Path, "This device's samples: an .npz, or a folder with a folder per class."]
    seed: Annotated[int, Meta(ge=0), "Seed of the validation split, if the data have none."] = 0
    train_on: TrainOn = Processor.CPU
    inference_only: Annotated[bool, "Never train: wait for a finished bundle. Always so without torch."] = False
    egress: RulesFile = None
    max_epsilon: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        "Privacy budget: reveal the samples only with noise, and nothing more once the total would "
        "exceed this epsilon (docs/privacy.md).",
    ] = None
    delta: Annotated[float, Meta(gt=0, lt=1), "Delta of --max-epsilon: below 1 / samples."] = 1e-5
    min_cohort: Annotated[
        int, Meta(ge=2), "Decline masked sums of fewer devices, or that differ by fewer from an earlier one."
    ] = MIN_COHORT
    min_free_ram_gb: Annotated[
        Annotated[float, Meta(ge=0, extra={"unit": "GB"})] | None, "Decline work if less memory is free."
    ] = None
    max_temperature_c: Annotated[
        Annotated[float, Meta(extra={"unit": "C"})] | None, "Decline work if hotter; needs a sensor."
    ] = None
    min_battery: Annotated[
        Annotated[float, Meta(ge=0, le=1, extra={"unit": "0..1"})] | None, "Decline work on battery with less charge."
    ] = None
    context_interval_s: Annotated[Duration, "How often the device reports its state."] = 10.0
    keep_worker_s: Annotated[
        Seconds | None,
        "How long the training process waits for the next order before it frees its memory; "
        "default: 60 s, or 0 if less than 0.5 GB is free.",
    ] = None
    steps: Annotated[str, CODE, "Your own steps besides the installed ones, package.module:Class, comma-separated."] = (
        ""
    )
    allow: Allow = ""
    keepalive_s: KeepAlive = 30

    @property
    def trains(self) -> bool:
        """Whether this installation can train, and should."""
        return not self.inference_only and find_spec("torch") is not None

    def spec(self) -> TaskSpec:
        """What is learned.

        Raises:
            ConfigError: the task is wrong.
        """
        from fedge.tasks import task_spec

        return task_spec(self.task, self.data, allow=self.allow.split(","))

    def known_steps(self) -> Steps:
        """The steps that the device can be asked.

        Raises:
            ConfigError: one named by the owner is not a step.
        """
        return known_steps(path for path in self.steps.split(",") if path)
