"""Local training: SGD with momentum on one vector of weights; losses and gradients on a device's samples.

All trainable tensors of the network are views of one vector, and so are their gradients: an optimiser step is three
vector operations, however many layers there are. In networks of a few thousand weights a step is mostly overhead; there
it takes a third less time than with `torch.optim.SGD` (digits MLP, batch 32, one core: 97 against 154 µs).

The same loop trains one model (`Network`) or n of them side by side (`Stack`), whose weights are the rows of a matrix.

A network's tensors and arithmetic are on one `processor`, to which samples are moved; inputs and outputs are arrays in
main memory. The choice of processor does not affect the batches.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedge.data.augmentation import change_samples
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.models import build
from fedge.models import network as models
from fedge.models.optimizer import Optimizer, make_optimizer
from fedge.models.problems.cross_entropy import Loss
from fedge.models.problems.losses import PADDING, compute_losses, make_loss, make_loss_of, reduce_outputs
from fedge.steps.sgd import Sgd
from fedge.system.hardware import Processor
from fedge.system.moved import alias_names
from fedge.system.stopping import StoppedError, never
from fedge.tensors.layout import BASE, Layout, Model

Augmenter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that changes inputs and targets of a batch."""
Part = Literal["all", "base", "head"]
"""Which weights learn: all, the head (the last linear layer), or the base (everything else)."""
CHUNK: Final = 512
"""Samples per forward pass outside training; this bounds the memory."""
MOST_STACKED: Final = 2**15
"""Weights of the largest network of which several are trained side by side (see `can_stack`)."""
CPU: Final = torch.device("cpu")
_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SHARED: Final = 4
"""Number of networks kept per thread, and number for which the results of `can_stack` and the like are cached."""


def get_torch_device(processor: Processor) -> torch.device:
    """Return the torch device of a processor, set to full float32 and repeatable results.

    Raises:
        ConfigError: the processor is CUDA, and torch finds no usable GPU.
    """
    if processor is Processor.CUDA:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"train_on is cuda, but torch {torch.__version__} finds no GPU here that it can use: install the "
                "driver and a torch that was built for it, or train on the cpu"
            )
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    return torch.device(processor.value)


@contextmanager
def seed_torch(seed: int, processor: torch.device = CPU) -> Iterator[None]:
    """Seed torch's random numbers, as for dropout, inside the `with` block; draws outside are unaffected."""
    elsewhere = [] if processor.type == CPU.type else [processor.index or 0]
    with torch.random.fork_rng(elsewhere, device_type=processor.type):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also waits for a GPU, which takes long
        if elsewhere:
            torch.get_device_module(processor).manual_seed(seed)
        yield


