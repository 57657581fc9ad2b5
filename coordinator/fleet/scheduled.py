"""A fleet whose devices learn at another rate than its method says: that of the round, by a schedule over the rounds.

The coordinator knows the round and the number of rounds, so orders say the rate alone, and devices know no schedule.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet
from fedge.steps.contract import Action
from fedge.steps.sgd import scale_learning_rates


class ScheduledFleet(Fleet):
    """A fleet that multiplies the learning rates in all requests by `factor`; all else is that of the wrapped fleet."""

    def __init__(self, fleet: Fleet, factor: float) -> None:
        super().__init__(fleet)
        self._factor = factor
        self._scaled: dict[int, tuple[Action, Action]] = {}  # by id, with the action, which keeps its id from others

    def _scale(self, actions: Mapping[str, Action]) -> dict[str, Action]:
        """Return the scaled actions; equal objects stay one object."""
        for action in actions.values():
            if id(action) not in self._scaled:
                self._scaled[id(action)] = action, scale_learning_rates(action, self._factor)
        return {i: self._scaled[id(action)][1] for i, action in actions.items()}

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Run the actions on the wrapped fleet, at the rate of the round."""
        return await self._fleet.run(label, self._scale(actions))

    def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream the answers of the wrapped fleet to the actions, at the rate of the round."""
        return self._fleet.stream(label, self._scale(actions), seen)
