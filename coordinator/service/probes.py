"""Probes of a task's network with a few samples: it predicts, trains and is built again, as on a device.

Each probe yields what it finds wrong. No probe raises what the network raises. `coordinator.service.checks` defines
their order.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coordinator.service.findings import Finding, Samples
from export.parity import compute_difference, favour_routes
from fedge.data.task import TaskSpec
from fedge.errors import FedgeError, ProtocolError
from fedge.models.constants import collect_constants, compute_digest
from fedge.models.network import dump_model, iterate_tensors
from fedge.models.training import Network, Trainer, to_tensor
from fedge.steps.sgd import Sgd
from fedge.system.loading import FAILURES, describe_error, find_user_line
from fedge.tensors.layout import Layout, Model

N_ALONE: Final = 4
"""Samples that the network also evaluates one by one, to compare with a batch."""
TOLERANCE: Final = 1e-3
"""Tolerated difference of a logit, relative to the largest logit if that is above 1."""
RATE: Final = 1e-3
"""Learning rate of the trial steps: so small that they diverge nowhere, and they still show what breaks."""
_NAMED: Final = 4
_ENDS: Final = {
    "SoftmaxBackward0": "softmax",
    "LogSoftmaxBackward0": "log_softmax",
    "SigmoidBackward0": "sigmoid",
    "TanhBackward0": "tanh",
    "ReluBackward0": "ReLU",
}
"""Names of a network's last operation, by the name that torch gives its gradient."""


def probe_outputs(module: nn.Module, x: Tensor, task: TaskSpec) -> Iterator[Finding]:
    """Probe whether the network, in evaluation mode, turns n samples and one sample into logits."""
    for n in dict.fromkeys((len(x), 1)):
        try:
            with torch.no_grad():
                found = module(x[:n].clone())
        except FAILURES as error:
            yield _make_raise_finding("the network", n, error)
            return
        if (wrong := _examine_logits(found, n, task)) is not None:
            yield wrong
            return


def _make_raise_finding(what: str, n: int, error: BaseException) -> Finding:
    samples = f"{n} samples" if n > 1 else "one sample alone"
    do = "a device asks about any number of samples, also about one: compute each from its own values only"
    return Finding(
        f"{what} does not take {samples} ({describe_error(error)})",
        do if n == 1 else "let forward take inputs of the task's shape, and return one tensor of logits",
        stops=True,
    )


def _examine_logits(found: Any, n: int, task: TaskSpec, when: str = "") -> Finding | None:
    """Return what is wrong with an answer to n samples; None if nothing is."""
    problem, wanted = task.problem, task.problem.get_output_shape(task.input_shape)
    shape = f"(n, {', '.join(map(str, wanted))})"
    if not isinstance(found, Tensor):
        what = f"a {type(found).__name__}" if found is not None else "nothing"
        if isinstance(found, dict):
            what += f" with {', '.join(map(str, islice(found, _NAMED)))}"
        elif isinstance(found, tuple | list):
            what += f" of {len(found)}"
        do = f"let forward return one tensor of the shape {shape}, the {problem.RAW}, in training and in evaluation"
        return Finding(f"{when}the network returns {what}, no tensor", do, stops=True)
    if found.shape != (n, *wanted):
        what = f"{when}the network turns {n} sample{'s' * (n > 1)} into numbers of the shape {tuple(found.shape)}"
        last = f"torch.nn.Linear(..., {problem.WIDTH or wanted[0]}), so that" if len(wanted) == 1 else "a layer so that"
        return Finding(
            f"{what}, and {problem.describe_outputs()}", f"let it end with {last} the shape is {shape}", stops=True
        )
    if found.dtype is not torch.float32:
        what = f"{when}the network returns numbers of the type {found.dtype}"
        return Finding(what, "let forward return float32, as in logits.float()", stops=True)
    if not (fine := found.isfinite().flatten(1).all(dim=1)).all():
        what = f"{when}the network gives NaN or infinity for {int((~fine).sum())} of {n} samples"
        return Finding(what, "look for a logarithm, a root or a quotient of what may be 0 or below", stops=True)
    return None


def probe_answers(module: nn.Module, x: Tensor) -> Iterator[Finding]:
    """Probe whether an answer depends on its sample alone, and whether evaluation leaves the network unchanged."""
    before, rng = _copy_state(module), _get_generators()
    inputs = x.clone()
    with torch.no_grad():
        first = module(inputs)
        drawn = _get_generators() != rng
        kept = {place: compute_digest(value) for place, value in collect_constants(module).items()}
        second = module(x.clone())
    yield from _probe_input(inputs, x)
    if changed := _find_changed(before, module):
        yield Finding(
            f"the network changes {_format_some(changed)} while it predicts",
            "change it in training only (if self.training), and in place (copy_, mul_)",
            stops=True,
        )
    elif _differs(first, second):
        yield _make_unsteady_finding(
            drawn, [place for place, v in collect_constants(module).items() if kept.get(place) != compute_digest(v)]
        )
    else:
        yield from _probe_neighbours(module, x, first)
    if (end := _find_last_operation(module, x)) is not None:
        yield Finding(
            f"the network ends in {end}, and what it returns is taken for logits",
            "leave that step out: training and bundles apply softmax to what the network returns",
        )


