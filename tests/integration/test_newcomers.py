"""What people bring on their first day: data sets and networks of every kind, each with the default method.

Each works for two rounds, up to bundles that answer with finite numbers, or is refused in one line that says what to
do. Nothing ends in an error of another kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.errors import FedgeError

PORTED: Final = Path(__file__).parents[2] / "docs" / "coming-from.md"
N: Final = 90
RNG: Final = np.random.default_rng(0)
X: Final = RNG.normal(size=(N, 6)).astype(np.float32)
Y: Final = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
IMAGES: Final = RNG.integers(0, 256, (N, 16, 16), dtype=np.uint8)
TOKENS: Final = RNG.integers(0, 50, (N, 12))
SERIES: Final = RNG.normal(size=(N, 3, 20)).astype(np.float32)


class Lstm(nn.Module):
    """A recurrent network over 20 readings of 3 sensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(x.transpose(1, 2))[0][:, -1])
        return out


class Transformer(nn.Module):
    """One layer of attention over 20 readings of 3 sensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(self.first(x.transpose(1, 2))).mean(dim=1))
        return out


class Words(nn.Module):
    """An embedding of 50 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(50, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.vectors(x.long()).mean(dim=1))
        return out


class Steady(nn.Module):
    """Dropout and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Probabilities(nn.Module):
    """Softmax at the end, as in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Pair(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class TwoInputs(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([x, more], dim=1))
        return out


def mlp(n_outputs: int) -> Callable[[], nn.Module]:
    """A network that ignores the task."""
    return lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, n_outputs))


