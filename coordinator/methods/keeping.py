"""FedAvg whose devices keep something for themselves: what the methods of pm_moe.md section 4 and Ditto share.

A method says which part of the model travels and what a device keeps; the rest is FedAvg. After the last round of
training every device installs the shared part with what it kept; one that never trained takes the initial model for it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from coordinator.fleet import Fleet
from coordinator.methods import MethodSettings, install, options_of, summary_of
from coordinator.methods.fedavg import FedAvgOptions, FedAvgState, train
from fedge.messages import BlobRef, Keep, Part, Start, Train
from fedge.tensors import Layout, overlaid, unflatten


class KeepingState(FedAvgState, frozen=True, kw_only=True):
    """`model`: the part that travels; `initial`: w_0, all tensors; `whole`: w_0 with that part over it."""

    initial: BlobRef
    whole: BlobRef


K = TypeVar("K", bound=KeepingState)


class Keeping(Generic[K]):
    """`part`: what travels, both ways; `kind`: of the state; `splits`: whether the network must have a head."""

    name: str
    Options: ClassVar[type[FedAvgOptions]] = FedAvgOptions
    part: ClassVar[Part] = Part.ALL
    splits: ClassVar[bool] = True
    kind: type[K]

    def __init__(self, settings: MethodSettings) -> None:
        self.settings = settings
        self.options = options_of(settings, self.Options)

    def keep(self, state: K) -> Keep | None:
        """What a device keeps in the next round; None: nothing."""
        raise NotImplementedError

    def initial(self, layout: Layout, model: BlobRef) -> K:
        """The state before round 1.

        Raises:
            ConfigError: the network has no head.
        """
        if self.splits:
            layout.part(Part.HEAD)
        return self.kind(round=0, layout=layout, model=model, initial=model, whole=model)

    def done(self, state: K) -> bool:
        """R rounds of training and one of installing."""
        return state.round > self.settings.rounds

    async def round(self, state: K, fleet: Fleet) -> K:
        """One round of training, or the installation."""
        layout, settings = state.layout.part(self.part), self.settings
        if state.round == 0:
            w = unflatten(fleet.get(state.initial, state.layout), state.layout)
            part = fleet.put({info.name: w[info.name] for info in layout.tensors})
            state = msgspec.structs.replace(state, model=part)
        keep, initial = self.keep(state), None if self.part is Part.ALL else state.initial
        if state.round == settings.rounds:
            return await install(self, state, fleet, model=state.model, part=self.part, keep=keep, initial=initial)
        order = Train(
            starts=(Start(model=state.model),),
            sgd=settings.sgd,
            codec=settings.codec,
            part=self.part,
            keep=keep,
            initial=initial,
        )
        state = await train(state, fleet, order, layout, settings, self.options)
        trained = unflatten(fleet.get(state.model, layout), layout)
        whole = overlaid(fleet.get(state.initial, state.layout), trained, state.layout)
        return msgspec.structs.replace(state, whole=fleet.put(unflatten(whole, state.layout)))

    def serves(self, state: K, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The shared part; the rest is as it was at first."""
        return state.whole

    def summary(self, state: K) -> dict[str, Any]:
        """History, selection counts, bundles."""
        return summary_of(self, state)
