"""Unusual networks, as people write them: each works, or ends in one sentence that says what to do."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coordinator.service import checks, findings
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.system.loading import register_object

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(1, 4, 4), model="")
RNG = np.random.default_rng(0)
SAMPLES = findings.Samples(RNG.standard_normal((9, 1, 4, 4), np.float32), np.arange(9) % 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.d = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.a(x.flatten(1)))
        return found

    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x))


class _Two(Net):
    """Two heads while it trains, as torchvision's GoogLeNet has."""

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        return (self.d(y), self.d(y)) if self.training else self.d(y)


class _Named(Net):
    def forward(self, x: Tensor) -> Any:
        return {"logits": self.d(self.features(x))}


class _Nothing(Net):
    def forward(self, x: Tensor) -> Any:
        self.d(self.features(x))


class _Flat(Net):
    """squeeze() also takes the first axis of one sample."""

    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x)).squeeze()


class _OneByOne(Net):
    def forward(self, x: Tensor) -> Any:
        assert len(x) > 1, "more than one, please"
        return self.d(self.features(x))


class _Double(Net):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x)).double()


class _Logarithm(Net):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x).log())


class _InPlace(Net):
    def forward(self, x: Tensor) -> Any:
        y = torch.sigmoid(self.a(x.flatten(1)))
        y[:, :2] *= 2
        return self.d(self.relu(y))


class _OfItsInput(Net):
    def forward(self, x: Tensor) -> Any:
        x.sub_(0.1)
        return self.d(self.features(x))


class _OfItsInputInTraining(Net):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            x.flatten(1).mul_(2)
        return self.d(self.features(x))


class _Centred(Net):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x - x.mean(0)))


class _OverTheBatch(nn.Module):
    """batch_first was forgotten: the samples are a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.relu, self.d = nn.GRU(4, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.d(self.relu(self.g(x.squeeze(1))[0][:, -1]))


class _Plain(Net):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.shift = make()

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + torch.as_tensor(self.shift)


class _NotPersistent(Net):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(8), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.shift


class _Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8), nn.ReLU()]

    def features(self, x: Tensor) -> Tensor:
        y = super().features(x)
        for layer in self.layers:
            y = layer(y)
        return y


class _Remembering(Net):
    n = 0

    def forward(self, x: Tensor) -> Any:
        self.n += 1
        return self.d(self.features(x)) * self.n


class _Averaging(Net):
    """A running mean that is also updated while it predicts, and put in the old one's place."""

    mean: Tensor

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always
        self.register_buffer("mean", torch.zeros(16))

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training or self.always:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().features(x - self.mean)


class _DropoutOn(Net):
    def forward(self, x: Tensor) -> Any:
        return self.d(functional.dropout(self.features(x)))


class _NumpyNoise(Net):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x)) + random.random()


class _Detached(Net):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.features(x)).detach()


class _InTraining(Net):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            raise KeyError("aux")
        return self.d(self.features(x))


class _Kept(Net):
    """The second batch's gradient would pass through the first batch's graph."""

    last: Any = 0

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        if self.training:
            y = y + self.last
            self.last = y.mean(0)
        return self.d(y)


class _Cooling(Net):
    """A temperature that falls while it trains."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.temperature *= 0.9
        return self.d(self.features(x)) / self.temperature


class _WithAGradient(Net):
    """As for a saliency map; torch.no_grad() is undone."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            return self.d(self.features(x))


class _TwiceTheRows(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.repeat_interleave(2, 0))[::2]


class _Root(Net):
    def features(self, x: Tensor) -> Tensor:
        return (super().features(x) * 0).sqrt()


