"""`fedge relay`: the edge server of a site."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import click

from coordinator.fleet.relayed import STEPS
from coordinator.relay.site import Site
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from fedge.membership.credentials import Credentials
from fedge.models.weights import Allow
from fedge.settings import CODE, Name, resolve, settings_options
from fedge.system.background import STOP_S, on_signal
from fedge.system.help import Command, json_lines_option
from fedge.system.logs import bind
from fedge.system.stopping import INTERRUPTED
from fedge.system.text import Heading
from fedge.tasks import load_task

Observer = Callable[[str, dict[str, Any]], None]


class RelaySettings(Credentials, frozen=True, kw_only=True):
    """Section [relay] of the configuration."""

    broker: Annotated[
        str,
        Heading.BROKER,
        "This is the MQTT broker of the coordinator above, as of `fedge agent`; proxy and prefixes are for it.",
    ]
    federation: Annotated[Name, Heading.BROKER, "This is the name of the federation above."]
    id: Annotated[Name, Heading.BROKER, "This is the name of the site; its devices are called ID.DEVICE above."]
    home: Annotated[Path, Heading.FOLDERS, "This folder holds the durable state of one relay."]
    task: Annotated[str, CODE, Heading.TASK, "The task is that of the coordinator: a name, or its task.json."]
    allow: Allow = ""
    site_broker: Annotated[str, Heading.BROKER, "The MQTT broker of the site is at HOST:PORT."]
    site_federation: Annotated[Name, Heading.BROKER, "The site's devices take part in the federation of this name."]
    site_identity: Annotated[
        Path | None, Heading.IDENTITY, "This is FOLDER/coordinator of the site's own `fedge provision init`."
    ] = None


@click.command(cls=Command)
@settings_options(RelaySettings, "relay")
@json_lines_option("event")
def relay(config: Path | None, as_json: bool, **flags: object) -> int:
    """Represent the devices of a site, until Ctrl-C or SIGTERM.

    The coordinator above treats the site's devices like all others. It sends one order for all of them and each model
    once; the relay answers with the sum of their updates. A relay that was killed continues where it was, if it has the
    same --home. docs/scale.md says which methods work with relays.

    Examples:
      fedge relay --broker server:1883 --federation shop --id north --home north --task task.json
        --site-broker localhost:1883 --site-federation north
      fedge relay --config relay.toml --json

    Exit codes: 2 wrong configuration, 3 a broker refuses us, 4 the disk is full or broken, 130 stopped.
    """
    settings = resolve(RelaySettings, "relay", config, flags)
    bind(federation=settings.federation, device=settings.id)

    def observe(event: str, fields: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps({"event": event, **fields}))

    asyncio.run(_run(settings, observe))
    return INTERRUPTED


async def _run(settings: RelaySettings, observe: Observer) -> None:
    async with open_relay(settings, observe) as agent:
        on_signal(agent.stop, within_s=STOP_S)
        await agent.run()


@asynccontextmanager
async def open_relay(settings: RelaySettings, observe: Observer) -> AsyncIterator[Agent]:
    """Open the relay by the settings, with its site connected inside the block; `Agent.run` runs it."""
    task = load_task(settings.task, allow=settings.allow.split(","))
    below = Credentials(identity=settings.site_identity).make_broker_settings(settings.site_broker)
    above = settings.make_broker_settings(settings.broker)
    site = Site(below, settings.site_federation, settings.home, task, lambda event, f: observe(f"site_{event}", f))
    async with site:
        steps = {kind.STEP: kind for kind in STEPS}
        identity = Identity(settings.id, settings.federation, task, 0, steps=steps, site=site.list_present)
        agent = Agent(identity, above, settings.home, lambda: site, observe=observe)
        watching = asyncio.create_task(site.watch(agent.publish_status))
        try:
            yield agent
        finally:
            watching.cancel()
