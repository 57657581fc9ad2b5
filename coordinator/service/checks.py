"""Finds problems before the first round, in seconds, with only the network and a few samples.

`examine` needs torch. The coordinator runs it in the short-lived child that makes the first model (`first_model`).
"""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coordinator.fleet.simulated.devices import CLASSES
from coordinator.methods.catalogue import method_class
from coordinator.methods.option_values import options_of
from coordinator.methods.settings import Option
from coordinator.service.findings import Finding, Samples
from fedge.bundle.manifest import slot
from fedge.commands.doctor import AGENT_GB
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, FedgeError, failing_as
from fedge.system import child
from fedge.system.loading import FAILURES, reason_of
from fedge.tensors.layout import Layout, Model, to_bytes, unflatten

if TYPE_CHECKING:
    import torch

    from fedge.tasks import Pool

log = logging.getLogger("fedge.coordinator")

N_SAMPLES: Final = 16
COPIES: Final = 16
"""Of a model's weights at the peak of an order of `fedge`: those that came, private ones, gradient, momentum, ...

Measured on x86-64 with MNIST: peaks of 0.57 GB for mobilenet-v3-small, where this says 0.50, and 1.19 GB for resnet-18,
where it says 1.19.
"""
BATCH: Final = 32


def a_few(each: Iterable[tuple[NDArray[Any], NDArray[np.int64]]]) -> Samples | None:
    """At most 16 of all samples (n, ...) and labels (n,), from first to last; None: there are none."""
    some = [(x[chosen], y[chosen]) for x, y in each if len(chosen := _spread(len(y)))]
    if not some:
        return None
    x, y = (np.concatenate(arrays) for arrays in zip(*some, strict=True))
    return Samples(x[chosen := _spread(len(y))], y[chosen])


def _spread(n: int) -> NDArray[np.int64]:
    """At most 16 of n places."""
    return np.unique(np.linspace(0, n - 1, N_SAMPLES).astype(np.int64)) if n else np.zeros(0, np.int64)


def samples_of(name: str, task: TaskSpec, data: Path | None) -> Samples | None:
    """A few of the samples that describe a task, by its name; None: there are none."""
    from fedge.tasks import device_data, pool

    if data is None and name != "digits":
        return None
    try:
        if name.endswith(".json") and data is not None:
            return a_few([device_data(task, data, seed=0).labelled])
        return few_of(pool(name, data, limit=N_SAMPLES if name == "image-folder" else None), task)
    except ConfigError:  # for a task of one's own they need not be the samples of a device
        return None


def few_of(read: Pool, task: TaskSpec) -> Samples | None:
    """A few of all samples of a task, as model inputs (a class of the user's reads such); None: there are none."""
    from fedge.data.preprocessing import apply

    few = a_few([(read.x, read.y)])
    return few and Samples(apply(read.spec if ":" in task.name else task, few.x), few.y)


def made_up(task: TaskSpec) -> Samples:
    """Inputs for a task without samples: numbers in [0, 1), which are also valid as numbers of tokens."""
    x = np.random.default_rng(0).random((N_SAMPLES, *task.input_shape), np.float32)
    return Samples(x, np.arange(N_SAMPLES) % task.n_classes)


class Examined(Struct, frozen=True, kw_only=True):
    """A task's network: its trained weights, its size if it travels whole, and the memory that a device needs."""

    parameters: int
    size_bytes: int
    ram_gb: float
    findings: tuple[Finding, ...]


