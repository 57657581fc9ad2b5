"""Settings of `fedge agent`, needed both by its own process and by the one that trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from fedge.config import Name
from fedge.credentials import Credentials, KeepAlive
from fedge.egress import RulesFile
from fedge.processor import Processor, TrainOn
from fedge.step import Steps, known_steps
from fedge.steps.mask_shares import MIN_COHORT
from fedge.task import TaskSpec
from fedge.weights import Allow, TaskName


class AgentSettings(Credentials, frozen=True, kw_only=True):
    """Section [agent] of the configuration."""

    broker: Annotated[str, Meta(description="MQTT broker, HOST:PORT.")]
    federation: Annotated[Name, Meta(description="Name of the federation to take part in.")]
    id: Annotated[
        Name,
        Meta(description="Name of this device, unique in the federation: letters, digits, dot, dash, underscore."),
    ]
    home: Annotated[Path, Meta(description="Folder of this agent alone: private model, unfinished orders, bundles.")]
    task: TaskName
    data: Annotated[Path, Meta(description="This device's samples: an .npz, or a folder with a folder per class.")]
    seed: Annotated[int, Meta(ge=0, description="Seed of the validation split, if the data have none.")] = 0
    train_on: TrainOn = Processor.CPU
    inference_only: Annotated[
        bool, Meta(description="Never train: wait for a finished bundle. Always so without torch.")
    ] = False
    egress: RulesFile = None
    max_epsilon: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="Privacy budget: reveal the samples only with noise, and nothing more once the total would "
                "exceed this epsilon (docs/privacy.md).",
            ),
        ]
        | None
    ) = None
    delta: Annotated[float, Meta(gt=0, lt=1, description="Delta of --max-epsilon: below 1 / samples.")] = 1e-5
    min_cohort: Annotated[
        int,
        Meta(ge=2, description="Decline masked sums of fewer devices, or that differ by fewer from an earlier one."),
    ] = MIN_COHORT
    min_free_ram_gb: (
        Annotated[float, Meta(ge=0, description="Decline work if less memory is free.", extra={"unit": "GB"})] | None
    ) = None
    max_temperature_c: (
        Annotated[float, Meta(description="Decline work if hotter; needs a sensor.", extra={"unit": "C"})] | None
    ) = None
    min_battery: (
        Annotated[
            float, Meta(ge=0, le=1, description="Decline work on battery with less charge.", extra={"unit": "0..1"})
        ]
        | None
    ) = None
    context_interval_s: Annotated[
        float, Meta(gt=0, description="How often the device reports its state.", extra={"unit": "s"})
    ] = 10.0
    keep_worker_s: (
        Annotated[
            float,
            Meta(
                ge=0,
                description="How long the training process waits for the next order before it frees its memory; "
                "default: 60 s, or 0 if less than 0.5 GB is free.",
                extra={"unit": "s"},
            ),
        ]
        | None
    ) = None
    steps: Annotated[
        str, Meta(description="Your own steps besides the installed ones, package.module:Class, comma-separated.")
    ] = ""
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
