"""A fleet whose devices report only what noise protects, for methods under differential privacy.

Orders to train become orders to train by DP-SGD. Nothing else that depends on samples is requested. A method that needs
such data is refused before the run (`Method.REFUSED`), and here as a second check.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coordinator.aggregation.protection import explain_no_noise
from coordinator.fleet.fleet import Fleet
from fedge.errors import ConfigError
from fedge.steps.contract import Action, find_unaccounted
from fedge.steps.mixture.install import Served
from fedge.steps.training.train import Train
from fedge.steps.training.train_dp import Privacy, TrainDp


def add_noise(action: Action, privacy: Privacy) -> Action:
    """Return the action with noise; unchanged if it reveals nothing about samples.

    Raises:
        ConfigError: the action would reveal something unaccounted for; the text names the field.
    """
    if type(action) is Train:
        if len(action.starts) > 1:
            raise ConfigError(f"the method cannot have dp: {explain_no_noise((Train, 'cluster'))}")
        fields = {name: getattr(action, name) for name in Train.__struct_fields__}
        return TrainDp(**fields | {"measure": False}, privacy=privacy)
    if isinstance(action, Served) and action.kept_by == Train.STEP:
        return msgspec.structs.replace(action, kept_by=TrainDp.STEP)
    if fields := find_unaccounted(type(action)):
        raise ConfigError(f"the method cannot have dp: {explain_no_noise((type(action), next(iter(fields))))}")
    return action


class AccountedFleet(Fleet):
    """A fleet that adds noise to requests. Devices and tensors are those of the wrapped fleet."""

    def __init__(self, fleet: Fleet, privacy: Privacy) -> None:
        super().__init__(fleet)
        self._privacy = privacy

    def change_actions(self, actions: Mapping[str, Action]) -> Mapping[str, Action]:
        """Return the actions with noise."""
        return {i: add_noise(action, self._privacy) for i, action in actions.items()}
