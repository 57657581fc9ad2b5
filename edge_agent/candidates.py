"""The candidates of fedge's mixture: what `fit_candidates` keeps for the steps after it (fedge.md sections 6 to 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import Struct

from edge_agent import mixture
from edge_agent.device import FailedError
from edge_agent.evaluation import logits, prior
from edge_agent.mixture import Array
from export.reference import calibrated, raw_energies, standardised
from fedge.errors import StoreError
from fedge.messages import Role
from fedge.steps.fit_weights import Calibration
from fedge.tensors import Model, flatten, from_bytes, to_bytes, unflatten

if TYPE_CHECKING:
    from edge_agent.device import Device

CANDIDATES: Final = "candidates"
INITIAL: Final = "initial"


class Fitted(Struct, frozen=True, kw_only=True):
    """What was fitted: models by role, and how the private and the local one were trained.

    `private_start`: the role of the model that the private one began with, or "initial".
    """

    models: dict[str, bytes]
    private_start: str
    private_steps: int
    local_steps: int

    def model(self, device: Device, name: str) -> Model:
        """A model by its role, or "initial"."""
        return flatten(from_bytes(self.models[name]), device.layout)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The candidates, in the order of the mixture."""
        return tuple(role for role in Role if role in self.models)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates that an order is about, in the order of `Role`: roles and calibrations (M), models, validation."""

    fitted: Fitted
    roles: tuple[Role, ...]
    models: tuple[Model, ...]
    calibrations: tuple[Calibration, ...]
    log_q: Array  # (M, m, C)
    log_p: Array  # (m, M), of the true classes
    energies: Array  # (m, M), standardised
    energy_mean: Array
    energy_std: Array

    @property
    def experts(self) -> tuple[int, ...]:
        """Positions of the models that several devices share."""
        return tuple(k for k, role in enumerate(self.roles) if role.is_shared)


def keep(
    device: Device, models: Mapping[str, Model], *, private_start: str, private_steps: int, local_steps: int
) -> None:
    """Make the candidates durable."""
    fitted = Fitted(
        models={name: to_bytes(unflatten(model, device.layout)) for name, model in models.items()},
        private_start=private_start,
        private_steps=private_steps,
        local_steps=local_steps,
    )
    device.files.write(CANDIDATES, msgspec.msgpack.encode(fitted))


def fitted_on(device: Device) -> Fitted:
    """What `keep` kept last.

    Raises:
        FailedError: nothing was.
        StoreError: it cannot be read.
    """
    data = device.files.read(CANDIDATES)
    if data is None:
        raise FailedError("no candidates: fit_candidates was not done here")
    try:
        return msgspec.msgpack.decode(data, type=Fitted)
    except msgspec.DecodeError as error:
        raise StoreError(f"the candidates cannot be read: {error}") from error


def candidates(device: Device, calibration: Mapping[Role, Calibration], pooled: Mapping[Role, float]) -> Candidates:
    """The kept candidates that have a calibration and a pooled weight, on the validation samples.

    Raises:
        FailedError: the device has none of them.
    """
    data, fitted = device.data, fitted_on(device)
    roles = tuple(role for role in fitted.roles if role in calibration and role in pooled)
    if not roles:
        raise FailedError(f"the order names {', '.join(pooled)}, this device has {', '.join(fitted.roles)}")
    models = tuple(fitted.model(device, role) for role in roles)
    found = np.stack([logits(device, model, data.x_val) for model in models])
    chosen = tuple(calibration[role] for role in roles)
    classes = prior(device)
    log_q = np.stack([calibrated(l_k, classes, c) for l_k, c in zip(found, chosen, strict=True)])
    raw = raw_energies(found)
    mean, std = mixture.energy_statistics(raw)
    return Candidates(
        fitted=fitted,
        roles=roles,
        models=models,
        calibrations=chosen,
        log_q=log_q,
        log_p=mixture.of_labels(log_q, data.y_val).T,
        energies=standardised(raw, mean, std),
        energy_mean=mean,
        energy_std=std,
    )
