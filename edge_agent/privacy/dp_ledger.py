"""The privacy cost of noisy answers to this device's samples, kept durably.

HOME/privacy.json holds a charge for each training, and each other noisy answer, that may have left. A charge is written
before the answer leaves, so none is ever missing; after a crash in between, the ledger may hold one too many. It covers
the samples in this home, for all federations.

A sample is in one place, training or validation, and an answer depends on one of the places. So what a sample has spent
is what its place has spent, and the larger of the two is told (parallel composition: McSherry, SIGMOD 2009).

Accounting is Opacus' (Rényi differential privacy of the sampled Gaussian mechanism: Mironov, Talwar, Zhang, 2019). It
composes charges with different noise and sampling rates, and a further one costs microseconds. Opacus' PRV
accountant gives an epsilon that is 7 to 12 % lower, but takes a sixth of a second and more per order. Neighbouring data
differ in that one sample does not count.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Struct

from edge_agent.device.device import FailedError
from fedge.errors import DamagedError
from fedge.privacy.egress import PRIVACY_LEDGER
from fedge.steps.noise import Privacy
from fedge.system.files import read_lasting, write_atomically

ORDERS: Final = (*range(2, 33), 40, 48, 64, 96, 128, 192, 256)
"""Orders of Rényi divergence, of which the best is taken. Fractions would lower an epsilon above 10, at 40 ms each."""
LEAST_NOISE, MOST_NOISE, PRECISION = 1e-3, 1e6, 5e-3
"""Noise over sensitivity that is searched, and the relative precision of the search."""
ROUNDING: Final = 1e-9
"""Relative difference that sums of the same numbers may have."""


Place = Literal["training", "validation"]
"""The place of the samples that a noisy answer is about."""
DESCRIPTIONS_SHARE: Final = 1 / 4
"""The epsilon of all noisy descriptions of the training samples alone, as a share of the run's. As noise adds up in
squares, the training's is then some 3 % stronger."""


class Mechanism(Struct, frozen=True, kw_only=True):
    """One step of DP-SGD, or one Gaussian answer: noise over sensitivity, and the sampling probability."""

    noise_multiplier: float
    sample_rate: float


class Charge(Struct, frozen=True, kw_only=True):
    """A training or another noisy answer: the order's id and run, the mechanism, and the number of steps.

    `at`: by the device's clock. `place`: of the samples.
    """

    order: str
    run: str
    at: float
    mechanism: Mechanism
    steps: int
    place: Place = "training"


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
        """Compute the epsilon at `delta` of all charges, or of one run's charges, with a planned charge if given.

        It is that of a sample in the place that has spent more.
        """
        charges = [*self.charges, *((planned,) if planned else ())]
        counted = [charge for charge in charges if run is None or charge.run == run]
        places = get_args(Place)
        return max(compute_epsilon((each for each in counted if each.place == place), delta) for place in places)

    def record(self, charge: Charge) -> None:
        """Write a charge, which is on disk when this returns.

        Raises:
            StoreError: the charge cannot be written, so the result must not leave.
        """
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode([*self.charges, charge])))
        self.charges = [*self.charges, charge]


_charges = msgspec.json.Decoder(list[Charge])


def compute_epsilon(charges: Iterable[Charge], delta: float) -> float:
    """Compute the epsilon of successive charges to the same samples; 0 without any."""
    steps: Counter[Mechanism] = Counter()
    for charge in charges:
        steps[charge.mechanism] += charge.steps
    return _compute_cost(steps, delta) if steps else 0.0


def _compute_cost(steps: Mapping[Mechanism, int], delta: float) -> float:
    """Compute the epsilon of numbers of steps by their mechanism, at least one."""
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
    reserved = (compute_answer_noise(privacy, "training"), privacy.descriptions) if privacy.descriptions else None
    return _find_noise(_get_epsilon(privacy), privacy.delta, sample_rate, steps * privacy.participations, reserved)


def compute_answer_noise(privacy: Privacy, place: Place) -> float:
    """Compute the noise over sensitivity of a noisy answer about samples of this place, other than a training.

    Those about training samples may spend `DESCRIPTIONS_SHARE` of epsilon, those about validation samples all of it.

    Raises:
        FailedError: no noise suffices, or Opacus is not installed.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    share, n = (DESCRIPTIONS_SHARE, privacy.descriptions) if place == "training" else (1.0, privacy.examinations)
    return _find_noise(share * _get_epsilon(privacy), privacy.delta, 1.0, max(n, 1), None)


def _get_epsilon(privacy: Privacy) -> float:
    if privacy.epsilon is None:
        raise FailedError("the order has neither an epsilon nor a noise multiplier")
    return privacy.epsilon


@lru_cache(maxsize=64)
def _find_noise(
    epsilon: float, delta: float, sample_rate: float, steps: int, reserved: tuple[float, int] | None
) -> float:
    """Find the noise of `steps` steps with which they cost at most epsilon, to 1 %.

    `reserved`: noise and number of answers from all of the samples that cost epsilon, too.
    """

    def compute_cost(noise: float) -> float:
        counts = Counter({Mechanism(noise_multiplier=noise, sample_rate=sample_rate): steps})
        if reserved is not None:
            counts[Mechanism(noise_multiplier=reserved[0], sample_rate=1.0)] += reserved[1]
        return _compute_cost(counts, delta)

    high = 1.0
    while compute_cost(high) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise FailedError(f"no noise gives epsilon {epsilon:g} at delta {delta:g} in {steps} steps")
    low = high / 2 if high > 1 else 0.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if middle <= LEAST_NOISE or compute_cost(middle) > epsilon else (low, middle)
    return high


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
