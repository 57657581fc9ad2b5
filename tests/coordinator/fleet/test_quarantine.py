"""Who is left out of the rounds, for how long, and how it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.fleet.quarantine import READMITTED, REST, find_quarantined
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from coordinator.store.records import Offence
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, multiplying


def noted(*rounds: int, name: str = "long-update") -> list[Offence]:
    return [Offence(device_id="d", round=r, name=name, detail=f"in {r}") for r in rounds]


@pytest.mark.parametrize(
    ("rounds", "left_out", "takes_part"),
    [
        ((1, 2), (), (2, 3, 50)),
        ((1, 2, 3), (4, 3 + REST), (3, 4 + REST)),
        ((1, 2, 30), (), (31,)),  # too long ago
        ((1, 10, 20), (21, 40), (20, 41)),
        ((1, 2, 3, 24), (25, 24 + 2 * REST), (24, 25 + 2 * REST)),  # once more: at once, and twice as long
        ((1, 2, 3, 24, 70), (71, 70 + 4 * REST), (70, 71 + 4 * REST)),
        ((3, 1, 2, 2), (4,), (3,)),  # one round counts once, in any order
    ],
)
def test_three_rounds_within_twenty_and_then_each(
    rounds: tuple[int, ...], left_out: tuple[int, ...], takes_part: tuple[int, ...]
) -> None:
    assert all("d" in find_quarantined(noted(*rounds), r) for r in left_out)
    assert not any(find_quarantined(noted(*rounds), r) for r in takes_part)


def test_two_kinds_of_evidence_in_a_round_are_one_round() -> None:
    both = [*noted(1, 2), *noted(1, 2, name="malformed")]
    assert not find_quarantined(both, 3)
    assert [o.round for o in find_quarantined([*both, *noted(3)], 4)["d"].evidence] == [1, 1, 2, 2, 3]


def test_who_is_readmitted_begins_anew() -> None:
    again = [*noted(1, 2, 3), *noted(3, name=READMITTED)]
    assert not find_quarantined(again, 4)
    assert not find_quarantined([*again, *noted(4, 5)], 6)
    assert find_quarantined([*again, *noted(4, 5, 6)], 7)["d"].until == 6 + REST


async def test_a_device_that_sends_ten_times_too_much_is_left_out_and_honest_ones_are_not(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6, limit=400)

    fleet._execute = multiplying(10, "d02")
    method = make_method("fedavg", MethodSettings(rounds=6, sgd=Sgd(), codec=Codec.FLOAT32, down="float32"))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert {i for i, _, _ in fleet.offences} == {"d02"}
    assert state.participations == dict.fromkeys(("d00", "d01", "d03", "d04", "d05"), 6) | {"d02": 3}
    assert "d02" not in state.installed
