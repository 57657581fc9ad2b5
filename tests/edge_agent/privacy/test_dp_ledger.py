"""What trainings cost by Opacus' own accountant, and a book that is durable and never guesses."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import pytest

from edge_agent.device.device import FailedError
from edge_agent.privacy.dp_ledger import Charge, Ledger, Mechanism, compute_epsilon, compute_noise
from fedge.errors import StoreError
from fedge.privacy.egress import PRIVACY_LEDGER
from fedge.steps.noise import Privacy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opacus.accountants import PRVAccountant, RDPAccountant

DELTA = 1e-5


def charge(sigma: float = 1.0, rate: float = 0.1, steps: int = 10, run: str = "r", order: str = "o") -> Charge:
    mechanism = Mechanism(noise_multiplier=sigma, sample_rate=rate)
    return Charge(order=order, run=run, at=0.0, mechanism=mechanism, steps=steps)


@pytest.mark.parametrize("parts", [[(2.0, 0.1, 300)], [(2.0, 0.1, 100), (1.5, 0.2, 50), (8.0, 1.0, 30)]])
def test_epsilon_is_between_that_of_two_accountants_of_opacus(parts: list[tuple[float, float, int]]) -> None:
    """Above the tighter PRV; not below RDP over more orders, and hardly above."""
    found = compute_epsilon([charge(*part) for part in parts], DELTA)
    rdp, prv = RDPAccountant(), PRVAccountant()
    rdp.history = prv.history = [*parts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert prv.get_epsilon(DELTA) < found
        assert rdp.get_epsilon(DELTA) <= found * (1 + 1e-9) < 1.05 * rdp.get_epsilon(DELTA)


def test_many_trainings_cost_what_one_long_one_costs() -> None:
    assert compute_epsilon([charge(steps=10)] * 30, DELTA) == pytest.approx(compute_epsilon([charge(steps=300)], DELTA))
    assert compute_epsilon([], DELTA) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_the_noise_of_a_promise_keeps_it_and_is_no_larger_than_need_be(epsilon: float, rate: float) -> None:
    privacy = Privacy(clip_norm=1.0, delta=DELTA, participations=5, epsilon=epsilon)
    sigma = compute_noise(privacy, rate, 10)
    assert 0.97 * epsilon < compute_epsilon([charge(sigma, rate, 10)] * 5, DELTA) <= epsilon * (1 + 1e-9)
    assert compute_epsilon([charge(sigma, rate, 10)] * 6, DELTA) > epsilon


def test_noise_that_is_given_is_taken_and_without_any_the_order_fails() -> None:
    fixed = Privacy(clip_norm=1.0, delta=DELTA, participations=5, noise_multiplier=3.0)
    assert compute_noise(fixed, 0.1, 10) == 3.0
    with pytest.raises(FailedError, match="neither"):
        compute_noise(msgspec.structs.replace(fixed, noise_multiplier=None), 0.1, 10)


def test_the_book_outlives_its_reader(tmp_path: Path) -> None:
    for order in ("a", "b"):
        Ledger(tmp_path).record(charge(order=order, run=order))
    book = Ledger(tmp_path)
    assert [entry.order for entry in book.charges] == ["a", "b"]
    one, both = book.compute_spent(DELTA, run="a"), book.compute_spent(DELTA)
    assert 0 < one < both < book.compute_spent(DELTA, planned=charge())


@pytest.mark.parametrize("damage", [b"", b"[", b"[{}]", b"\xff", b'[{"x": ' + b"[" * 100_000])
def test_a_damaged_book_ends_all_spending(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / PRIVACY_LEDGER).write_bytes(damage)
    with pytest.raises(StoreError, match="not known any more"):
        Ledger(tmp_path)


def test_what_cannot_be_written_is_not_spent(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "home")
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(StoreError):
        book.record(charge())
    assert book.charges == []
