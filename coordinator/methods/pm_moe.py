"""PM-MoE: after a model-split method has ended, each device mixes the private modules of all devices by a gate.

Source: Feng et al., "PM-MOE: Mixture of Experts on Private Model Parameters for Personalized Federated Learning", WWW
2025; specification docs/methods/pm_moe.md, which found no gain of this stage over the same
number of further local steps. Whoever chooses this method chooses that every device's private module goes to every
other device, under a number that is drawn anew for the run (section 9, docs/privacy.md).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from coordinator.fleet import Fleet
from coordinator.methods import (
    Idle,
    MethodSettings,
    State,
    insist,
    install,
    make,
    options_of,
    round_rng,
)
from coordinator.methods.dbe import DbeOptions
from coordinator.methods.fedrep import FedRepOptions
from coordinator.methods.keeping import Keeping, KeepingState
from fedge.errors import ConfigError
from fedge.messages import MAX_POOL, BlobRef, FitPool, Installed, PrivateShared, SharePrivate
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


class PmMoe:
    """Stage 1: the base's rounds. Stage 2, once: collect the pool, send it out, a gate on every device."""

    name = "pm-moe"
    Options = Options

    def __init__(self, settings: MethodSettings) -> None:
        self.settings = settings
        self.options = options_of(settings, Options)
        if settings.fine_tune:
            raise ConfigError("pm-moe ends in a gate over what the devices kept: leave out +ft")
        if self.options.top == 1 and self.options.preset == "anchored":
            raise ConfigError("top = 1 leaves the anchored gate without a gradient: take 2 or more, or preset = paper")
        if self.options.noise and self.options.clip is None:
            raise ConfigError("option of the method: noise is measured in clips: give clip, too")
        of_bases = {field.name for field in msgspec.structs.fields(FedRepOptions) + msgspec.structs.fields(DbeOptions)}
        passed = {name: value for name, value in settings.options.items() if name in of_bases}
        try:
            base = make(self.options.base, msgspec.structs.replace(settings, options=passed))
        except ConfigError as error:
            raise ConfigError(f"base {self.options.base} of pm-moe: {error}") from error
        self._base: Keeping[Any] = base  # type: ignore[assignment]

    def initial(self, layout: Layout, model: BlobRef) -> KeepingState:
        """The base's state before round 1."""
        state: KeepingState = self._base.initial(layout, model)
        return state

    def done(self, state: KeepingState) -> bool:
        """R rounds of the base and one of stage 2."""
        return self._base.done(state)

    async def round(self, state: KeepingState, fleet: Fleet) -> KeepingState:
        """A round of the base, or stage 2."""
        if state.round < self.settings.rounds:
            after = await self._base.round(state, fleet)
            assert isinstance(after, KeepingState)
            return after
        return await self._second_stage(state, fleet)

    async def _second_stage(self, state: KeepingState, fleet: Fleet) -> KeepingState:
        """Section 7. A device without a module of its own (it never trained) installs the base's model."""
        o, keep = self.options, self._base.keep(state)
        if keep is None or not state.round:  # nothing was ever kept
            return await install(self, state, fleet)
        share = SharePrivate(keep=keep, clip=o.clip, noise=o.noise)
        answers = await fleet.run("share", {device.id: share for device in fleet.devices()})
        modules = {i: a.result.module for i, a in answers.items() if isinstance(a.result, PrivateShared)}
        numbers = round_rng(self.settings, state.round + 1).permutation(sorted(modules)).tolist()
        n_pools = -(-len(numbers) // MAX_POOL)  # more devices than a pool takes: several of about equal size
        pools = [numbers[k::n_pools] for k in range(n_pools)]
        orders = {
            i: FitPool(
                global_model=state.model,
                part=self._base.part,
                keep=keep,
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
                release=1,
            )
            for members in pools
            for own, i in enumerate(members)
        }
        answers = await insist(fleet, "pool", orders)
        fitted = {i: a.result for i, a in answers.items() if isinstance(a.result, Installed)}
        others = {device.id for device in fleet.devices()} - set(fitted)
        after = await install(
            self,
            state,
            fleet,
            among=others,
            model=state.model,
            part=self._base.part,
            keep=keep,
            initial=state.initial,
        )
        installed = dict(sorted((after.installed | fitted).items()))
        return msgspec.structs.replace(after, installed=installed)

    def serves(self, state: KeepingState, device_id: str) -> BlobRef:
        """What the base serves."""
        return self._base.serves(state, device_id)

    def summary(self, state: State) -> dict[str, Any]:
        """The base's, and how many devices' guards preferred their own module."""
        base: dict[str, Any] = self._base.summary(state)
        guarded = sum(result.guarded for result in state.installed.values())
        return base | {"method": self.name, "base": self.options.base, "guarded": guarded}