class Network:
    """The task's network; its trainable tensors are views of `weights` (d,), their gradients views of `gradient` (d,).

    `given` holds further tensors that the loss gets beside a batch.
    """

    def __init__(self, task: TaskSpec, processor: torch.device = CPU) -> None:
        self.task = task
        self.processor = processor
        with torch.random.fork_rng(devices=[]):
            self.module = build.make_network(task)
        self.layout: Layout = models.make_layout(self.module, models.find_head_name(self.module, task))
        self.module.to(processor)
        parameters = dict(self.module.named_parameters())
        trainable = [parameters[info.name] for info in self.layout.select_kind("param")]
        self.weights = torch.cat([p.detach().reshape(-1) for p in trainable])
        self.gradient = torch.zeros_like(self.weights)
        start = 0
        for parameter in trainable:
            end = start + parameter.numel()
            parameter.data = self.weights[start:end].view(parameter.shape)
            parameter.grad = self.gradient[start:end].view(parameter.shape)
            start = end
        others = {name: own for name, own in models.iterate_tensors(self.module) if not own.requires_grad}
        self._buffers, self._counters = (
            [others[info.name] for info in self.layout.select_kind(kind)] for kind in ("buffer", "counter")
        )
        self.given: tuple[Tensor, ...] = ()

    def backward(self, loss: Loss, x: Tensor, y: Tensor) -> None:
        """Add the gradient of the loss to `gradient`."""
        loss(self.module, x, y, *self.given).backward()  # type: ignore[no-untyped-call]

    def compute_outputs(self, x: Tensor) -> Tensor:
        """Compute outputs (b, ...) of inputs (b, ...)."""
        out: Tensor = self.module(x)
        return out

    def get_slice(self, part: Part) -> slice:
        """Return the slice of `weights` that holds a part: the head comes last.

        Raises:
            ConfigError: the network has no head.
        """
        if part == "all":
            return slice(None)
        n_base = self.layout.select(BASE).n_params
        return slice(n_base, None) if part == "head" else slice(0, n_base)

    def load(self, model: Model) -> None:
        """Load a model's weights, in evaluation mode."""
        _fill(self.weights, model.params)
        for tensors, vector in ((self._buffers, model.buffers), (self._counters, model.counters)):
            start = 0
            for own in tensors:
                end = start + own.numel()
                _fill(own, vector[start:end])
                start = end
        _set_evaluation_mode(self.module)

    def present(self) -> Model:
        """Return the present weights, finite or not, as a view that later training may change."""
        return Model(
            params=self.weights.cpu().numpy(),
            buffers=np.concatenate([np.zeros(0, np.float32), *(own.cpu().numpy().ravel() for own in self._buffers)]),
            counters=np.concatenate([np.zeros(0, np.int64), *(own.cpu().numpy().ravel() for own in self._counters)]),
        )

    def dump(self) -> Model:
        """Copy the weights as a new model.

        Raises:
            ProtocolError: `not-finite` if training diverged.
        """
        now = self.present()
        if not (np.isfinite(now.params).all() and np.isfinite(now.buffers).all()):
            raise ProtocolError("not-finite", "a tensor holds NaN or infinity")
        return Model(now.params.copy(), now.buffers, now.counters)

    def compute_logits(self, model: Model, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Compute the outputs (n, ...) of a model, such as logits (n, C), in evaluation mode."""
        self.load(model)
        if not len(x):
            return np.zeros((0, *self.task.problem.get_output_shape(self.task.input_shape)))
        with torch.inference_mode():
            parts = [self.module(chunk) for chunk in torch.split(to_tensor(x, self.processor), CHUNK)]
        return np.asarray(torch.cat(parts).cpu().numpy(), np.float64)

    def predict(self, model: Model, x: NDArray[np.float32], y: NDArray[Any]) -> NDArray[np.float64]:
        """Compute what the problem's formulas need of a model's outputs on n samples, (n, ...), in evaluation mode.

        These are the outputs themselves, unless the problem says otherwise (`Problem.reduce_outputs`).
        """
        return reduce_outputs(self.task.problem, self.compute_logits(model, x), x, y)

    def compute_features(self, model: Model, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Compute the head's input for n >= 1 samples, (n, D), in evaluation mode.

        Raises:
            ConfigError: the network has no head.
        """
        self.load(model)
        with torch.inference_mode():
            chunks = torch.split(to_tensor(x, self.processor), CHUNK)
            parts = [self.compute_present_features(chunk) for chunk in chunks]
        return np.asarray(torch.cat(parts).cpu().numpy(), np.float64)

    def compute_present_features(self, x: Tensor) -> Tensor:
        """Compute the head's input for the present weights, (b, D).

        Raises:
            ConfigError: the network has no head.
        """
        return models.compute_features_and_logits(self.module, x, self.layout)[0]


class Stack:
    """n models of a network without buffers, side by side: `weights` and `gradient` are (n, d), one model per row.

    Inputs are (n, b, ...) and labels (n, b), b samples per model. `given` holds further tensors (n, ...) for the loss,
    one row per model.
    """

    def __init__(self, network: Network, starts: Sequence[Model]) -> None:
        self.task = network.task
        self.module = network.module
        self.layout = network.layout
        self.processor = network.processor
        self.given: tuple[Tensor, ...] = ()
        self.weights = to_tensor(np.stack([start.params for start in starts]), self.processor)
        self.gradient = torch.zeros_like(self.weights)
        self._leaf = self.weights.detach().requires_grad_()  # the same numbers, with a gradient
        self._leaf.grad = self.gradient
        self._infos = self.layout.select_kind("param")

    def get_slice(self, part: Part) -> slice:
        """Return the slice of all weights; training only a part needs one model at a time.

        Raises:
            ValueError: the part is not "all".
        """
        if part != "all":
            raise ValueError(f"models side by side can train only all weights, not the {part}")
        return slice(None)

    def backward(self, loss: Loss, x: Tensor, y: Tensor) -> None:
        """Add the gradients of each model's loss to its row of `gradient`."""
        self._call(Objective(self.module, loss), "module.", x, y, *self.given).sum().backward()  # type: ignore[no-untyped-call]

    def compute_present_features(self, x: Tensor) -> Tensor:
        """Compute the heads' inputs for the present weights, (n, b, D).

        Raises:
            ConfigError: the network has no head.
        """
        return self._call(Features(self.module, self.layout), "module.", x)

    def compute_outputs(self, x: Tensor) -> Tensor:
        """Compute outputs (n, b, ...)."""
        return self._call(self.module, "", x)

    def _call(self, module: nn.Module, prefix: str, *inputs: Tensor) -> Tensor:
        parts = torch.split(self._leaf, [info.size for info in self._infos], dim=1)
        rows = {prefix + i.name: part.view(len(part), *i.shape) for i, part in zip(self._infos, parts, strict=True)}
        out: Tensor = torch.vmap(lambda own, *xs: functional_call(module, own, xs))(rows, *inputs)
        return out

    def present(self) -> list[Model]:
        """Return the present models, finite or not, as views that later training may change."""
        nothing = np.zeros(0, np.float32), np.zeros(0, np.int64)
        return [Model(row, *nothing) for row in self.weights.cpu().numpy()]


class Objective(nn.Module):
    """A loss as a module, so that the weights under it can be replaced."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        return self._loss(self.module, x, y, *given)


class Features(nn.Module):
    """The head's input as a module, so that the weights under it can be replaced."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.module = module
        self._layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """Compute the features of a batch, (b, D)."""
        return models.compute_features_and_logits(self.module, x, self._layout)[0]


@lru_cache(maxsize=_SHARED)
def can_stack(network: Network) -> bool:
    """Return whether models of this network can train side by side, and whether that pays off.

    It pays off where a step is mostly overhead (`is_small`). The table gives microseconds of processor time per step
    and model for MLPs (batch 32, one thread, median of five on a machine in use, load 7), by models side by side:

        weights     1     2     10     40     64
          2,410   173   451    131     61     53
          9,610   222   639    225    119    106
         18,314   289   693    298    181    181
         25,450   233   560    264    201    205
         50,890   304   646    392    312    311
        159,010   647  1534    980   1037   1579

    So two models gain nothing, and large networks never do. Convolutions lost, too: `cnn` on 28 x 28 took 6.3 ms alone
    and 8.1 with 4 models; `cnn_fedavg` took 35 ms alone, 42 with 2 and 35 with 8.

    On a GPU all networks are tried, since a step on a few dozen samples is mostly launch overhead (not measured by us).

    Networks can be stacked if they have no buffers and no random numbers and their code can be vectorised; the function
    tries that out. This changes the network's weights.
    """
    if network.processor == CPU and not is_small(network):
        return False
    if len(network.layout.select_kind("param")) != len(network.layout.tensors):
        return False
    rng = np.random.default_rng(0)
    x = to_tensor(rng.random((2, 2, *network.task.input_shape), np.float32), network.processor)
    weights = 0.1 * rng.standard_normal(network.layout.n_params, np.float32)
    model = Model(weights, np.zeros(0, np.float32), np.zeros(0, np.int64))
    network.load(model)
    network.module.train()
    try:
        with torch.no_grad():
            found = Stack(network, [model, model]).compute_outputs(x)
            wanted = torch.stack([network.compute_outputs(own) for own in x])
    except Exception:  # noqa: BLE001 - whatever a user's network does not like about it
        return False
    finally:
        network.module.eval()
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def is_small(network: Network) -> bool:
    """Return whether a step is mostly overhead: all weights are in linear layers, at most `MOST_STACKED` of them."""
    linear = sum(p.numel() for m in network.module.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    return linear == network.layout.n_params <= MOST_STACKED


@lru_cache(maxsize=_SHARED)
def uses_randomness(network: Network) -> bool:
    """Return whether the network may draw random numbers in training (dropout). May change buffers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        network.module.train()
        try:
            network.compute_outputs(torch.zeros((2, *network.task.input_shape)))
        except Exception:  # noqa: BLE001 - the orders of such a network fail one by one
            return True
        finally:
            network.module.eval()
        return not torch.equal(before, torch.get_rng_state())


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch's `FlopCounterMode` without torch's compiler, whose import takes 1 s, 70 MB and a folder in TMPDIR."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@lru_cache(maxsize=_SHARED)
def count_flops(network: Network) -> int:
    """Count the operations of one sample's forward pass as torch does: those of matrix products and convolutions."""
    network.module.eval()
    with _Counter() as counter, torch.no_grad():  # type: ignore[no-untyped-call]
        network.compute_outputs(torch.zeros((1, *network.task.input_shape), device=network.processor))
    return int(counter.total)


_of_thread = threading.local()


def get_shared_network(task: TaskSpec, fingerprint: str, processor: torch.device = CPU) -> Network:
    """Return this thread's network for the task; load weights before each use.

    Sharing lets a thousand workers use the memory of one worker. The most recent networks are kept.
    """
    if not hasattr(_of_thread, "networks"):
        _of_thread.networks = OrderedDict()
    networks: OrderedDict[tuple[str, str, torch.device], Network] = _of_thread.networks
    key = fingerprint, task.head_class, processor
    if key not in networks:
        networks[key] = Network(task, processor)
        if len(networks) > _SHARED:
            networks.popitem(last=False)
    networks.move_to_end(key)
    return networks[key]


def _fill(own: Tensor, numbers: NDArray[np.generic]) -> None:
    """Overwrite a tensor that has no gradient, without torch's copy of a read-only array."""
    if own.device == CPU:
        np.copyto(own.numpy(), numbers.reshape(own.shape))
    else:
        own.copy_(to_tensor(numbers).view(own.shape))


def to_tensor(array: NDArray[np.generic], processor: torch.device = CPU) -> Tensor:
    """Return a tensor that shares the array's memory if possible, else is a copy on the processor."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(processor)


def draw_batches(n: int, batch_size: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield endless batches of min(batch_size, n) indices, shuffled anew in each pass, n >= 1.

    Batches may span two passes, so that all have the same size and no step uses a remnant of one or two samples.
    """
    size = min(batch_size, n)
    waiting = np.zeros(0, np.int64)
    while True:
        if len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(n)])
        yield waiting[:size]
        waiting = waiting[size:]


