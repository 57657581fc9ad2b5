"""The privacy cost of differentially private training to this device's samples, kept durably.

HOME/privacy.json holds a charge for each training whose result may have left. A charge is written before the result
leaves, so none is ever missing; after a crash in between, the ledger may hold a training too many. It covers the
samples in this home, for all federations.

Accounting is Opacus' (Rényi differential privacy of the sampled Gaussian mechanism: Mironov, Talwar, Zhang, 2019). It
composes trainings with different noise and sampling rates, and a further training costs microseconds. Opacus' PRV
accountant gives an epsilon that is 7 to 12 % lower, but takes a sixth of a second and more per order. Neighbouring data
differ in that one sample does not count.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from edge_agent.device.device import FailedError
from fedge.errors import DamagedError
from fedge.privacy.egress import PRIVACY_LEDGER
from fedge.steps.training.train_dp import Privacy
from fedge.system.files import read_lasting, write_atomically

ORDERS: Final = (*range(2, 33), 40, 48, 64, 96, 128, 192, 256)
"""Orders of Rényi divergence, of which the best is taken. Fractions would lower an epsilon above 10, at 40 ms each."""
ROUNDING: Final = 1e-9
"""Relative difference that sums of the same numbers may have."""


class Mechanism(Struct, frozen=True, kw_only=True):
    """One step of DP-SGD: noise over clip norm, and the sampling probability."""

    noise_multiplier: float
    sample_rate: float


class Charge(Struct, frozen=True, kw_only=True):
    """A training: the order's id and run, the mechanism, and the number of steps. `at`: by the device's clock."""

    order: str
    run: str
    at: float
    mechanism: Mechanism
    steps: int


class Ledger:
    """The ledger of one home."""

    def __init__(self, home: Path) -> None:
        """Open the ledger; a home without a ledger has spent nothing.

        Raises:
            StoreError: the ledger cannot be read; since the spent budget is unknown, no more is spent.
        """
        self._path = home / PRIVACY_LEDGER
        try:
            self.charges = read_lasting(self._path, _charges.decode) or []
        except DamagedError as error:
            raise DamagedError(
                f"{error}: what these samples have spent is not known any more; "
                "restore the file, or give the agent new samples and a new --home"
            ) from error

    def compute_spent(self, delta: float, *, run: str | None = None, planned: Charge | None = None) -> float:
        """Compute the epsilon at `delta` of all charges, or of one run's charges, with a planned charge if given."""
        charges = [*self.charges, *((planned,) if planned else ())]
        return compute_epsilon((charge for charge in charges if run is None or charge.run == run), delta)

    def record(self, charge: Charge) -> None:
        """Write a charge, which is on disk when this returns.

        Raises:
            StoreError: the charge cannot be written, so the result must not leave.
        """
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode([*self.charges, charge])))
        self.charges = [*self.charges, charge]


_charges = msgspec.json.Decoder(list[Charge])


def compute_epsilon(charges: Iterable[Charge], delta: float) -> float:
    """Compute the epsilon of successive trainings; 0 without any."""
    steps: Counter[Mechanism] = Counter()
    for charge in charges:
        steps[charge.mechanism] += charge.steps
    if not steps:
        return 0.0
    total = sum(n * _compute_step_rdp(mechanism) for mechanism, n in steps.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # if the best order is the first or last, the bound still holds
        return float(_import_opacus().analysis.rdp.get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)[0])


@lru_cache(maxsize=256)
def _compute_step_rdp(mechanism: Mechanism) -> Any:
    """Compute the Rényi divergence of one step, per order."""
    return _import_opacus().analysis.rdp.compute_rdp(
        q=mechanism.sample_rate, noise_multiplier=mechanism.noise_multiplier, steps=1, orders=ORDERS
    )


def compute_noise(privacy: Privacy, sample_rate: float, steps: int) -> float:
    """Compute the noise over clip norm for `steps` steps in each of the run's participations.

    Raises:
        FailedError: no noise suffices, or Opacus is not installed.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.epsilon is None:
        raise FailedError("the order has neither an epsilon nor a noise multiplier")
    return _find_noise(privacy.epsilon, privacy.delta, sample_rate, steps * privacy.participations)


@lru_cache(maxsize=64)
def _find_noise(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    utils = _import_opacus().utils
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = utils.get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=epsilon / 100,
                alphas=ORDERS,
            )
    except ValueError as error:
        raise FailedError(f"no noise gives epsilon {epsilon:g} at delta {delta:g} in {steps} steps: {error}") from error
    return float(found)


def _import_opacus() -> Any:
    """Import Opacus' accountants, which take a second.

    Raises:
        FailedError: Opacus is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import opacus.accountants.analysis.rdp
            import opacus.accountants.utils
    except ImportError as error:
        raise FailedError("differential privacy needs Opacus: pip install 'fedge[privacy]'") from error
    return opacus.accountants