def replace_at(values: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    """The same values but one."""
    found = values.copy()
    found[at] = value
    return found


class Case(NamedTuple):
    """What is given to `Task.from_arrays` and to `simulate`; what the refusal must say, or None if all works."""

    given: Mapping[str, Any]
    says: str | None = None
    how: Mapping[str, Any] = {}


CASES: Final = {
    "strings": Case({"x": X, "y": np.array(["cat", "dog", "fox"])[Y]}),
    "labels that are objects": Case({"x": X, "y": np.array(["cat", "dog", "fox"], object)[Y]}),
    "floats that are whole": Case({"x": X, "y": Y.astype(np.float64)}),
    "one-hot": Case({"x": X, "y": np.eye(3)[Y]}),
    "labels from 1": Case({"x": X, "y": Y + 1}),
    "labels of a column": Case({"x": X, "y": Y[:, np.newaxis]}),
    "lists": Case({"x": X.tolist(), "y": Y.tolist()}),
    "tensors": Case({"x": torch.tensor(X), "y": torch.tensor(Y)}),
    "bool labels": Case({"x": X, "y": Y > 0}),
    "numbers without a problem": Case({"x": X, "y": X[:, 0] * 1.5}, "regression"),
    "numbers": Case({"x": X, "y": X[:, 0] * 1.5, "problem": "regression"}),
    "several outputs": Case({"x": X, "y": X[:, :3] * 2, "problem": "regression"}),
    "constant targets": Case({"x": X, "y": np.ones(N), "problem": "regression"}, "nothing to learn"),
    "a target that is constant": Case(
        {"x": X, "y": np.column_stack([X[:, 0], np.ones(N)]), "problem": "regression"}, "leave it out"
    ),
    "NaN in the targets": Case({"x": X, "y": replace_at(X[:, 0], (3,), np.nan), "problem": "regression"}, "fill"),
    "several labels": Case({"x": X, "y": X[:, :3] > 0, "problem": "multi-label"}),
    "several labels without a problem": Case({"x": X, "y": (X[:, :3] > 0) * 1}, "multi-label"),
    "masks": Case({"x": IMAGES, "y": (IMAGES > 128) * 1, "problem": "segmentation"}, how={"partition": "iid"}),
    "masks without a problem": Case({"x": IMAGES, "y": (IMAGES > 128) * 1}, "segmentation"),
    "masks of another size": Case({"x": IMAGES, "y": np.zeros((N, 8, 8), int), "problem": "segmentation"}, "16"),
    "masks of black and white": Case({"x": IMAGES, "y": (IMAGES > 128) * 255, "problem": "segmentation"}, "write 1"),
    "labels in words": Case(
        {"x": X, "y": np.array(["a,b", "b", "a"])[Y], "problem": "multi-label"}, "MultiLabelBinarizer"
    ),
    "labels in lists": Case(
        {"x": X, "y": [["a", "b"][: k % 3] for k in range(N)], "problem": "multi-label"}, "a column of 0 and 1"
    ),
    "noise on tokens": Case({"x": TOKENS, "y": Y, "model": Words}, "leave it out", {"augment": "noise"}),
    "class weights without classes": Case(
        {"x": X, "y": X[:, 0], "problem": "regression"}, "leave out --class-weights", {"class_weights": "balanced"}
    ),
    "no y": Case({"x": X}, "reconstruction"),
    "no y, to be found unusual": Case({"x": X, "problem": "reconstruction"}),
    "an LSTM": Case({"x": SERIES, "y": Y, "model": Lstm}),
    "a transformer": Case({"x": SERIES, "y": Y, "model": Transformer}),
    "tokens": Case({"x": TOKENS, "y": Y, "model": Words}),
    "dropout and batch normalisation": Case({"x": X, "y": Y, "model": Steady}),
    "softmax at the end": Case({"x": X, "y": Y, "model": Probabilities}),
    "imbalanced classes": Case({"x": X, "y": (np.arange(N) >= 84).astype(int)}),
    "a hundred classes": Case({"x": np.tile(X, (4, 1)), "y": np.arange(4 * N) % 100}, how={"partition": "iid"}),
    "one class": Case({"x": X, "y": np.zeros(N, int)}, "class"),
    "one class on a device": Case({"x": X, "y": Y}, how={"partition": "shards", "shards": 1}),
    "labels with gaps": Case({"x": X, "y": Y * 1000}, "classes"),
    "five samples": Case({"x": X[:5], "y": Y[:5]}, "too few"),
    "NaN in x": Case({"x": replace_at(X, (2, 1), np.nan), "y": Y}, "row|sample|x\\["),
    "infinity in x": Case({"x": replace_at(X, (2, 1), np.inf), "y": Y}, "row|sample|x\\["),
    "a huge number": Case({"x": replace_at(X, (2, 1), 1e30), "y": Y}, "large"),
    "a column that is constant": Case({"x": replace_at(X, (slice(None), 1), 7), "y": Y}),
    "bool x": Case({"x": X > 0, "y": Y}),
    "uint8 images": Case({"x": IMAGES, "y": Y}),
    "images with channels last": Case({"x": np.repeat(IMAGES[..., np.newaxis], 3, axis=-1), "y": Y}),
    "x of text": Case({"x": np.array([["a", "b"]] * N), "y": Y}, "one-hot columns"),
    "one number for each sample": Case({"x": X[:, 0], "y": Y}, "np.newaxis"),
    "ragged inputs": Case({"x": [[1.0] * (1 + k % 3) for k in range(N)], "y": Y}, "one shape"),
    "two inputs in a dictionary": Case({"x": {"a": X, "b": X}, "y": Y}, "np.concatenate"),
    "a network of two inputs": Case({"x": X, "y": Y, "model": TwoInputs}, "take them apart"),
    "a network of two outputs": Case({"x": X, "y": Y, "model": Pair}, "tuple|output"),
    "a network with another width": Case({"x": X, "y": Y, "model": mlp(5)}, "3"),
    "a network for other inputs": Case({"x": X[:, :4], "y": Y, "model": mlp(3)}, "4"),
    "y longer than x": Case({"x": X, "y": np.append(Y, 0)}, "90|91"),
    "more devices than samples": Case({"x": X, "y": Y}, "too few", {"devices": 50}),
    "a mistyped problem": Case({"x": X, "y": Y, "problem": "regresion"}, "regression"),
    "a mistyped method": Case({"x": X, "y": Y}, "fedavg", {"method": "fedagv"}),
    "a mistyped setting": Case({"x": X, "y": Y}, "train_on", {"device": 3}),
    "people": Case({"x": X, "y": Y, "users": np.arange(N) // 30}, how={"partition": "natural"}),
    "people, dealt out": Case({"x": X, "y": Y, "users": np.arange(N) // 30}, "natural"),
    "people for some samples": Case({"x": X, "y": Y, "users": np.arange(9)}, "one per sample"),
}


@contextmanager
def say_what_to_do(says: str | None) -> Iterator[None]:
    """Expect a refusal in one line, or none."""
    if says is None:
        yield
        return
    with pytest.raises(FedgeError, match=says) as refused:
        yield
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", CASES)
def test_what_a_newcomer_brings_works_or_is_told_what_to_do(name: str) -> None:
    case = CASES[name]
    with say_what_to_do(case.says):
        task = fedge.Task.from_arrays(**case.given)
        settings = {"method": "fedge", "rounds": 2, "devices": 3, "local_steps": 3, "hardware": "none"} | case.how
        done = fedge.simulate(task=task, progress=None, **settings)
        assert done.bundles == 3
        said = fedge.load(done.get_bundle(done.devices[0].id)).predict(task.pool.x[:4])
        assert all(np.isfinite(answer).all() for answer in said.answers)


def test_the_ported_client_of_another_framework_learns() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PORTED.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "import fedge" in block]
    names: dict[str, Any] = {"__name__": "ported"}
    exec(code, names)
    assert names["result"].bundles == 5
    assert names["result"].score > 0.8
