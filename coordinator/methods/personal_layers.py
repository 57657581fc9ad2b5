"""FedAvg whose devices keep something for themselves: what the methods of pm_moe.md section 4 and Ditto share.

A method says which layers are personal and by which step a device trains; the rest is FedAvg. After the last round of
training every device installs what is shared with what it kept; one that never trained takes the initial model for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from coordinator.fleet import Fleet
from coordinator.methods import Method, install
from coordinator.methods.cohort import NO_CLUSTERS, SELECTIONS
from coordinator.methods.fedavg import FedAvgState, train
from fedge.messages import BlobRef
from fedge.steps.train import Start, Train
from fedge.tensors import HEAD, Layout, Selector, overlaid, unflatten
from fedge.weights import named


class PersonalState(FedAvgState, frozen=True, kw_only=True):
    """`model`: the layers that travel; `initial`: w_0, all tensors; `whole`: w_0 with those layers over it."""

    initial: BlobRef
    whole: BlobRef


P = TypeVar("P", bound=PersonalState)


class PersonalLayers(Method[P], Generic[P]):
    """`personal`: the layers that stay on a device; `needs_head`: whether the network must have a head.

    `sends_initial`: whether a device's personal layers begin as those of the common initial model; otherwise as its
    own network makes them, and not a byte of them is ever on the wire.
    """

    SELECTIONS = SELECTIONS
    REFUSED: ClassVar[Mapping[str, str]] = NO_CLUSTERS
    State: ClassVar[type[Any]] = PersonalState
    personal: ClassVar[Selector] = ()
    needs_head: ClassVar[bool] = False
    pooled = False
    """Whether what stays is to be pooled at the end (PM-MoE), and so must learn from D_L alone."""
    sends_initial: ClassVar[bool] = True

    def step(self, state: P, **common: Any) -> Train:  # noqa: ARG002 - the same in all rounds
        """What a device does in the next round; `common`: the fields of `Train`, filled in."""
        return Train(**common)

    def init(self, layout: Layout, model: BlobRef) -> P:
        """The state before round 1.

        Raises:
            ConfigError: the network has no such layers.
        """
        layout.without(self.personal)
        if self.needs_head:
            layout.without(HEAD)
        state: P = self.State(round=0, layout=layout, model=model, initial=model, whole=model)
        return state

    def order(self, state: P) -> Train:
        """The order of the next round."""
        return self.step(
            state,
            starts=(Start(model=state.model),),
            sgd=self.settings.sgd,
            codec=self.settings.codec,
            personal=self.personal,
            initial=self.first(state),
        )

    def first(self, state: P) -> BlobRef | None:
        """Where the personal layers of a device begin: at weights that the task names, whatever the method does."""
        given = self.server.task is not None and named(self.server.task) is not None
        return state.initial if self.personal and (self.sends_initial or given) else None

    def kept_by(self, state: P) -> str | None:
        """The step that keeps something on the devices; None: none does."""
        order = self.order(state)
        return order.STEP if order.kept(order.personal, state.layout) else None

    async def round(self, state: P, fleet: Fleet) -> P:
        """FedAvg of the layers that travel."""
        layout = state.layout.without(self.personal)
        if state.round == 0:
            state = self._cut(state, fleet, layout)
        state = await train(self, state, fleet, self.order(state), layout)
        trained = unflatten(fleet.get(state.model, layout), layout)
        whole = overlaid(fleet.get(state.initial, state.layout), trained, state.layout)
        return msgspec.structs.replace(state, whole=fleet.put(unflatten(whole, state.layout)))

    @staticmethod
    def _cut(state: P, fleet: Fleet, layout: Layout) -> P:
        """The state whose model are the layers that travel, of the initial model."""
        w = unflatten(fleet.get(state.initial, state.layout), state.layout)
        return msgspec.structs.replace(state, model=fleet.put({info.name: w[info.name] for info in layout.tensors}))

    async def finish(self, state: P, fleet: Fleet) -> P:
        """What is shared, with what each device kept."""
        if state.round == 0:
            state = self._cut(state, fleet, state.layout.without(self.personal))
        return await install(
            self,
            state,
            fleet,
            model=state.model,
            personal=self.personal,
            kept_by=self.kept_by(state),
            initial=self.first(state),
        )

    def serves(self, state: P, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The shared layers; the rest is as it was at first."""
        return state.whole
