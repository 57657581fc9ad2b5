"""PM-MoE: after a model-split method has ended, each device mixes the private modules of all devices by a gate.

Source: Feng et al., "PM-MOE: Mixture of Experts on Private Model Parameters for Personalized Federated Learning", WWW
2025; specification docs/methods/pm_moe.md, which found no gain of this stage over the same number of further local
steps. With this method every device's private module goes to every other device, under a number drawn for the run
(section 9, docs/privacy.md).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.catalogue import make_method
from coordinator.methods.installation import install
from coordinator.methods.method import Method
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import make_round_rng, run_with_retries, select_results
from coordinator.methods.state import State
from fedge.data.task import MAX_POOL
from fedge.errors import ConfigError
from fedge.steps.contract import Reveals
from fedge.steps.mixture.fit_pool import FitPool
from fedge.steps.mixture.install import Installed
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.system.loading import FINE_TUNED
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of PM-MoE. `base`: the first stage. `top`: experts of a sample, by default half of the pool.

    `denoise`: share of the pool that is left out. `guard`: whether the own module serves alone if it does better on
    validation samples. `clip`, `noise`: of a module that is sent; noise is a multiple of `clip`.
    """

    base: Literal["fedper", "fedrep", "lg-fedavg", "fedrod", "dbe"] = "fedper"
    top: Annotated[int, Meta(ge=1)] | None = None
    denoise: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    guard: bool = True
    clip: Annotated[float, Meta(gt=0)] | None = None
    noise: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise ValueError("noise is a multiple of clip: give clip, too")


class PmMoe(Method[PersonalState]):
    """PM-MoE. Stage 1: the base's rounds. Stage 2, once: collect the pool, send it out, fit a gate on every device."""

    name = "pm-moe"
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = Options
    SELECTIONS = SELECTIONS
    REVEALS = frozenset({Reveals.PRIVATE})
    CLASSES = "mixes the confidences of many modules in each class"
    REFUSED = {
        **NO_CLUSTERS,
        **dict.fromkeys(("feature_momentum", "head_steps", "kappa"), "the base has its default"),
        **dict.fromkeys(
            ("dropout", "gate_batch_size", "gate_epochs", "gate_learning_rate", "temperature"), "its default stands"
        ),
        "preset": "benchmarks/papers/pm_moe.py has the paper's gate as a class",
        FINE_TUNED: "pm-moe ends in a gate over what the devices kept",
    }
    PRESET: ClassVar[Literal["anchored", "paper"]] = "anchored"
    """Preset of the gate (section 5)."""

    def set_up(self) -> None:
        """Make the base method."""
        if self.options.top == 1 and self.PRESET == "anchored":
            raise ConfigError("top = 1 leaves the anchored gate without a gradient: take 2 or more")
        assert self.selection is not None
        base = make_method(
            self.options.base,
            msgspec.structs.replace(self.settings, options={"selection": self.selection}),
            self.server,
        )
        assert isinstance(base, PersonalLayers)
        base.pooled = True
        self._base: PersonalLayers[Any] = base

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: every device gets the other devices' modules."""
        return super().explain_no_relays() or "devices hand their private modules to each other"

    def init(self, layout: Layout, model: BlobRef) -> PersonalState:
        """Return the base's state before round 1."""
        state: PersonalState = self._base.init(layout, model)
        return state

    def begin_campaign(self, state: PersonalState, changed: Collection[str]) -> PersonalState:
        """Return the base's state before the next campaign."""
        after: PersonalState = self._base.begin_campaign(state, changed)
        return after

    async def round(self, state: PersonalState, fleet: Fleet) -> PersonalState:
        """Do a round of the base."""
        after: PersonalState = await self._base.round(state, fleet)
        return after

    async def finish(self, state: PersonalState, fleet: Fleet) -> PersonalState:
        """Fit a gate over the pool on every device (section 7); untrained devices install the base's model."""
        o, base = self.options, self._base
        kept_by, personal = base.find_kept_step(state), base.personal
        if kept_by is None or not state.round:  # nothing was ever kept
            return await install(self, state, fleet)
        share = SharePrivate(kept_by=kept_by, personal=personal, clip=o.clip, noise=o.noise)
        answers = await fleet.run("share", {device.id: share for device in fleet.get_devices()})
        modules = {i: shared.module for i, shared in select_results(answers, PrivateShared).items()}
        numbers = make_round_rng(self.settings, state.round + 1).permutation(sorted(modules)).tolist()
        n_pools = -(-len(numbers) // MAX_POOL)  # several pools of about equal size if one cannot hold all
        pools = [numbers[k::n_pools] for k in range(n_pools)]
        orders = {
            i: FitPool(
                model=state.model,
                personal=personal,
                kept_by=kept_by,
                initial=state.initial,
                pool=tuple(None if other == i else modules[other] for other in members),  # the own one is on the device
                own=own,
                preset=self.PRESET,
                top=o.top,
                denoise=o.denoise,
                guard=o.guard,
            )
            for members in pools
            for own, i in enumerate(members)
        }
        fitted = select_results(await run_with_retries(fleet, "pool", orders), Installed)
        others = {device.id for device in fleet.get_devices()} - set(fitted)
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

    def get_model(self, state: PersonalState, device_id: str) -> BlobRef:
        """Return the model that the base serves."""
        return self._base.get_model(state, device_id)

    def summarise(self, state: State) -> dict[str, Any]:
        """Return the base's figures, and its name."""
        base: dict[str, Any] = self._base.summarise(state)
        return base | {"method": self.name, "base": self.options.base}
