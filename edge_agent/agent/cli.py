"""`fedge agent`: take part in a federation with the data of this device."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from edge_agent.agent.settings import AgentSettings
from fedge.errors import ConfigError
from fedge.privacy.egress import Rules, read_rules
from fedge.settings import resolve, settings_options
from fedge.system.background import STOP_S, on_signal
from fedge.system.hardware import Processor
from fedge.system.help import Command, json_lines_option
from fedge.system.logs import bind
from fedge.system.stopping import INTERRUPTED

if TYPE_CHECKING:
    from edge_agent.agent.loop import Agent
    from edge_agent.agent.workplace import WorkerProcess


@click.command(cls=Command)
@settings_options(AgentSettings, "agent")
@json_lines_option("event")
def agent(config: Path | None, as_json: bool, **flags: object) -> int:
    """Take part in a federation with the data of this device, until Ctrl-C or SIGTERM.

    Raw samples, labels, samples marked sensitive and the private model never leave the device. Its owner says in
    HOME/egress.toml what else may leave; `fedge egress` shows what did (docs/privacy.md). An agent that was killed
    continues where it was, if it has the same --home. Without torch, or with --inference-only, it trains nothing and
    needs no labels. Methods with a global model (fedge, fedavg, ...) then send that as a finished bundle, and fedcoe
    sends one for its samples.

    Examples:
      fedge agent --broker server:1883 --federation shop --id cam1 --home cam1 --task digits --data cam1.npz
      fedge agent --config raspberry_pi.toml --id cam3 --inference-only
      fedge agent --config raspberry_pi.toml --max-temperature-c 70 --json

    Exit codes: 2 wrong configuration, 3 the broker refuses us, 4 the disk is full or broken, 130 stopped.
    """
    settings = resolve(AgentSettings, "agent", config, flags)
    rules = read_rules(settings.home, settings.egress, config)
    bind(federation=settings.federation, device=settings.id)
    try:
        asyncio.run(run_agents(settings, rules, _make_observer(as_json)))
    finally:
        click.echo("", nl=sys.stdout.isatty() and not as_json)
    return INTERRUPTED


async def run_agents(settings: AgentSettings, rules: Rules, observe: Callable[[str, dict[str, object]], None]) -> None:
    """Run the agent until SIGTERM or Ctrl-C, and another one each time that a class has joined the federation.

    Raises:
        ConfigError, StoreError, TransportError: as `make_agent` and `Agent.run`.
    """
    from edge_agent.agent.workplace import WorkerProcess

    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        running.stop()

    worker = WorkerProcess(settings)
    running = make_agent(settings, rules, observe, worker)
    on_signal(stop, within_s=STOP_S)
    await running.run()
    while running.is_outdated and not stopped:
        worker.close()
        worker = WorkerProcess(settings)
        running = make_agent(settings, rules, observe, worker)
        await asyncio.sleep(0)  # a signal may have come meanwhile
        if not stopped:
            await running.run()


def make_agent(
    settings: AgentSettings,
    rules: Rules,
    observe: Callable[[str, dict[str, object]], None],
    worker: WorkerProcess | None = None,
) -> Agent:
    """Make the agent described by the settings, and read its data, without torch.

    `worker`: does its work; a new one if None.

    Raises:
        ConfigError: the task, the data or an address is wrong, or there is no such GPU.
    """
    from edge_agent.agent.context import Limits
    from edge_agent.agent.identity import Identity
    from edge_agent.agent.loop import Agent
    from edge_agent.agent.workplace import SampleWatch, WorkerProcess
    from edge_agent.device.own_task import adopt_classes
    from fedge.steps.noise import explain_weak_delta

    task, steps = settings.make_spec(), settings.find_steps()
    if settings.train_on is Processor.CUDA and not settings.trains:
        raise ConfigError("train_on is cuda, but this agent trains nothing: install torch, without --inference-only")
    if settings.max_epsilon is not None and settings.trains and find_spec("opacus") is None:
        raise ConfigError("max_epsilon needs Opacus to count with: pip install 'fedge[privacy]'")
    samples = SampleWatch(settings)
    if settings.max_epsilon is not None and (weak := explain_weak_delta(settings.delta, samples.counts.n_shared)):
        raise ConfigError(f"--{weak}")
    identity = Identity(settings.id, settings.federation, task, samples.counts.n_shared, settings.trains, steps)
    limits = Limits(settings.min_free_ram_gb, settings.max_temperature_c, settings.min_battery)
    return Agent(
        identity,
        settings.make_broker_settings(settings.broker, keepalive_s=settings.keepalive_s),
        settings.home,
        lambda: worker or WorkerProcess(settings),
        limits=limits,
        context_interval_s=settings.context_interval_s,
        rules=rules,
        observe=observe,
        samples=samples,
        adopt=partial(adopt_classes, settings.load_given_task(), settings.home),
    )


def _make_observer(as_json: bool) -> Callable[[str, dict[str, object]], None]:
    from edge_agent.agent.events import ignore_event

    if as_json:
        return lambda event, fields: click.echo(json.dumps({"event": event, **fields}))
    return Progress().observe if sys.stdout.isatty() else ignore_event


class Progress:
    """A status line that shows what the device is doing."""

    def __init__(self) -> None:
        self._counts = {"order_done": 0, "report_acked": 0, "refused": 0}
        self._doing = "connecting"

    def observe(self, event: str, fields: dict[str, object]) -> None:
        """Redraw the line."""
        if event in self._counts:
            self._counts[event] += 1 + cast(int, fields.get("untold", 0))
        if event == "order_started":
            self._doing = f"round {fields['round']}: {fields['step']}"
        elif event in {"online", "order_done", "stopping", "sleeping"}:
            self._doing = "waiting for orders" if event in {"online", "order_done"} else event
        done, acked, refused = self._counts.values()
        click.echo(f"\r\x1b[2K{self._doing} | done {done}, acknowledged {acked}, refused {refused}", nl=False)
