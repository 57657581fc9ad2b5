"""A fleet whose devices learn at another rate than its method says: that of the round, by a schedule over the rounds.

The coordinator knows the round and the number of rounds, so orders say the rate alone, and devices know no schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.fleet.fleet import Fleet
from fedge.steps.contract import Action
from fedge.steps.sgd import scale_learning_rates


class ScheduledFleet(Fleet):
    """A fleet that multiplies the learning rates in all requests by `factor`; all else is that of the wrapped fleet."""

    def __init__(self, fleet: Fleet, factor: float) -> None:
        super().__init__(fleet)
        self._factor = factor
        self._scaled: dict[int, tuple[Action, Action]] = {}  # by id, with the action, which keeps its id from others

    def change_actions(self, actions: Mapping[str, Action]) -> Mapping[str, Action]:
        """Return the scaled actions; equal objects stay one object."""
        for action in actions.values():
            if id(action) not in self._scaled:
                self._scaled[id(action)] = action, scale_learning_rates(action, self._factor)
        return {i: self._scaled[id(action)][1] for i, action in actions.items()}
