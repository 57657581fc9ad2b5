"""SCAFFOLD: control variates correct each local step for what is particular to a device's samples.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1,
option II; baselines.md section 17. A device takes K steps y <- y - rate (g - c_i + c) from y = x, and sets

    c_i+ = c_i - c + (x - y) / (K rate)

It sends dy = y - x and dc = c_i+ - c_i. The server moves x by the mean dy, and c by 1/N sum dc. The steps are plain
SGD. A device's control variate stays on it. Each order says which report of the device was the last whose dc is in c,
and the device goes on from the control variate of that report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.method import Method
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS, ChoosingState, train_cohort
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round
from fedge.steps.training.train import Start
from fedge.steps.training.train_scaffold import TrainedScaffold, TrainScaffold
from fedge.tensors.layers import select_params
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from coordinator.fleet.fleet import Fleet


class ScaffoldState(ChoosingState, frozen=True, kw_only=True):
    """The state of SCAFFOLD. `model`: x; `control`: c (d,), zero if None.

    `counted`: by device the round of its last report whose dc is in c.
    """

    model: BlobRef
    control: BlobRef | None = None
    counted: dict[str, int] = {}


class Control(msgspec.Struct, frozen=True):
    """A device's dc, as what can be averaged."""

    update: BlobRef
    n_samples: int = 1


class Scaffold(Method[ScaffoldState]):
    """SCAFFOLD, Algorithm 1; after the last round every device installs x."""

    name = "scaffold"
    HEEDS = SHARED
    SELECTIONS = SELECTIONS
    State = ScaffoldState
    REFUSED = {
        **NO_CLUSTERS,
        **dict.fromkeys(("optimizer", "nesterov", "clip_norm"), "control variates are those of plain SGD"),
        "dp": explain_no_noise((TrainScaffold, "control")),
    }

    def begin_campaign(self, state: ScaffoldState, changed: Collection[str]) -> ScaffoldState:
        """Return the next campaign's first state; after an early stop all control variates begin anew.

        The state is then that of an earlier round, and devices have gone on since.
        """
        afresh: dict[str, Any] = {"control": None, "counted": {}} if state.best_state else {}
        return msgspec.structs.replace(super().begin_campaign(state, changed), **afresh)

    def add_classes(self, state: ScaffoldState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> ScaffoldState:
        """Return the state for a network with further outputs; all control variates begin anew."""
        return msgspec.structs.replace(
            state, layout=layout, model=grow(state.model), control=None, counted={}, descents={}
        )

    async def round(self, state: ScaffoldState, fleet: Fleet) -> ScaffoldState:
        """Do one round of Algorithm 1. With too few reports x stays, and c moves."""
        sgd = msgspec.structs.replace(self.settings.sgd, momentum=0.0)
        orders = {
            counted: TrainScaffold(
                starts=(Start(model=state.model),),
                sgd=sgd,
                codec=self.settings.codec,
                control=state.control,
                counted=counted,
            )
            for counted in {0, *state.counted.values()}
        }
        own = state.counted
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda i: orders[own.get(i, 0)])
        x = state.model
        if len(updates) >= self.settings.min_reports:
            x = apply(x, await average(self, fleet, updates, state.layout, alike=True), state.layout, fleet)
        controls = {i: Control(u.control) for i, u in updates.items() if isinstance(u, TrainedScaffold)}
        return finish_round(await self.move_control(state, controls, fleet), asked, updates, model=x)

    async def move_control(self, state: ScaffoldState, controls: dict[str, Control], fleet: Fleet) -> ScaffoldState:
        """Return the state with c + 1/N sum dc, over all N devices that are there."""
        part = select_params(state.layout)
        missing: set[str] = set()
        mean = await average(self, fleet, controls, part, alike=True, miss=missing.add)
        if mean is None:
            return state
        summed = controls.keys() - missing
        c = len(summed) / len(fleet.get_devices()) * mean.params
        if state.control is not None:
            c += fleet.get(state.control, part).params
        model = Model(c.astype(np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
        counted = state.counted | dict.fromkeys(sorted(summed), state.round + 1)
        return msgspec.structs.replace(state, control=fleet.put_model(model, part), counted=counted)