def _make_unsteady_finding(drawn: bool, changed: list[str]) -> Finding:
    if drawn:
        return Finding(
            "the network answers differently each time, since it draws random numbers also in evaluation mode",
            "use torch.nn.Dropout, or pass training=self.training; add noise only if self.training",
            stops=True,
        )
    return Finding(
        "the network answers differently each time, since it remembers something "
        f"({_format_some(changed) or 'not found'})",
        "compute each answer from its sample alone, and leave out what is kept from one call to the next",
        stops=True,
    )


def _probe_neighbours(module: nn.Module, x: Tensor, together: Tensor) -> Iterator[Finding]:
    alone = np.concatenate([_evaluate(module, x[k : k + 1]) for k in range(min(len(x), N_ALONE))])

    def answer_together(lean: float) -> NDArray[np.floating]:
        with favour_routes(module, lean):
            return (_evaluate(module, x) if lean else together.numpy())[: len(alone)]

    if not (far := compute_difference(alone, answer_together)) <= compute_tolerance(together.numpy()):
        yield Finding(
            "the answer to a sample depends on the others in its batch: alone and among others it differs by up to "
            f"{far:.3g}",
            "compute nothing over the first axis, such as x.mean(0) or x.max(); give BatchNorm its running statistics, "
            "and recurrent and attention layers batch_first=True",
            stops=True,
        )


def compute_tolerance(logits: NDArray[np.floating]) -> float:
    """Return how far two computations of these logits may differ."""
    return TOLERANCE * max(1.0, float(np.abs(logits).max(initial=0)))


def _find_last_operation(module: nn.Module, x: Tensor) -> str | None:
    with torch.enable_grad():
        end = module(x.clone()).grad_fn
    return None if end is None else _ENDS.get(end.name())


def probe_training(network: Network, samples: Samples, untrained: nn.Module) -> Iterator[Finding]:
    """Probe whether a network can learn, by steps as on a device: with n samples, and with one.

    `untrained`: another build with the same weights, which are finite. The weights of `network` are changed.
    """
    module, x = network.module, to_tensor(samples.x)
    before, start, inputs = dict(iterate_tensors(module)), network.dump(), x.clone()
    kept = {place: compute_digest(value) for place, value in collect_constants(module).items()}
    try:
        found = module.train()(inputs)
    except FAILURES as error:
        yield _make_raise_finding("in training mode the network", len(x), error)
        return
    if (wrong := _examine_logits(found, len(x), network.task, "in training mode ")) is not None:
        yield wrong
        return
    yield from _probe_input(inputs, x)
    if replaced := [name for name, own in iterate_tensors(module) if own is not before.get(name)]:
        yield Finding(
            f"in training mode the network puts another tensor in the place of {_format_some(replaced)}",
            "write into it instead, as in self.mean.copy_(...)",
            stops=True,
        )
        return
    weights = network.weights.clone()
    if (reason := _probe_steps(network, samples)) is not None:
        yield reason
    elif torch.equal(weights, network.weights):
        yield Finding("a step of training changes no weight", "let the output depend on the weights", stops=True)
    elif hidden := [place for place, value in collect_constants(module).items() if _learns_unseen(value)]:
        yield _make_unregistered_finding(
            f"no order trains {_format_some(hidden)}, since no state dict has it, though a gradient reaches it"
        )
    elif _differs_from(untrained, network, start, x):
        changed = [
            place for place, value in collect_constants(module).items() if kept.get(place) != compute_digest(value)
        ]
        yield _make_unregistered_finding(
            f"training changes {_format_some(changed) or 'something'}, which no state dict has"
        )
    elif (reason := _probe_steps(network, Samples(samples.x[:1], samples.y[:1]))) is not None:
        yield Finding(
            f"a device with one sample only cannot train ({reason.what})",
            "give each device at least two samples, or normalise without the batch: GroupNorm, LayerNorm",
        )


def _differs_from(module: nn.Module, network: Network, model: Model, x: Tensor) -> bool:
    """Return whether `network`, with the weights of `model`, answers otherwise than `module`, which has them."""
    network.load(model)
    return _differs(*(torch.from_numpy(_evaluate(each, x)) for each in (module, network.module)))


