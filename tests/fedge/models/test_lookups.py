"""Which inputs a network turns into whole numbers, and that nothing scales them."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fedge.data.preprocessing import preprocess
from fedge.data.task import Preprocessing, TaskSpec
from fedge.models.choice import with_network
from fedge.models.lookups import MOST_COLUMNS, unscale_lookups
from fedge.system.loading import register_object
from fedge.tasks import Task, load_pool
from fedge.tasks.partition import load_samples
from fedge.tasks.shares import Partitioning

SCALED = Preprocessing(mean=(3.0,) * 6, std=(2.0,) * 6)


class Net(nn.Module):
    """The mean of what it makes of each column, (n, 6) -> (n, 2)."""

    def __init__(self, rows: int = 50) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.of(x).mean(dim=1))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 6, 4)."""
        return self.table(x.long())


class OneHot(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(x.to(torch.int64), 4).float()


class Position(Net):
    """Its table is of the positions, and its inputs are measurements."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(torch.arange(6)) + x[:, :, None]


class Marks(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x > 0).long())


class Mixed(Net):
    """One column is a kind of machine, the others are measurements."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.table(x[:, 2:3].type(torch.int64)), x[:, :2, None].expand(-1, -1, 4)], dim=1)


class Fails(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError


def task_of(net: object, **changes: object) -> TaskSpec:
    task = TaskSpec(name="t", classes=("a", "b"), input_shape=(6,), model=register_object(net), preprocessing=SCALED)
    return msgspec.structs.replace(task, **changes)


@pytest.mark.parametrize("net", [Net, lambda: Net(2), lambda: Net(1), OneHot])
def test_what_a_network_looks_up_is_not_scaled(net: object) -> None:
    assert unscale_lookups(task_of(net)).preprocessing == Preprocessing()


@pytest.mark.parametrize("net", [Position, Marks, Fails, lambda: 3])
def test_what_it_does_not_is_scaled(net: object) -> None:
    task = task_of(net)
    assert unscale_lookups(task) == task


def test_of_columns_only_those_that_are_looked_up_are_left() -> None:
    how = unscale_lookups(task_of(Mixed)).preprocessing
    assert how == Preprocessing(mean=(3.0, 3.0, 0.0, 3.0, 3.0, 3.0), std=(2.0, 2.0, 1.0, 2.0, 2.0, 2.0))


def test_of_windows_and_of_many_columns_all_are_left() -> None:
    for shape in ((2, 3), (MOST_COLUMNS + 1,)):
        task = task_of(Net, input_shape=shape, preprocessing=Preprocessing(mean=3.0, std=2.0, scale=4.0))
        assert unscale_lookups(task).preprocessing == Preprocessing()


def test_task_classes_say_themselves_what_is_scaled() -> None:
    task = task_of(Net, name="package.module:Class")
    assert unscale_lookups(task) == task


def test_the_lookup_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    unscale_lookups(task_of(Net))
    assert torch.equal(torch.rand(3), wanted)


def test_tokens_reach_the_network_as_they_are_however_it_is_named() -> None:
    x, y = np.random.default_rng(0).integers(0, 50, (40, 6)), np.arange(40) % 2
    made = Task.from_arrays(x, y, model=Net)
    assert np.array_equal(preprocess(made.spec, x), x)
    later = Task.from_arrays(x, y)
    assert not np.array_equal(preprocess(later.spec, x), x)  # measurements, as far as anyone knows
    assert np.array_equal(preprocess(with_network(later.spec, register_object(Net)), x), x)
    found, _ = load_samples(Partitioning(task=register_object(later), model=register_object(Net)), 0, 0.0)
    assert np.array_equal(preprocess(found.spec, found.x), x)
    assert np.array_equal(preprocess(load_pool(register_object(made)).spec, x), x)
