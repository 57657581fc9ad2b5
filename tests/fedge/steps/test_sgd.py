from __future__ import annotations

import msgspec
import pytest

from fedge.steps.sgd import TRAINING_PASSES, Sgd


@pytest.mark.parametrize(
    ("fields", "n", "steps"),
    [
        ({"steps": 7}, 100, 7),
        ({"steps": 7}, 0, 7),
        ({"epochs": 2, "batch_size": 8}, 20, 5),  # 40 samples in batches of 8
        ({"epochs": 3, "batch_size": 8}, 5, 3),  # all 5 at once
        ({"epochs": 3, "batch_size": 8}, 9, 4),  # 27 samples, the last batch is not full
        ({"epochs": 2}, 0, 0),
    ],
)
def test_steps(fields: dict[str, int], n: int, steps: int) -> None:
    assert Sgd(**fields).count_steps(n) == steps  # type: ignore[arg-type]


def test_a_step_costs_three_passes_over_its_batch() -> None:
    assert TRAINING_PASSES == 3
    assert Sgd(batch_size=32).count_passes(10, 100) == 3 * 10 * 32
    assert Sgd(batch_size=32).count_passes(10, 20) == 3 * 10 * 20


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": -1}, {"batch_size": 0}, {"learning_rate": 0.0}, {"momentum": 1.0}, {"proximal_mu": -0.1},
        {"weight_decay": 2.0},
    ],
)  # fmt: skip
def test_what_the_schema_refuses(fields: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Sgd)
