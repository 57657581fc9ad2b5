"""What a network computes with besides its state."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedge.models.constants import collect_constants, compute_digest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(4, 3)


def of(**attributes: Any) -> dict[str, Any]:
    net = Net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return {place: value for place, value in collect_constants(net).items() if not place.startswith("d.")}


def test_tensors_and_numbers_are_found_by_their_place() -> None:
    shift = torch.ones(3)
    found = of(shift=shift, scale=0.5, table={"low": [1, (np.float32(2),)]}, grid=np.zeros(2), word="same")
    assert [*found] == ["shift", "scale", "table['low'][0]", "table['low'][1][0]", "grid", "word"]
    assert found["shift"] is shift


def test_layers_in_a_plain_list_are_looked_into() -> None:
    found = of(layers=[nn.Linear(2, 2), {"inner": nn.Sequential(nn.BatchNorm1d(2))}])
    tensors = [place for place, value in found.items() if isinstance(value, torch.Tensor)]
    assert tensors == [
        "layers[0].weight", "layers[0].bias", "layers[1]['inner'].0.weight", "layers[1]['inner'].0.bias",
        "layers[1]['inner'].0.running_mean", "layers[1]['inner'].0.running_var",
        "layers[1]['inner'].0.num_batches_tracked",
    ]  # fmt: skip


def test_the_state_is_left_out_and_a_buffer_that_is_not_persistent_is_none() -> None:
    net = nn.Sequential(nn.LSTM(2, 2), nn.BatchNorm1d(2))
    net[1].register_buffer("mask", torch.ones(2), persistent=False)
    assert [place for place, value in collect_constants(net).items() if isinstance(value, torch.Tensor)] == ["1.mask"]


def test_what_holds_itself_is_found_once() -> None:
    held: list[Any] = [torch.ones(1)]
    held.append(held)
    net = Net()
    net.parent = [net]
    net.held = held
    assert [place for place in collect_constants(net) if place.startswith(("parent", "held"))] == ["held[0]"]


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.arange(6.0).reshape(2, 3),
        lambda: torch.tensor(float("nan")),
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda: torch.ones(2, dtype=torch.bool),
        lambda: torch.zeros(0),
        lambda: np.array(["a"]),
        lambda: 0.1,
        lambda: "a",
    ],
)
def test_equal_values_have_equal_digests(value: Callable[[], Any]) -> None:
    assert compute_digest(value()) == compute_digest(value())


def test_other_values_have_other_digests() -> None:
    ones = torch.ones(2)
    assert len({compute_digest(v) for v in (ones, ones + 1e-7, ones[:1], ones.numpy() * 2, 1, 1.0, True, "1")}) == 8
