"""A fleet whose devices report only what noise protects, for methods under differential privacy.

Orders to train become orders to train by DP-SGD, and other answers get noise if they can (`fedge.steps.noise`). Nothing
else that depends on samples is requested. A method that needs such data is refused before the run (`Method.REFUSED`),
and here as a second check.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coordinator.aggregation.protection import explain_no_noise
from coordinator.fleet.fleet import Fleet
from fedge.errors import ConfigError
from fedge.steps.contract import Action
from fedge.steps.mixture.fit_candidates import FitCandidates
from fedge.steps.mixture.install import Served
from fedge.steps.noise import Noisy, Privacy
from fedge.steps.training.share_private import SharePrivate
from fedge.steps.training.train import Train
from fedge.steps.training.train_dp import TrainDp


def add_noise(action: Action, privacy: Privacy) -> Action:
    """Return the action with noise; unchanged if it reveals nothing about samples.

    Raises:
        ConfigError: the action would reveal something unaccounted for; the text names the field.
    """
    if type(action) is Train:
        fields = {name: getattr(action, name) for name in Train.__struct_fields__}
        return TrainDp(**fields | {"measure": False}, privacy=privacy)
    if isinstance(action, Served | SharePrivate) and action.kept_by == Train.STEP:
        action = msgspec.structs.replace(action, kept_by=TrainDp.STEP)
    elif isinstance(action, Noisy):
        action = msgspec.structs.replace(action, privacy=privacy)
    elif isinstance(action, FitCandidates):
        action = msgspec.structs.replace(action, tell=False)
    if fields := action.find_unaccounted():
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