def examine(
    task: TaskSpec,
    layout: Layout,
    without_profile: str = "",
    devices_gb: float | None = None,
    samples: Samples | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Examined:
    """Try out the task's network, as a device would use it.

    Args:
        task: what is learned; its network was built once (`fedge.models.build.initial`), which finds wrong input
        shapes.
        layout: of the network.
        without_profile: effect on the method if the network has no ReLU; empty: it needs none.
        devices_gb: memory that is free on the devices; None: they may be any board in
        `coordinator.fleet.simulated.devices`.
        samples: a few of the task's; None: it has none here, and the inputs are made up.
        tell: called with what is tried next.

    Raises:
        ConfigError: as `fedge.models.build.build`.
    """
    import torch

    from fedge.models.build import build
    from fedge.models.training import seeded

    samples = samples or made_up(task)
    x = torch.from_numpy(samples.x)
    found, numbers = [], 0
    tell("build the network, and ask it about a few samples")
    with seeded(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of it is found
        module = build(task).eval()
        try:
            found = _behaviour(task, layout, module, samples, tell)
            if not _stop(found):
                numbers = _numbers(module, x)
                found += _profile(module, x, without_profile)
        except FedgeError:
            raise
        except FAILURES as error:
            do = "let it answer and learn in an ordinary loop of torch first, with torch.no_grad() and without"
            found = [Finding(f"the network fails while it is tried ({reason_of(error)})", do, stops=True)]
    if not _stop(found):
        tell("export the network to ONNX, which takes a minute or more with a large one")
        found += _graph(task, layout, module, x)
    ram_gb = AGENT_GB + 4 * (COPIES * sum(t.numel() for t in module.state_dict().values()) + 3 * BATCH * numbers) / 1e9
    return Examined(
        parameters=layout.n_params,
        size_bytes=4 * sum(math.prod(info.shape) for info in layout.tensors),
        ram_gb=round(ram_gb, 2),
        findings=(*dict.fromkeys(found), *_memory(ram_gb, devices_gb)),
    )


def _behaviour(
    task: TaskSpec, layout: Layout, module: torch.nn.Module, samples: Samples, tell: Callable[[str], None]
) -> list[Finding]:
    """What the network does wrong before it is exported."""
    import torch

    from coordinator.service import probes
    from fedge.models.training import Network

    if not layout.n_params:
        return [
            Finding("the network has no weight that learns", "give it layers with trainable parameters", stops=True)
        ]
    x = torch.from_numpy(samples.x)
    found = [*probes.outputs(module, x, task)] or [*probes.answers(module, x)]
    if _stop(found):
        return found
    tell("train the network on these samples")
    torch.manual_seed(2)
    network = Network(task)
    found += probes.built_again(module, network, x, layout)
    return found if _stop(found) else [*found, *probes.training(network, samples, module)]


def _stop(found: Iterable[Finding]) -> bool:
    return any(finding.stops for finding in found)


def _numbers(module: torch.nn.Module, x: torch.Tensor) -> int:
    """The number of values that the layers output for one sample."""
    import torch

    from fedge.models.network import listening

    seen: list[int] = []
    leaves = [layer for layer in module.modules() if not [*layer.children()]]
    with listening(leaves, lambda _, __, y: seen.append(getattr(y, "numel", int)())), torch.inference_mode():
        module(x)
    return sum(seen) // len(x)


def _profile(module: torch.nn.Module, x: torch.Tensor, without_profile: str) -> list[Finding]:
    if not without_profile:
        return []
    from edge_agent.learning.profile import sparsity_profile

    try:
        sparsity_profile(module, x.numpy())
    except (ConfigError, ValueError) as error:
        return [Finding(f"devices cannot be told apart by a ReLU profile ({error})", without_profile)]
    return []


def _graph(task: TaskSpec, layout: Layout, module: torch.nn.Module, x: torch.Tensor) -> list[Finding]:
    """Check that the exported graph agrees with torch, for one sample and for several."""
    import torch

    from coordinator.service import probes
    from export.graph import single
    from export.parity import difference, leaning, run
    from fedge.models.network import dump

    part, lines = to_bytes(unflatten(dump(module, layout), layout)), probes.decisions(module, x)
    do = "leave out what ONNX has no operator for, and what decides by the values of its input"
    if lines:
        do = f"decide nothing by values, as {' and '.join(lines)} does: use torch.where(...) and the like"
    try:
        graph = single(task, part)
    except ConfigError as error:
        return [Finding(str(error), do, stops=True)]
    with tempfile.TemporaryDirectory(prefix="fedge-check-") as folder, torch.inference_mode():
        (Path(folder) / slot(0)).write_bytes(part)
        for inputs in (x, x[:1], *(probes.variations(module, x) if lines else ())):

            def by_torch(lean: float, inputs: torch.Tensor = inputs) -> NDArray[np.floating]:
                with leaning(module, lean):
                    return np.asarray(module(inputs.clone()))

            logits = by_torch(0)
            try:
                found = run(graph, Path(folder), inputs.numpy())[0]
                what = f"turns {len(inputs)} samples into numbers of the shape {found.shape}"
            except Exception as error:  # noqa: BLE001 - ONNX Runtime's own are no other
                found, what = np.zeros(0, np.float32), f"does not take {len(inputs)} samples ({reason_of(error)})"
            if found.shape != logits.shape:
                do = "take the batch size from x.shape[0]: len(x) and a number written out are constants in the graph"
                return [Finding(f"exported to ONNX the network {what}", do, stops=True)]
            if not (largest := difference(found, by_torch)) <= probes.tolerance(logits):
                what = f"exported to ONNX the network gives other numbers, by up to {largest:.3g}"
                return [Finding(what, do, stops=True)]
    return []


def _memory(ram_gb: float, devices_gb: float | None) -> list[Finding]:
    free = {board.name: board.free_ram_gb or 0.0 for board in CLASSES}
    if devices_gb is not None:
        free = {"the devices": devices_gb}
    small = [f"{name} ({gb:g} GB free)" for name, gb in free.items() if gb < ram_gb]
    if not small:
        return []
    do = "take a smaller network, train a part of it (--adapt lora), or let these only predict"
    return [Finding(f"training takes about {ram_gb:.2f} GB of memory, too much for {', '.join(small)}", do)]


def without_profile(method: str, options: Mapping[str, Option]) -> str:
    """Effect on a method if the network has no ReLU for a profile; empty: it needs none."""
    chosen, _ = options_of(kind := method_class(method), options)
    return kind.without_profile(chosen)


def first_model(
    task: TaskSpec, seed: int, without_profile: str = "", name: str = "", data: Path | None = None
) -> tuple[Layout, Model]:
    """Layout and first weights of the task's network, equal to `fedge.models.build.initial`, made in a child process.

    Logs what is tried, and what users should know about the network before the first round. `name`, `data`: by which
    the task was described, and whose samples are tried (`samples_of`).

    Raises:
        ConfigError: the network cannot be built, or a run would be useless; the text says why.
    """
    with failing_as(ConfigError, f"the network of task {task.name} cannot be built", on=ConfigError):
        begun = child.call(
            *("coordinator.service.checks:_begin", task, seed, without_profile, name, data),
            returns=tuple[Layout, Model, Examined],
        )
    layout, model, examined = begun
    require_sound(examined.findings)
    log.info("event=network parameters=%d bytes=%d ram_gb=%.2f", layout.n_params, examined.size_bytes, examined.ram_gb)
    for finding in examined.findings:
        log.warning("event=check detail=%r", str(finding))
    return layout, model


def _begin(
    task: TaskSpec, seed: int, without_profile: str, name: str, data: Path | None
) -> tuple[Layout, Model, Examined]:
    from fedge.models.build import initial

    layout, model = initial(task, seed)

    def tell(step: str) -> None:
        log.info("event=checking step=%r", step)

    return layout, model, examine(task, layout, without_profile, None, samples_of(name, task, data), tell)


def require_sound(findings: tuple[Finding, ...]) -> None:
    """Refuse a run that would be useless.

    Raises:
        ConfigError: it would be; all reasons.
    """
    if stops := [str(finding) for finding in findings if finding.stops]:
        raise ConfigError("; ".join(stops))
