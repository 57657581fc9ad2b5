"""A federation of real processes whose devices are behind relays, each site with a broker of its own."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import State
from fedge.commands.broker import LocalBroker
from fedge.system.files import BlobFolder
from fedge.tensors.layout import from_bytes
from fedge.wire.messages import iterate_blobs
from tests.support.federation import Federation, Running


class Sites(Federation):
    """`sites`: by name the devices behind each relay; `direct`: those that are behind none."""

    def __init__(
        self, broker: LocalBroker, folder: Path, sites: Mapping[str, Iterable[str]], direct: Iterable[str] = ()
    ) -> None:
        self.site_of = {device: site for site, devices in sites.items() for device in devices}
        super().__init__(broker, folder, devices=sorted([*self.site_of, *direct]))
        self.sites = {site: LocalBroker("mosquitto", home=folder / f"{site}-broker") for site in sites}

    async def __aenter__(self) -> Self:
        for broker in self.sites.values():
            await self._stack.enter_async_context(broker)
        return self

    async def relay(self, site: str, **flags: object) -> Running:
        """Start a site's relay, or start it again."""
        below = f"{self.sites[site].host}:{self.sites[site].port}"
        given = {"id": site, "home": self.folder / site, "site_broker": below, "site_federation": site, **flags}
        return await self._start("relay", given, log=site)

    async def relays(self) -> dict[str, Running]:
        """Start all relays."""
        return {site: await self.relay(site) for site in self.sites}

    async def agent(self, device: str, **flags: object) -> Running:
        """Start an agent on its site, or start it again."""
        if site := self.site_of.get(device):
            flags = {"broker": f"{self.sites[site].host}:{self.sites[site].port}", "federation": site, **flags}
        return await super().agent(device, **flags)

    def open_orders(self, device: str) -> list[tuple[int, str]]:
        """Of a device behind a relay: on its site."""
        query = "SELECT round, id FROM orders WHERE status = 'open'"
        return self._on_site(self.site_of[device], query) if device in self.site_of else self.rows(query)

    def answered(self, site: str, number: int) -> set[str]:
        """Who has answered the training of a round on a site."""
        query = "SELECT device_id FROM orders WHERE label = 'train' AND status = 'accepted' AND round = ?"
        return {device for (device,) in self._on_site(site, query, number)}

    def _on_site(self, site: str, query: str, *values: object) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for store in (self.folder / site / "site").glob("*/store.db"):
            with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
                found += db.execute(query, values).fetchall()
        return found

    def names(self) -> set[str]:
        """What the coordinator calls the devices."""
        return {f"{self.site_of[d]}.{d}" if d in self.site_of else d for d in self.devices}

    async def require_flat(self, name: str, settings: MethodSettings) -> State:
        """See that all models, and what the server keeps beside, are those of the same devices without relays; the
        last state."""
        made: list[SimulatedFleet] = []

        def kind(*args: Any, **named: Any) -> SimulatedFleet:
            made.append(SimulatedFleet(*args, **named))
            return made[0]

        theirs = await self.undisturbed(name, settings, kind)
        state = self.state(type(theirs))
        here, there = (list(iterate_blobs(msgspec.structs.replace(each, descents={}))) for each in (state, theirs))
        for ours, expected in zip(here, there, strict=True):
            tensors = from_bytes(BlobFolder(self.home / "blobs").get(ours.digest))
            for name, own in made[0].get_tensors(expected).items():
                np.testing.assert_allclose(tensors[name], own, rtol=1e-4, atol=1e-5, err_msg=name)
        return state