class _ByValue(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.d(self.features(x))
        return y if (x > -10).all() else -y


class _Len(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x.reshape(len(x), -1))


class _Svd(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(torch.linalg.svdvals(x.squeeze(1)).repeat(1, 4))


class _Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class _OwnNorm(Net):
    """A standard deviation of one sample is NaN."""

    def features(self, x: Tensor) -> Tensor:
        y = super().features(x)
        return (y - y.mean(0)) / (y.std(0) + 1) if self.training else y


class _Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c.weight = self.b.weight
        self.again = self.c

    def features(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.c(self.b(super().features(x))))
        return y


class _Asserting(Net):
    def forward(self, x: Tensor) -> Any:
        assert torch.isfinite(x).all()
        return self.d(self.features(x))


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.relu, self.d = nn.Embedding(7, 4), nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.d(self.relu(self.e(x.long().flatten(1)).mean(1)))


def with_norm(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Linear(8, 3))


@dataclass
class Case:
    make: Callable[[], nn.Module]
    what: str
    do: str = ""
    stops: bool = True


WRONG = [
    Case(_Two, "in training mode the network returns a tuple of 2, no tensor", "the logits, in training and in"),
    Case(_Named, "the network returns a dict with logits, no tensor", "return one tensor of the shape (n, 3)"),
    Case(_Nothing, "the network returns nothing, no tensor"),
    Case(_Flat, "the network turns 1 sample into numbers of the shape (3,), and there are 3 classes (a, b, c)"),
    Case(_OneByOne, "does not take one sample alone (AssertionError: more than one, please (test_probes.py, line"),
    Case(lambda: with_norm(track_running_stats=False), "does not take one sample alone (ValueError: Expected more"),
    Case(_Double, "the network returns numbers of the type torch.float64", "logits.float()"),
    Case(_Logarithm, "the network gives NaN or infinity for 9 of 9 samples", "look for a logarithm"),
    Case(_InPlace, "training fails, since a value that its gradient needs is changed in place", "write y = y * 2"),
    Case(_OfItsInput, "the network changes its input in place", "write x = x - 0.1"),
    Case(_OfItsInputInTraining, "the network changes its input in place", "write x = x - 0.1"),
    Case(_Centred, "the answer to a sample depends on the others in its batch", "nothing over the first axis"),
    Case(_OverTheBatch, "the answer to a sample depends on the others in its batch", "batch_first=True"),
    Case(lambda: _Plain(lambda: torch.randn(8)), "since no state dict has shift", "register_buffer, persistent"),
    Case(lambda: _Plain(lambda: np.random.randn(8).astype(np.float32)), "since no state dict has shift"),  # noqa: NPY002
    Case(lambda: _Plain(random.random), "since no state dict has shift"),
    Case(_NotPersistent, "since no state dict has shift", "register_buffer, persistent"),
    Case(_Listed, "since no state dict has layers[0].weight, layers[0].bias", "torch.nn.ModuleList"),
    Case(lambda: nn.Sequential(nn.Flatten(), *[nn.Linear(16, 16)] * random.randint(1, 99), nn.Linear(16, 3)), "other"),
    Case(_Remembering, "answers differently each time, since it remembers something (n)", "from its sample alone"),
    Case(lambda: _Averaging(True), "the network changes mean while it predicts", "if self.training"),
    Case(lambda: _Averaging(False), "puts another tensor in the place of mean", "self.mean.copy_(...)"),
    Case(_DropoutOn, "it draws random numbers also in evaluation mode", "training=self.training"),
    Case(_NumpyNoise, "it draws random numbers also in evaluation mode", "only if self.training"),
    Case(_Detached, "training fails, since no gradient reaches a weight", "leave out detach()"),
    Case(_InTraining, "in training mode the network does not take 9 samples (KeyError: 'aux' (test_probes.py, line"),
    Case(_Kept, "training fails at the second batch, since the network keeps a value of the first", "its detach()"),
    Case(_Cooling, "training changes temperature, which no state dict has", "register_buffer"),
    Case(
        _WithAGradient,
        "the network fails while it is tried (RuntimeError: Can't call numpy() on Tensor that",
        "no_grad",
    ),
    Case(_Root, "after a step of training weights are NaN or infinite", "look for numbers that are too large"),
    Case(_Frozen, "the network has no weight that learns"),
    Case(nn.Flatten, "the network has no weight that learns"),
]
"""What is found before the network is exported."""

WITH_A_GRAPH = [
    Case(lambda: nn.Sequential(Net(), nn.Softmax(1)), "softmax", stops=False),
    Case(lambda: nn.Sequential(Net(), nn.Sigmoid()), "the network ends in sigmoid", "leave that step out", stops=False),
    Case(_OwnNorm, "a device with one sample only cannot train (after a step", "at least two samples", stops=False),
    Case(_ByValue, "exported to ONNX the network gives other numbers", "as test_probes.py, line "),
    Case(_Len, "exported to ONNX the network does not take 9 samples", "take the batch size from x.shape[0]"),
    Case(_Svd, "No ONNX function found for <OpOverload(op='aten._linalg_svd'", "leave out what ONNX has no operator"),
]

WORKING: list[Callable[[], nn.Module]] = [
    Net,
    with_norm,
    _Shared,
    _Asserting,
    _TwiceTheRows,
    lambda: _Plain(lambda: torch.arange(8.0)),
    lambda: nn.Sequential(Net(), nn.Dropout(0.5)),
    lambda: torch.jit.trace(Net(), torch.zeros(2, 1, 4, 4)),
]


def examined(make: Callable[[], nn.Module], samples: findings.Samples | None = SAMPLES) -> tuple[findings.Finding, ...]:
    """What is said of a network whose factory every machine calls for itself."""
    factory = lambda: make()  # noqa: E731 - of its own, so that no other test's name or graph is taken for it
    task = msgspec.structs.replace(TASK, model=register_object(factory))
    return checks.examine(task, build.make_initial_model(task, 0)[0], samples=samples).findings


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.what[:60])
def test_what_would_not_work_is_said_in_a_sentence(case: Case) -> None:
    (found,) = examined(case.make)
    told(found, case)


def told(found: findings.Finding, case: Case) -> None:
    assert case.what in found.what
    assert case.do in found.do
    assert found.stops is case.stops
    assert str(found).isprintable()


@pytest.mark.parametrize("case", WITH_A_GRAPH, ids=lambda case: case.what)
@pytest.mark.process  # for its seconds
def test_what_a_graph_shows_is_said_in_a_sentence(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = examined(case.make)
    told(found, case)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("make", WORKING)
@pytest.mark.process  # for its seconds
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_nothing_is_said_of_an_unusual_network_that_works(make: Callable[[], nn.Module]) -> None:
    assert examined(make) == ()


@pytest.mark.process  # for its seconds
def test_numbers_of_tokens_are_tried_as_they_are() -> None:
    tokens = findings.Samples(RNG.integers(0, 7, (9, 1, 4, 4)).astype(np.float32), np.arange(9) % 3)
    assert examined(_Tokens, tokens) == ()
    assert examined(_Tokens, None) == ()


@pytest.mark.process  # for its seconds
def test_layers_that_a_given_module_hides_in_a_list_would_not_learn() -> None:
    task = msgspec.structs.replace(TASK, model=register_object(net := _Listed()))
    (found,) = checks.examine(task, build.make_initial_model(task, 0)[0], samples=SAMPLES).findings
    assert "no order trains layers[0].weight, layers[0].bias, since no state dict has it" in found.what
    net.layers[0].requires_grad_(False)
    assert checks.examine(task, build.make_initial_model(task, 0)[0], samples=SAMPLES).findings == ()


@pytest.mark.process  # for its seconds
def test_checks_leave_random_numbers_and_a_given_module_as_they_are() -> None:
    net = with_norm()
    before, state = {name: own.clone() for name, own in net.state_dict().items()}, torch.get_rng_state()
    task = msgspec.structs.replace(TASK, model=register_object(net))
    checks.examine(task, build.make_initial_model(task, 0)[0], samples=SAMPLES)
    assert all(torch.equal(own, before[name]) for name, own in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("sizes", "kept"), [([100], 16), ([3, 0, 2], 5), ([1] * 40, 16), ([0], 0), ([], 0)])
def test_a_few_samples_are_taken_of_all(sizes: list[int], kept: int) -> None:
    few = checks.select_few([(np.full((n, 2), k), np.full(n, k)) for k, n in enumerate(sizes)])
    assert (0 if few is None else len(few.y)) == kept
    if kept > 1:
        assert few is not None
        assert few.x[:, 0].tolist() == few.y.tolist()
        assert len(set(few.y.tolist())) == len([n for n in sizes if n][:16])
