"""PM-MoE: after a model-split method has ended, each device mixes the private modules of all devices by a gate.

Source: Feng et al., "PM-MOE: Mixture of Experts on Private Model Parameters for Personalized Federated Learning", WWW
2025; specification docs/methods/pm_moe.md, which found no gain of this stage over the same
number of further local steps. Whoever chooses this method chooses that every device's private module goes to every
other device, under a number that is drawn anew for the run (section 9, docs/privacy.md).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from coordinator.fleet import Fleet
from coordinator.methods import (
    NO_DATA,
    Idle,
    Method,
    MethodSettings,
    Server,
    State,
    insist,
    install,
    make,
    results,
    round_rng,
)
from coordinator.methods.dbe import DbeOptions
from coordinator.methods.fedrep import FedRepOptions
from coordinator.methods.personal_layers import PersonalLayers, PersonalState
from fedge.bundle import MAX_POOL
from fedge.errors import ConfigError
from fedge.messages import BlobRef
from fedge.steps.fit_pool import FitPool
from fedge.steps.install import Installed
from fedge.steps.share_private import PrivateShared, SharePrivate
from fedge.tensors import Layout


class Options(DbeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`base`: the first stage; the options of the bases (`selection`, fedrep's, dbe's) are passed on to it.

    `top` None: half of the pool, rounded up. `denoise` 0: all of the pool. `clip`, `noise`: of a module that is sent.
    """

    IDLE: ClassVar[tuple[Idle, ...]] = (
        Idle(("temperature",), {"denoise": (0,)}, "all of the pool stays"),
        Idle(("gate_batch_size", "gate_learning_rate", "dropout"), {"gate_epochs": (0,)}, "the gate is not trained"),
    )
    base: Literal["fedper", "fedrep", "lg-fedavg", "fedrod", "dbe"] = "fedper"
    head_steps: Annotated[int, Meta(ge=1)] = 10
    preset: Literal["anchored", "paper"] = "anchored"
    top: Annotated[int, Meta(ge=1)] | None = None
    denoise: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    gate_epochs: Annotated[int, Meta(ge=0)] = 50
    gate_batch_size: Annotated[int, Meta(ge=1)] = 32
    gate_learning_rate: Annotated[float, Meta(gt=0)] = 0.1
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    guard: bool = True
    clip: Annotated[float, Meta(gt=0)] | None = None
    noise: Annotated[float, Meta(ge=0)] = 0.0


class PmMoe(Method[PersonalState]):
    """Stage 1: the base's rounds. Stage 2, once: collect the pool, send it out, a gate on every device."""

    name = "pm-moe"
    Options: ClassVar[type[Struct]] = Options
    NO_FINE_TUNING = "pm-moe ends in a gate over what the devices kept"

    def __init__(self, settings: MethodSettings, server: Server = NO_DATA) -> None:
        super().__init__(settings, server)
        if self.options.top == 1 and self.options.preset == "anchored":
            raise ConfigError("top = 1 leaves the anchored gate without a gradient: take 2 or more, or preset = paper")
        if self.options.noise and self.options.clip is None:
            raise ConfigError("option of the method: noise is measured in clips: give clip, too")
        of_bases = {field.name for field in msgspec.structs.fields(FedRepOptions) + msgspec.structs.fields(DbeOptions)}
        passed = {name: value for name, value in settings.options.items() if name in of_bases}
        try:
            base = make(self.options.base, msgspec.structs.replace(settings, options=passed), server)
        except ConfigError as error:
            raise ConfigError(f"base {self.options.base} of pm-moe: {error}") from error
        assert isinstance(base, PersonalLayers)
        self._base: PersonalLayers[Any] = base

    def init(self, layout: Layout, model: BlobRef) -> PersonalState:
        """The base's state before round 1."""
        state: PersonalState = self._base.init(layout, model)
        return state

    async def round(self, state: PersonalState, fleet: Fleet) -> PersonalState:
        """A round of the base."""
        after: PersonalState = await self._base.round(state, fleet)
        return after

    async def finish(self, state: PersonalState, fleet: Fleet) -> PersonalState:
        """Section 7. A device without a module of its own (it never trained) installs the base's model."""
        o, base = self.options, self._base
        kept_by, personal = base.kept_by(state), base.personal
        if kept_by is None or not state.round:  # nothing was ever kept
            return await install(self, state, fleet)
        share = SharePrivate(kept_by=kept_by, personal=personal, clip=o.clip, noise=o.noise)
        answers = await fleet.run("share", {device.id: share for device in fleet.devices()})
        modules = {i: shared.module for i, shared in results(answers, PrivateShared).items()}
        numbers = round_rng(self.settings, state.round + 1).permutation(sorted(modules)).tolist()
        n_pools = -(-len(numbers) // MAX_POOL)  # more devices than a pool takes: several of about equal size
        pools = [numbers[k::n_pools] for k in range(n_pools)]
        orders = {
            i: FitPool(
                model=state.model,
                personal=personal,
                kept_by=kept_by,
                initial=state.initial,
                pool=tuple(None if other == i else modules[other] for other in members),  # the own one is there
                own=own,
                preset=o.preset,
                top=o.top,
                denoise=o.denoise,
                temperature=o.temperature,
                epochs=o.gate_epochs,
                batch_size=o.gate_batch_size,
                learning_rate=o.gate_learning_rate,
                dropout=o.dropout,
                guard=o.guard,
            )
            for members in pools
            for own, i in enumerate(members)
        }
        fitted = results(await insist(fleet, "pool", orders), Installed)
        others = {device.id for device in fleet.devices()} - set(fitted)
        after = await install(
            self,
            state,
            fleet,
            among=others,
            model=state.model,
            personal=personal,
            kept_by=kept_by,
            initial=state.initial,
        )
        installed = dict(sorted((after.installed | fitted).items()))
        return msgspec.structs.replace(after, installed=installed)

    def serves(self, state: PersonalState, device_id: str) -> BlobRef:
        """What the base serves."""
        return self._base.serves(state, device_id)

    def summary(self, state: State) -> dict[str, Any]:
        """The base's, and how many devices' guards preferred their own module."""
        base: dict[str, Any] = self._base.summary(state)
        guarded = sum(result.guarded for result in state.installed.values())
        return base | {"method": self.name, "base": self.options.base, "guarded": guarded}
