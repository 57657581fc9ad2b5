"""FedAvg with personal layers: the base of Ditto and the methods of baselines.md sections 5 to 10.

A method names the personal layers and the step by which a device trains; the rest is FedAvg. At the end every device
installs the shared layers with its own; a device that never trained uses the initial personal layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.fedavg import FedAvgState, train
from coordinator.methods.installation import install
from coordinator.methods.method import Method
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS
from coordinator.methods.promises import SHARED
from fedge.models.weights import find_weights
from fedge.steps.training.train import Start, Train
from fedge.system.moved import alias_members
from fedge.tensors.layout import HEAD, Layout, Selector, overlay_tensors, unflatten
from fedge.wire.messages import BlobRef


class PersonalState(FedAvgState, frozen=True, kw_only=True):
    """The state of the method. `model`: the layers that travel; `initial`: w_0; `whole`: w_0 with `model` over it."""

    initial: BlobRef
    whole: BlobRef


P = TypeVar("P", bound=PersonalState)


@alias_members(step="make_step", order="make_order", first="get_initial", kept_by="find_kept_step")
class PersonalLayers(Method[P], Generic[P]):
    """FedAvg without some layers. `personal`: the layers that stay; `needs_head`: whether a head is required.

    `sends_initial`: whether personal layers begin as in the common initial model; otherwise each device initialises
    its own, and no byte of them is ever sent.
    """

    SELECTIONS = SELECTIONS
    HEEDS = SHARED
    REFUSED = NO_CLUSTERS
    State: ClassVar[type[Any]] = PersonalState
    personal: ClassVar[Selector] = ()
    needs_head: ClassVar[bool] = False
    pooled = False
    """Whether the personal layers are pooled at the end (PM-MoE). They may then learn from D_L alone."""
    sends_initial: ClassVar[bool] = True

    def explain_no_patience(self) -> str:
        """Return why training cannot stop early: what devices keep would be that of another round."""
        return super().explain_no_patience() or "what devices keep is of their last round, and would not fit the best"

    def make_step(self, state: P, **common: Any) -> Train:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round for this method. `common`: values for the fields of `Train`."""
        return Train(**common)

    def init(self, layout: Layout, model: BlobRef) -> P:
        """Return the state before round 1.

        Raises:
            ConfigError: the network lacks layers that the method needs.
        """
        layout.without(self.personal)
        if self.needs_head:
            layout.without(HEAD)
        state: P = self.State(round=0, layout=layout, model=model, initial=model, whole=model)
        return state

    def add_classes(self, state: P, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> P:
        """Return the state for a network with further outputs; devices let what they keep grow themselves."""
        names = {name: grow(getattr(state, name)) for name in ("model", "initial", "whole")}
        return msgspec.structs.replace(state, layout=layout, velocity=None, descents={}, **names)

    def make_order(self, state: P) -> Train:
        """Make the order of the next round."""
        return self.make_step(
            state,
            starts=(Start(model=state.model),),
            sgd=self.settings.sgd,
            codec=self.settings.codec,
            personal=self.personal,
            initial=self.get_initial(state),
        )

    def get_initial(self, state: P) -> BlobRef | None:
        """Return the start of the personal layers; always sent if the task names initial weights."""
        given = self.server.task is not None and find_weights(self.server.task) is not None
        return state.initial if self.personal and (self.sends_initial or given) else None

    def find_kept_step(self, state: P) -> str | None:
        """Find the step that keeps tensors on the devices; None if there is none."""
        order = self.make_order(state)
        return order.STEP if order.select_kept(order.personal, state.layout) else None

    async def round(self, state: P, fleet: Fleet) -> P:
        """Do one round with the layers that travel."""
        layout = state.layout.without(self.personal)
        if state.round == 0:
            state = self._cut(state, fleet, layout)
        state = await self.train_shared(state, fleet, layout)
        trained = unflatten(fleet.get(state.model, layout), layout)
        whole = overlay_tensors(fleet.get(state.initial, state.layout), trained, state.layout)
        return msgspec.structs.replace(state, whole=fleet.put_model(whole, state.layout))

    async def train_shared(self, state: P, fleet: Fleet, layout: Layout) -> P:
        """Have a cohort train, and move the shared layers, whose layout is given: one round of FedAvg."""
        return await train(self, state, fleet, self.make_order(state), layout)

    @staticmethod
    def _cut(state: P, fleet: Fleet, layout: Layout) -> P:
        """Return the state with only the shared layers of the initial model as its model."""
        w = unflatten(fleet.get(state.initial, state.layout), state.layout)
        return msgspec.structs.replace(state, model=fleet.put({info.name: w[info.name] for info in layout.tensors}))

    async def finish(self, state: P, fleet: Fleet) -> P:
        """Install the shared layers with each device's own."""
        if state.round == 0:
            state = self._cut(state, fleet, state.layout.without(self.personal))
        return await install(
            self,
            state,
            fleet,
            model=state.model,
            personal=self.personal,
            kept_by=self.find_kept_step(state),
            initial=self.get_initial(state),
        )

    def get_model(self, state: P, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """Return the shared layers, over the initial model."""
        return state.whole
