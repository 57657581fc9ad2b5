"""Local: every device learns alone, from the common initial model, and sends nothing.

The baseline of all personalised methods. A device trains on all of its training samples for as many steps as it would
have had in the federation: rounds x steps x participation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from coordinator.fleet.fleet import Fleet
from coordinator.methods.method import Method
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import count_steps_alone, run_with_retries, select_results
from coordinator.methods.state import ModelState
from fedge.steps.mixture.install import FineTune, Install, Installed
from fedge.steps.sgd import Sgd
from fedge.system.loading import FINE_TUNED
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef


class Local(Method[ModelState]):
    """Local learning in one round: each device trains the common initial model, and installs the result."""

    name = "local"
    HEEDS = SHARED
    REFUSED = {
        "clustering": "every device learns alone",
        "selection": "every device learns alone, once, and none is left out",
        **dict.fromkeys(
            ("median", "trimmed-mean", "multi-krum", "centred-clipping"),
            "every device learns alone: nothing is averaged",
        ),
        FINE_TUNED: "local models have nothing to be fine-tuned from",
    }

    def is_done(self, state: ModelState) -> bool:
        """Return whether the one round is done."""
        return state.round > self.settings.first

    def add_classes(self, state: ModelState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> ModelState:
        """Return the state for a network with further outputs."""
        return msgspec.structs.replace(state, layout=layout, model=grow(state.model))

    async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
        """Train all devices, once, and install what they have learned."""
        settings = self.settings
        rounds = settings.rounds * settings.participation
        steps = {d.id: max(1, round(rounds * count_steps_alone(d, settings.sgd))) for d in fleet.get_devices()}
        installed = await train_alone(fleet, state.model, settings.sgd, steps)
        return msgspec.structs.replace(state, round=state.round + 1, installed=installed)

    async def finish(self, state: ModelState, fleet: Fleet) -> ModelState:
        """Let each device train one step, if there are no rounds at all."""
        return await self.round(state, fleet)


async def train_alone(fleet: Fleet, first: BlobRef, sgd: Sgd, steps: Mapping[str, int]) -> dict[str, Installed]:
    """Let each device train `first` for its number of steps and install the result; return the bundles."""
    orders = {
        i: Install(
            model=first,
            method=Local.name,
            fine_tune=FineTune(sgd=sgd, checkpoints=(n,), otherwise=n),
        )
        for i, n in steps.items()
    }
    return select_results(await run_with_retries(fleet, "install", orders), Installed)