def _probe_steps(network: Network, samples: Samples) -> Finding | None:
    """Return what is wrong after two steps on these samples; None if nothing is."""
    sgd = Sgd(batch_size=len(samples.y), learning_rate=RATE, momentum=0.0)
    try:
        Trainer(network, samples.x, samples.y, sgd, np.random.default_rng(0)).run(2)
    except FedgeError:  # it says what to do
        raise
    except FAILURES as error:
        return _make_failure_finding(error)
    if bool(network.weights.isfinite().all()):
        return None
    what = "after a step of training weights are NaN or infinite"
    do = "look for numbers that are too large, and for a root, a logarithm or a deviation with no gradient at 0"
    return Finding(what, do, stops=True)


def _make_failure_finding(error: BaseException) -> Finding:
    text = str(error)
    if "does not require grad" in text:
        what = "training fails, since no gradient reaches a weight"
        do = "leave out detach(), no_grad() and argmax() between the weights and the output"
    elif "modified by an inplace operation" in text:
        what = "training fails, since a value that its gradient needs is changed in place"
        do = "write y = y * 2 instead of y *= 2, y.mul_(2) or y[:, 0] = ..., and relu(y) instead of y.relu_()"
    elif "backward through the graph a second time" in text:
        what = "training fails at the second batch, since the network keeps a value of the first"
        do = "keep none, or only its detach()"
    else:
        what, do = (
            f"training fails ({describe_error(error)})",
            "let it pass forward, cross-entropy and backward in torch first",
        )
    return Finding(what, do, stops=True)


def _learns_unseen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.grad is not None


def _make_unregistered_finding(what: str) -> Finding:
    return Finding(
        what,
        "let torch know it: layers in torch.nn.ModuleList or ModuleDict, weights as torch.nn.Parameter, other tensors "
        "by register_buffer, persistent",
        stops=True,
    )


def probe_rebuild(module: nn.Module, network: Network, x: Tensor, layout: Layout) -> Iterator[Finding]:
    """Probe whether two builds with other random numbers are the same network with equal weights."""
    try:
        answers_differ = _differs_from(module, network, dump_model(module, layout), x)
    except ProtocolError:
        yield Finding(
            "each build of the network has other tensors",
            "build it without random sizes: every machine builds it for itself",
            stops=True,
        )
        return
    if not answers_differ:
        return
    one, two = collect_constants(module), collect_constants(network.module)
    other = [place for place in one | two if compute_digest(one.get(place)) != compute_digest(two.get(place))]
    tensors = [place for place in other if isinstance(one.get(place), Tensor | np.ndarray)]
    what = "each build of the network answers differently with the same weights"
    yield _make_unregistered_finding(
        f"{what}, since no state dict has {_format_some(tensors or other) or 'all that it computes with'}"
    )


def _probe_input(inputs: Tensor, x: Tensor) -> Iterator[Finding]:
    if not torch.equal(inputs, x):
        yield Finding(
            "the network changes its input in place, so a device would ask about other samples than it has",
            "write x = x - 0.1 instead of x -= 0.1 or x.sub_(0.1), and relu(x) instead of x.relu_()",
            stops=True,
        )


def _copy_state(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (own, own.detach().clone()) for name, own in iterate_tensors(module)}


def _find_changed(before: dict[str, tuple[Tensor, Tensor]], module: nn.Module) -> list[str]:
    """Return the tensors of a network's state that were replaced, or hold other numbers now."""
    now = dict(iterate_tensors(module))
    return [name for name, (own, copy) in before.items() if now.get(name) is not own or not torch.equal(own, copy)]


def _get_generators() -> object:
    """Return the state of all generators from which a network may draw random numbers."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002


def _evaluate(module: nn.Module, x: Tensor) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = module(x.clone()).numpy()
    return found


def _differs(one: Tensor, two: Tensor) -> bool:
    return not torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def _format_some(places: Sequence[str]) -> str:
    return ", ".join(places[:_NAMED]) + f" and {len(places) - _NAMED} more" * (len(places) > _NAMED)


class _ScalarRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of the user's lines that turn a tensor's value into a Python number or condition."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:  # noqa: SLF001 - what item, bool and float call
            frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - to tell the user's line
            while frame is not None:
                if place := find_user_line(frame, frame.f_lineno):
                    self.lines[place] = None
                    break
                frame = frame.f_back
        return func(*args, **(kwargs or {}))


def find_decisions(module: nn.Module, x: Tensor) -> list[str]:
    """Find the user's lines at which the network turns values into Python numbers, which no graph can hold."""
    with _ScalarRecorder() as seen, torch.no_grad():
        module(x.clone())
    return list(seen.lines)


def iterate_variations(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Iterate over variations of the inputs at which a condition on values may go another way."""
    for inputs in (-x, torch.zeros_like(x), 100 * x, -100 * x):
        try:
            if np.isfinite(_evaluate(module, inputs)).all():
                yield inputs
        except FAILURES:  # such as numbers of tokens that do not exist
            continue