def draw_stacked_batches(
    sizes: Sequence[int], batch_size: int, rngs: Sequence[np.random.Generator]
) -> Iterator[NDArray[np.int64]]:
    """Yield endless batches (n, b) for n clients whose samples are joined (`join_samples`).

    Each row is a batch of `draw_batches` for one client; shorter batches are padded with the ignored sample.
    """
    *offsets, last = np.cumsum([0, *sizes]).tolist()
    drawn = [draw_batches(size, batch_size, rng) for size, rng in zip(sizes, rngs, strict=True)]
    positions = np.full((len(sizes), min(batch_size, max(sizes))), last)
    while True:
        for row, own, offset in zip(positions, drawn, offsets, strict=True):
            batch = next(own)
            row[: len(batch)] = batch + offset
        yield positions


def join_samples(
    samples: Sequence[tuple[NDArray[np.float32], NDArray[Any]]],
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Concatenate the samples of n clients and append one ignored sample (`PADDING`)."""
    x = np.concatenate([*(own for own, _ in samples), np.zeros_like(samples[0][0][:1])])
    return x, np.concatenate([*(own for _, own in samples), make_padding(samples[0][1], 1)])


def make_padding(y: NDArray[Any], n: int) -> NDArray[Any]:
    """Return targets of n samples that count in no loss, of the type and shape of other targets."""
    return np.full((n, *y.shape[1:]), np.nan if y.dtype.kind == "f" else PADDING, y.dtype)


def _set_evaluation_mode(module: nn.Module) -> None:
    """Switch to evaluation mode; checking first is quicker than setting every layer again."""
    if module.training:
        module.eval()


def make_augmenter(
    task: TaskSpec, rngs: Sequence[np.random.Generator], sizes: Sequence[int] | None = None
) -> Augmenter | None:
    """Make the function that changes a batch as the task says (`fedge.data.augmentation`); None if it says nothing.

    Args:
        task: the task of the samples.
        rngs: the generators that draw the batches, one for each model. Each gets a child, so the batches stay the same.
        sizes: for a stack, the number of samples in a batch of each model; the rest of a row is padding. None for a
            model alone.
    """
    if not task.augment:
        return None
    children = [rng.spawn(1)[0] for rng in rngs]

    def change(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        if not len(y):
            return x, y
        found_x, found_y = change_samples(task, x.cpu().numpy(), y.cpu().numpy(), rng)
        return to_tensor(found_x, x.device), to_tensor(found_y, y.device)

    def augment(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if sizes is None:
            return change(x, y, children[0])
        for row, (rng, n) in enumerate(zip(children, sizes, strict=True)):
            x[row, :n], y[row, :n] = change(x[row, :n], y[row, :n], rng)
        return x, y

    return augment


class Trainable(Protocol):
    """The interface of `Network`, `Stack` and `fedge.models.dp_sgd.PrivateNetwork` that a `Trainer` uses."""

    task: TaskSpec
    module: nn.Module
    processor: torch.device
    weights: Tensor
    gradient: Tensor

    def get_slice(self, part: Part) -> slice:
        """Return the slice of the weights that holds a part."""

    def backward(self, loss: Loss, x: Tensor, y: Tensor) -> None:
        """Add the gradient to `gradient`."""


class Trainer:
    """A run of training from the present weights of a network or stack; each `run` continues the previous one.

    By default `loss` and `optimizer` are those of the recipe `sgd` (`fedge.models.problems`, `fedge.models.optimizer`);
    a stack whose classes have weights needs its loss, and the weights in `given`. `moves` names the part of the weights
    that learns. `anchor` (d,) holds the weights towards which the proximal term pulls, by default the present ones.

    A batch of one sample has no variance, so batch normalisation then uses its running statistics and leaves them
    unchanged.

    `rng` draws the batches, or yields them: positions (b,) in `x` and `y`, or (n, b) for a stack
    (`draw_stacked_batches`). `augment` changes each batch; if `rng` is a generator, it is by default what the task says
    (`make_augmenter`). A stack's loss must ignore samples of `PADDING`, as those of problems do.
    """

    def __init__(
        self,
        network: Trainable,
        x: NDArray[np.float32],
        y: NDArray[Any],
        sgd: Sgd,
        rng: np.random.Generator | Iterator[NDArray[np.int64]],
        *,
        loss: Loss | None = None,
        moves: Part = "all",
        anchor: NDArray[np.float32] | None = None,
        optimizer: Optimizer | None = None,
        augment: Augmenter | None = None,
    ) -> None:
        if augment is None and isinstance(rng, np.random.Generator):
            augment = make_augmenter(network.task, [rng])
        self._augment = augment
        self._network = network
        self._loss = loss or _make_loss(network, sgd, y)
        self._moves = network.get_slice(moves)
        self._x, self._y = to_tensor(x, network.processor), to_tensor(y, network.processor)
        self._batches = draw_batches(len(y), sgd.batch_size, rng) if isinstance(rng, np.random.Generator) else rng
        self._of_one = not isinstance(network, Stack) and min(len(y), sgd.batch_size) == 1
        self._gradient: Tensor | None = None  # the gradient that the last run left
        self._optimizer = optimizer or make_optimizer(sgd, self._make_anchored(anchor) if sgd.proximal_mu else None)

    def _make_anchored(self, anchor: NDArray[np.float32] | None) -> Tensor:
        network = self._network
        weights = network.weights.clone() if anchor is None else to_tensor(anchor, network.processor)
        return weights[..., self._moves]

    def run(self, steps: int, stop: Callable[[], bool] = never) -> None:
        """Take some steps and leave the network in evaluation mode.

        Raises:
            StoppedError: `stop()` was true between two steps.
        """
        network = self._network
        if not steps:
            _set_evaluation_mode(network.module)
            return
        network.module.train()
        if self._of_one:
            for layer in network.module.modules():
                layer.train(not isinstance(layer, _BATCH_NORMS) and layer.training)
        if self._gradient is None:
            network.gradient.zero_()
        else:
            network.gradient.copy_(self._gradient)
        weights, gradient = network.weights[..., self._moves], network.gradient[..., self._moves]
        for _ in range(steps):
            if stop():
                raise StoppedError
            batch = torch.from_numpy(next(self._batches))
            self._optimizer.begin(gradient)
            x, y = self._x[batch], self._y[batch]
            if self._augment is not None:
                x, y = self._augment(x, y)
            network.backward(self._loss, x, y)
            self._optimizer.step(weights, gradient)
        self._gradient = network.gradient.clone()
        network.module.eval()


def _make_loss(network: Trainable, sgd: Sgd, y: NDArray[Any]) -> Loss:
    if isinstance(network, Network):
        return make_loss_of(network.task.problem, sgd, y, network.processor)
    if sgd.class_weights:
        raise ValueError("only a network alone finds the weights of its classes: give the loss, and the weights")
    return make_loss(network.task.problem, sgd)


def compute_mean_loss(network: Network, x: NDArray[np.float32], y: NDArray[Any]) -> float:
    """Compute the mean loss of the weights on n >= 1 samples, in evaluation mode."""
    return float(compute_mean_losses(network, x, y))


def compute_loss_and_gradient_norm(network: Network, x: NDArray[np.float32], y: NDArray[Any]) -> tuple[float, float]:
    """Compute mean loss and its gradient's L2 norm, n >= 1, in evaluation mode."""
    loss, norm = compute_losses_and_gradient_norms(network, x, y)
    return float(loss), float(norm)


def compute_mean_losses(network: Network | Stack, x: NDArray[np.float32], y: NDArray[Any]) -> NDArray[np.float64]:
    """Compute each model's mean loss; for a stack, x is (n, m, ...) and y (n, m, ...), padded (`pad_samples`)."""
    with torch.inference_mode():
        total = sum((loss.double() for loss in _sum_losses(network, x, y)), torch.zeros(()))
    return np.asarray(total.cpu().numpy() / _count_samples(network, y))


def compute_losses_and_gradient_norms(
    network: Network | Stack, x: NDArray[np.float32], y: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute each model's mean loss and its gradient's L2 norm; inputs as for `compute_mean_losses`."""
    network.gradient.zero_()
    total = torch.zeros(())
    for loss in _sum_losses(network, x, y):
        loss.sum().backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach().double()
    norms = torch.linalg.vector_norm(network.gradient, dim=-1, dtype=torch.float64)
    return np.asarray(total.cpu().numpy() / _count_samples(network, y)), np.asarray(
        norms.cpu().numpy() / _count_samples(network, y)
    )


def compute_scores(stack: Stack, x: NDArray[np.float32], y: NDArray[Any]) -> list[float | None]:
    """Compute each model's score on its samples, by the problem; None where its samples give none."""
    if not y.shape[1]:
        return [None] * len(y)
    problem = stack.task.problem
    parts = []
    with torch.inference_mode():
        for inputs, targets in _iterate_chunks(stack, x, y):
            flat = (each.flatten(0, 1).cpu().numpy() for each in (stack.compute_outputs(inputs), inputs, targets))
            reduced = reduce_outputs(problem, *flat)
            parts.append(reduced.reshape(len(y), -1, *reduced.shape[1:]))
    rows = zip(np.concatenate(parts, axis=1), _find_real(stack, y), y, strict=True)
    return [problem.score_alone(own[kept], targets[kept]) for own, kept, targets in rows]


def pad_samples(
    samples: Sequence[tuple[NDArray[np.float32], NDArray[Any]]],
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Pad the samples of n clients to the largest client's number m: inputs (n, m, ...), targets (n, m, ...)."""
    longest = max(len(y) for _, y in samples)
    x = np.zeros((len(samples), longest, *samples[0][0].shape[1:]), np.float32)
    y = np.stack([make_padding(samples[0][1], longest)] * len(samples))
    for k, (own_x, own_y) in enumerate(samples):
        x[k, : len(own_y)], y[k, : len(own_y)] = own_x, own_y
    return x, y


def _count_axes(network: Network | Stack) -> int:
    """Return the number of axes before a sample's own: (m, ...) for a network, (n, m, ...) for a stack."""
    return 2 if isinstance(network, Stack) else 1


def _find_real(network: Network | Stack, y: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which samples are no padding, (m,) or (n, m)."""
    first = y.reshape(*y.shape[: _count_axes(network)], -1)[..., 0]
    return np.asarray(~np.isnan(first) if y.dtype.kind == "f" else first != PADDING)


def _count_samples(network: Network | Stack, y: NDArray[Any]) -> NDArray[np.int64]:
    return np.asarray(_find_real(network, y).sum(axis=-1))


def _sum_losses(network: Network | Stack, x: NDArray[np.float32], y: NDArray[Any]) -> Iterator[Tensor]:
    """Yield sums of losses over chunks of the samples, one per model."""
    network.module.eval()
    last = _count_axes(network) - 1
    for inputs, targets in _iterate_chunks(network, x, y):
        outputs = network.compute_outputs(inputs)
        each = compute_losses(network.task.problem, *(own.flatten(0, last) for own in (outputs, inputs, targets)))
        yield each.view(targets.shape[: last + 1]).sum(dim=-1)


def _iterate_chunks(
    network: Network | Stack, x: NDArray[np.float32], y: NDArray[Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    last = _count_axes(network) - 1
    inputs, targets = (torch.split(to_tensor(own, network.processor), CHUNK, last) for own in (x, y))
    return zip(inputs, targets, strict=True)


__getattr__ = alias_names(__name__, batches="draw_batches")
