"""SCAFFOLD: control variates correct each local step for what is particular to a device's samples.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1,
option II; baselines.md section 17. A device takes K steps y <- y - rate (g - c_i + c) from y = x, and sets

    c_i+ = c_i - c + (x - y) / (K rate)

It sends dy = y - x and dc = c_i+ - c_i. The server moves x by the mean dy, and c by 1/N sum dc. The steps are plain
SGD. A device's control variate stays on it, and goes back if a report came too late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
    """The state of SCAFFOLD. `model`: x; `control`: c (d,), zero if None."""

    model: BlobRef
    control: BlobRef | None = None


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

    def add_classes(self, state: ScaffoldState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> ScaffoldState:
        """Return the state for a network with further outputs; all control variates begin anew."""
        return msgspec.structs.replace(state, layout=layout, model=grow(state.model), control=None, descents={})

    async def round(self, state: ScaffoldState, fleet: Fleet) -> ScaffoldState:
        """Do one round of Algorithm 1. If x stays, c moves: devices whose reports were accepted have moved theirs."""
        sgd = msgspec.structs.replace(self.settings.sgd, momentum=0.0)
        order = TrainScaffold(
            starts=(Start(model=state.model),), sgd=sgd, codec=self.settings.codec, control=state.control
        )
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda _: order)
        x = state.model
        if len(updates) >= self.settings.min_reports:
            x = apply(x, await average(self, fleet, updates, state.layout, alike=True), state.layout, fleet)
        controls = {i: Control(u.control) for i, u in updates.items() if isinstance(u, TrainedScaffold)}
        return finish_round(state, asked, updates, model=x, control=await self.move_control(state, controls, fleet))

    async def move_control(self, state: ScaffoldState, controls: dict[str, Control], fleet: Fleet) -> BlobRef | None:
        """Return c + 1/N sum dc, over all N devices that are there."""
        part = select_params(state.layout)
        mean = await average(self, fleet, controls, part, alike=True)
        if mean is None:
            return state.control
        moved = len(controls) / len(fleet.get_devices()) * mean.params
        c = moved if state.control is None else fleet.get(state.control, part).params + moved
        return fleet.put_model(Model(c.astype(np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)), part)
