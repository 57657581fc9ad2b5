"""`fedge agent`: take part in a federation with the data of this device."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from msgspec import Meta

from fedge.background import INTERRUPTED, STOP_S, on_signal
from fedge.config import Name, resolve, settings_options
from fedge.credentials import Credentials
from fedge.egress import Rules, rules_of
from fedge.errors import ConfigError
from fedge.logs import bind
from fedge.processor import Processor, TrainOn
from fedge.step import Steps, known_steps
from fedge.steps.mask_shares import MIN_COHORT

if TYPE_CHECKING:
    from edge_agent.agent import Agent, Works
    from edge_agent.device import Budget
    from fedge.task import TaskSpec


class AgentSettings(Credentials, frozen=True, kw_only=True):
    """Section [agent] of the configuration."""

    broker: Annotated[str, Meta(description="MQTT broker, HOST:PORT.")]
    federation: Annotated[Name, Meta(description="Name of the federation to take part in.")]
    id: Annotated[
        Name,
        Meta(description="Name of this device, unique in the federation: letters, digits, dot, dash, underscore."),
    ]
    home: Annotated[
        Path, Meta(description="Folder of this agent: private model, unfinished orders, bundles. One agent each.")
    ]
    task: Annotated[
        str,
        Meta(
            description="digits, mnist, fashion-mnist, uci-har, spoken-digits, image-folder, arrays, a .json, a table's"
            " schema (.toml) or package.module:Class."
        ),
    ]
    data: Annotated[Path, Meta(description="This device's samples: an .npz, or a folder with a folder per class.")]
    seed: Annotated[int, Meta(ge=0, description="Of the validation split, where the data bring none.")] = 0
    train_on: TrainOn = Processor.CPU
    inference_only: Annotated[
        bool, Meta(description="Never train: wait for a finished bundle. Always so where torch is missing.")
    ] = False
    egress: (
        Annotated[Path, Meta(description="The owner's file of what may leave; HOME/egress.toml without it.")] | None
    ) = None
    max_epsilon: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="Privacy budget: tell nothing of the samples but with noise, and no more when all of it "
                "together would exceed this epsilon (docs/privacy.md).",
            ),
        ]
        | None
    ) = None
    delta: Annotated[float, Meta(gt=0, lt=1, description="Delta of --max-epsilon: below 1 / samples here.")] = 1e-5
    min_cohort: Annotated[
        int,
        Meta(ge=2, description="Decline masked sums of fewer devices, or that differ by fewer from an earlier one."),
    ] = MIN_COHORT
    min_free_ram_gb: (
        Annotated[float, Meta(ge=0, description="Decline work with less free memory.", extra={"unit": "GB"})] | None
    ) = None
    max_temperature_c: (
        Annotated[float, Meta(description="Decline work when hotter, where there is a sensor.", extra={"unit": "C"})]
        | None
    ) = None
    min_battery: (
        Annotated[
            float, Meta(ge=0, le=1, description="Decline work with less charge, on battery.", extra={"unit": "0..1"})
        ]
        | None
    ) = None
    context_interval_s: Annotated[
        float, Meta(gt=0, description="How often the device says how it is.", extra={"unit": "s"})
    ] = 10.0
    steps: Annotated[
        str, Meta(description="Steps of your own, package.module:Class, comma-separated, beside those installed.")
    ] = ""
    allow: Annotated[
        str, Meta(description="Code that the .json of a task may name, package.module:name, comma-separated.")
    ] = ""
    keepalive_s: Annotated[
        int, Meta(ge=1, le=3600, description="The broker misses us after 1.5 times this.", extra={"unit": "s"})
    ] = 30


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings_options(AgentSettings, "agent")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event on standard output.")
def agent(config: Path | None, as_json: bool, **flags: object) -> int:
    """Take part in a federation with the data of this device, until Ctrl-C or SIGTERM.

    Raw samples, labels, samples marked sensitive and the private model never leave the device; what else may, the
    device's owner says in HOME/egress.toml, and `fedge egress` shows what did (docs/privacy.md).
    Killed at any moment and started again with the same --home it goes on where it was. Without torch (or with
    --inference-only) it trains nothing and needs no labels: methods with a global model (fedge, fedavg, ...) send it
    that as a finished bundle, fedcoe sends one for its samples.

    \b
    Examples:
      fedge agent --broker server:1883 --federation shop --id cam1 --home cam1 --task digits --data cam1.npz
      fedge agent --config raspberry_pi.toml --id cam3 --inference-only
      fedge agent --config raspberry_pi.toml --id cam2
      fedge agent --config raspberry_pi.toml --max-temperature-c 70 --json

    \b
    Exit codes: 2 wrong configuration, 3 the broker refuses us, 4 the disk is full or broken, 130 stopped.
    """  # noqa: D301 - click wants the backspace character itself
    settings = resolve(AgentSettings, "agent", config, flags)
    rules = rules_of(settings.home, settings.egress, config)
    bind(federation=settings.federation, device=settings.id)
    try:
        asyncio.run(_run(build(settings, rules, _observer(as_json))))
    finally:
        click.echo("", nl=sys.stdout.isatty() and not as_json)
    return INTERRUPTED


def build(settings: AgentSettings, rules: Rules, observe: Callable[[str, dict[str, object]], None]) -> Agent:
    """Make the agent that the settings describe; reads its data, without torch unless it is to train on a GPU.

    Raises:
        ConfigError: the task, the data or an address is wrong, or there is no such GPU.
    """
    from edge_agent.agent import Agent, Identity, Limits
    from fedge.tasks import task_spec

    task = task_spec(settings.task, settings.data, allow=settings.allow.split(","))
    trains = not settings.inference_only and find_spec("torch") is not None
    if settings.train_on is Processor.CUDA and not trains:
        raise ConfigError("train_on is cuda, but this agent trains nothing: install torch, without --inference-only")
    if settings.max_epsilon is not None and trains and find_spec("opacus") is None:
        raise ConfigError("max_epsilon needs Opacus to count with: pip install 'fedge[privacy]'")
    steps = known_steps(path for path in settings.steps.split(",") if path)
    n_shared, make_worker = (_training if trains else _inference)(settings, task, steps)
    identity = Identity(settings.id, settings.federation, task, n_shared, trains, steps)
    limits = Limits(settings.min_free_ram_gb, settings.max_temperature_c, settings.min_battery)
    return Agent(
        identity,
        settings.at(settings.broker, keepalive_s=settings.keepalive_s),
        settings.home,
        make_worker,
        limits=limits,
        context_interval_s=settings.context_interval_s,
        rules=rules,
        observe=observe,
    )


def _training(settings: AgentSettings, task: TaskSpec, steps: Steps) -> tuple[int, Callable[[], Works]]:
    """How many samples there are for updates, and how to make the worker that learns."""
    from fedge.tasks import device_data
    from fedge.validation import Validation

    if settings.train_on is Processor.CUDA:
        from fedge.models.training import torch_device

        torch_device(settings.train_on)  # what is missing is said at once, not with the first order
    data = device_data(task, settings.data, seed=settings.seed)
    Validation(data.x_val, data.y_val, data.sensitive_val).save(settings.home)

    def make_worker() -> Works:
        """Runs in the worker thread: from here on the process holds torch, on one core beside the keep-alive."""
        import torch

        from edge_agent.worker import Worker
        from fedge.models.training import torch_device

        torch.set_num_threads(1)
        processor = torch_device(settings.train_on)
        return Worker(
            *(settings.id, task, data, settings.home),
            budget=_budget(settings),
            steps=steps,
            min_cohort=settings.min_cohort,
            processor=processor,
        )

    return data.n_shared, make_worker


def _inference(settings: AgentSettings, task: TaskSpec, steps: Steps) -> tuple[int, Callable[[], Works]]:
    """The same for a device that does not learn."""
    from fedge.tasks import DeviceData, device_inputs

    data = DeviceData.unlabelled(device_inputs(task, settings.data))

    def make_worker() -> Works:
        from edge_agent.worker import Worker

        return Worker(settings.id, task, data, settings.home, budget=_budget(settings), steps=steps, trains=False)

    return 0, make_worker


def _budget(settings: AgentSettings) -> Budget:
    from edge_agent.device import Budget

    return Budget(settings.max_epsilon, settings.delta)


async def _run(agent: Agent) -> None:
    on_signal(agent.stop, within_s=STOP_S)
    await agent.run()


def _observer(as_json: bool) -> Callable[[str, dict[str, object]], None]:
    from edge_agent.agent import silent

    if as_json:
        return lambda event, fields: click.echo(json.dumps({"event": event, **fields}))
    return Progress().observe if sys.stdout.isatty() else silent


class Progress:
    """One line that says what the device is doing."""

    def __init__(self) -> None:
        self._counts = {"order_done": 0, "report_acked": 0, "refused": 0}
        self._doing = "connecting"

    def observe(self, event: str, fields: dict[str, object]) -> None:
        """Redraw the line."""
        if event in self._counts:
            self._counts[event] += 1
        if event == "order_started":
            self._doing = f"round {fields['round']}: {fields['step']}"
        elif event in {"online", "order_done", "stopping", "sleeping"}:
            self._doing = "waiting for orders" if event in {"online", "order_done"} else event
        done, acked, refused = self._counts.values()
        click.echo(f"\r\x1b[2K{self._doing} | done {done}, acknowledged {acked}, refused {refused}", nl=False)
