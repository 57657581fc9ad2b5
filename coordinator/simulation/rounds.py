"""All rounds of a method on a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.installation import require_learned
from coordinator.methods.method import Method
from coordinator.methods.state import S
from coordinator.service.proof import PROVEN, is_ours, prove_round, reload
from fedge.wire.messages import iterate_blobs


async def run_rounds(
    method: Method[S],
    state: S,
    fleet: SimulatedFleet,
    on_round: Callable[[S], None] = lambda _: None,
    rounds: int | None = None,
) -> S:
    """Run a method to its end on a simulated fleet, or for `rounds` rounds.

    `on_round` is called with the state after each round, except a last round of training with nothing learned. In the
    first rounds the state is stored and read again.

    Raises:
        ConfigError: a method that is not fedge's own breaks a promise (`coordinator.service.proof`).
        FruitlessError: nothing was learned (`require_learned`).
    """
    first = method.get_default_model(state)
    while not method.is_done(state) and state.round != rounds:
        fleet.round = state.round + 1
        early = state.round < PROVEN
        state = reload(state) if early else state
        step = prove_round if early and not is_ours(type(method)) else type(method).advance
        state = await step(method, state, fleet)
        fleet.remove_others({ref.digest for ref in iterate_blobs(state)} | fleet.find_needed_blobs())
        if state.round == method.last:
            require_learned(method, state, first, fleet.problems)
        on_round(state)
    return state
