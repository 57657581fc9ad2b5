"""Finds problems before the first round, in seconds, with only the network and a few samples.

`examine` needs torch. The coordinator runs it in the short-lived child that makes the first model (`make_first_model`).
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
from coordinator.methods.catalogue import load_method_class
from coordinator.methods.option_values import parse_options
from coordinator.methods.settings import Option
from coordinator.service.findings import Finding, Samples
from fedge.bundle.manifest import format_slot
from fedge.commands.doctor import AGENT_GB
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, FedgeError, raise_as
from fedge.system import child
from fedge.system.loading import FAILURES, describe_error
from fedge.tensors.layout import Layout, Model, to_bytes, unflatten

if TYPE_CHECKING:
    import torch

    from fedge.tasks import Pool

log = logging.getLogger("fedge.coordinator")

N_SAMPLES: Final = 16
COPIES: Final = 16
"""Copies of a model's weights in memory at the peak of an order of `fedge`: received, private, gradient, momentum, ...

Measured on x86-64 with MNIST: a peak of 0.57 GB for mobilenet-v3-small, against 0.50 by this number, and of 1.19 GB for
resnet-18, against 1.19.
"""
BATCH: Final = 32


def select_few(each: Iterable[tuple[NDArray[Any], NDArray[np.int64]]]) -> Samples | None:
    """Select at most 16 of all samples (n, ...) and labels (n,), from first to last; None if there are none."""
    some = [(x[chosen], y[chosen]) for x, y in each if len(chosen := _spread_places(len(y)))]
    if not some:
        return None
    x, y = (np.concatenate(arrays) for arrays in zip(*some, strict=True))
    return Samples(x[chosen := _spread_places(len(y))], y[chosen])


def _spread_places(n: int) -> NDArray[np.int64]:
    """Return at most 16 of n positions, evenly spread."""
    return np.unique(np.linspace(0, n - 1, N_SAMPLES).astype(np.int64)) if n else np.zeros(0, np.int64)


def read_few(name: str, task: TaskSpec, data: Path | None) -> Samples | None:
    """Read a few of the samples that describe a task, by its name; None if there are none."""
    from fedge.tasks import load_pool, read_device_data

    if data is None and name != "digits":
        return None
    try:
        if name.endswith(".json") and data is not None:
            return select_few([read_device_data(task, data, seed=0).labelled])
        limit = N_SAMPLES if name == "image-folder" else None
        return prepare_few(load_pool(name, data, problem=task.problem.request, limit=limit), task)
    except ConfigError:  # the samples of a user's own task need not be those of a device
        return None


def prepare_few(read: Pool, task: TaskSpec) -> Samples | None:
    """Return a few of a task's samples as model inputs, which a user's class gives directly; None without any."""
    from fedge.data.preprocessing import preprocess

    few = select_few([(read.x, read.y)])
    if few is None:
        return None
    y = task.problem.convert_targets(few.y, len(few.y), task.input_shape, "y")
    return Samples(preprocess(read.spec if ":" in task.name else task, few.x), y)


def make_samples(task: TaskSpec) -> Samples:
    """Make inputs for a task without samples, numbers in [0, 1), which are also valid as numbers of tokens."""
    x = np.random.default_rng(0).random((N_SAMPLES, *task.input_shape), np.float32)
    return Samples(x, task.problem.make_targets(N_SAMPLES, task.input_shape))


class Examination(Struct, frozen=True, kw_only=True):
    """The examination of a task's network: trained weights, size in transfer, memory that a device needs, findings."""

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
) -> Examination:
    """Try out the task's network, as a device would use it.

    Args:
        task: the task; its network was built once (`fedge.models.build.make_initial_model`), which finds wrong input
            shapes.
        layout: the layout of the network.
        without_profile: effect on the method if the network has no ReLU; empty if the method needs none.
        devices_gb: free memory of the devices, in GB; if None, they may be any board in
            `coordinator.fleet.simulated.devices`.
        samples: a few of the task's samples; if None, the inputs are made up.
        tell: called with the check that begins next.

    Raises:
        ConfigError: as in `fedge.models.build.make_network`.
    """
    import torch

    from fedge.models.build import make_network
    from fedge.models.training import seed_torch

    samples = samples or make_samples(task)
    x = torch.from_numpy(samples.x)
    found, numbers = [], 0
    tell("build the network, and ask it about a few samples")
    with seed_torch(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks below find what matters
        module = make_network(task).eval()
        try:
            found = _examine_behaviour(task, layout, module, samples, tell)
            if not _has_stopping(found):
                numbers = _count_values(module, x)
                found += _examine_profile(module, x, without_profile)
        except FedgeError:
            raise
        except FAILURES as error:
            do = "let it answer and learn in an ordinary loop of torch first, with torch.no_grad() and without"
            found = [Finding(f"the network fails while it is tried ({describe_error(error)})", do, stops=True)]
    if not _has_stopping(found):
        tell("export the network to ONNX, which takes a minute or more with a large one")
        found += _examine_graph(task, layout, module, x)
    ram_gb = AGENT_GB + 4 * (COPIES * sum(t.numel() for t in module.state_dict().values()) + 3 * BATCH * numbers) / 1e9
    return Examination(
        parameters=layout.n_params,
        size_bytes=4 * sum(math.prod(info.shape) for info in layout.tensors),
        ram_gb=round(ram_gb, 2),
        findings=(*dict.fromkeys(found), *_examine_memory(ram_gb, devices_gb)),
    )


def _examine_behaviour(
    task: TaskSpec, layout: Layout, module: torch.nn.Module, samples: Samples, tell: Callable[[str], None]
) -> list[Finding]:
    """Find what the network does wrong before it is exported."""
    import torch

    from coordinator.service import probes
    from fedge.models.training import Network

    if not layout.n_params:
        return [
            Finding("the network has no weight that learns", "give it layers with trainable parameters", stops=True)
        ]
    x = torch.from_numpy(samples.x)
    found = [*probes.probe_outputs(module, x, task)] or [*probes.probe_answers(module, x)]
    if _has_stopping(found):
        return found
    tell("train the network on these samples")
    torch.manual_seed(2)
    network = Network(task)
    found += probes.probe_rebuild(module, network, x, layout)
    return found if _has_stopping(found) else [*found, *probes.probe_training(network, samples, module)]


def _has_stopping(found: Iterable[Finding]) -> bool:
    return any(finding.stops for finding in found)


def _count_values(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Count the values that the layers output for one sample."""
    import torch

    from fedge.models.network import listen_to_layers

    seen: list[int] = []
    leaves = [layer for layer in module.modules() if not [*layer.children()]]
    with listen_to_layers(leaves, lambda _, __, y: seen.append(getattr(y, "numel", int)())), torch.inference_mode():
        module(x)
    return sum(seen) // len(x)


def _examine_profile(module: torch.nn.Module, x: torch.Tensor, without_profile: str) -> list[Finding]:
    if not without_profile:
        return []
    from edge_agent.learning.profile import measure_sparsity

    try:
        measure_sparsity(module, x.numpy())
    except (ConfigError, ValueError) as error:
        return [Finding(f"devices cannot be told apart by a ReLU profile ({error})", without_profile)]
    return []


def _examine_graph(task: TaskSpec, layout: Layout, module: torch.nn.Module, x: torch.Tensor) -> list[Finding]:
    """Check that the exported graph agrees with torch, for one sample and for several."""
    import torch

    from coordinator.service import probes
    from export.graph import encode_branch
    from export.parity import compute_difference, favour_routes, run_graph
    from fedge.models.network import dump_model

    part, lines = to_bytes(unflatten(dump_model(module, layout), layout)), probes.find_decisions(module, x)
    do = "leave out what ONNX has no operator for, and what decides by the values of its input"
    if lines:
        do = f"decide nothing by values, as {' and '.join(lines)} does: use torch.where(...) and the like"
    try:
        graph = encode_branch(task, part)
    except ConfigError as error:
        return [Finding(str(error), do, stops=True)]
    with tempfile.TemporaryDirectory(prefix="fedge-check-") as folder, torch.inference_mode():
        (Path(folder) / format_slot(0)).write_bytes(part)
        for inputs in (x, x[:1], *(probes.iterate_variations(module, x) if lines else ())):

            def run_torch(lean: float, inputs: torch.Tensor = inputs) -> NDArray[np.floating]:
                with favour_routes(module, lean):
                    return np.asarray(module(inputs.clone()))

            logits = run_torch(0)
            try:
                found = run_graph(graph, Path(folder), inputs.numpy())[0]
                what = f"turns {len(inputs)} samples into numbers of the shape {found.shape}"
            except Exception as error:  # noqa: BLE001 - ONNX Runtime's own are no other
                found, what = np.zeros(0, np.float32), f"does not take {len(inputs)} samples ({describe_error(error)})"
            if found.shape != logits.shape:
                do = "take the batch size from x.shape[0]: len(x) and a number written out are constants in the graph"
                return [Finding(f"exported to ONNX the network {what}", do, stops=True)]
            if not (largest := compute_difference(found, run_torch)) <= probes.compute_tolerance(logits):
                what = f"exported to ONNX the network gives other numbers, by up to {largest:.3g}"
                return [Finding(what, do, stops=True)]
    return []


def _examine_memory(ram_gb: float, devices_gb: float | None) -> list[Finding]:
    free = {board.name: board.free_ram_gb or 0.0 for board in CLASSES}
    if devices_gb is not None:
        free = {"the devices": devices_gb}
    small = [f"{name} ({gb:g} GB free)" for name, gb in free.items() if gb < ram_gb]
    if not small:
        return []
    do = "take a smaller network, train a part of it (--adapt lora), or let these only predict"
    return [Finding(f"training takes about {ram_gb:.2f} GB of memory, too much for {', '.join(small)}", do)]


def explain_no_profile(method: str, options: Mapping[str, Option]) -> str:
    """Explain the effect on a method if the network has no ReLU for a profile; empty if the method needs none."""
    chosen, _ = parse_options(kind := load_method_class(method), options)
    return kind.without_profile(chosen)


def make_first_model(
    task: TaskSpec, seed: int, without_profile: str = "", name: str = "", data: Path | None = None
) -> tuple[Layout, Model]:
    """Make the layout and first weights of `fedge.models.build.make_initial_model`, in a child process.

    The checks and their findings, which users should know before the first round, are logged. `name`, `data`: the
    task's description, whose samples are tried (`read_few`).

    Raises:
        ConfigError: the network cannot be built, or a run would be useless; the text says why.
    """
    with raise_as(ConfigError, f"the network of task {task.name} cannot be built", on=ConfigError):
        begun = child.call_once(
            *("coordinator.service.checks:_make_first_model", task, seed, without_profile, name, data),
            returns=tuple[Layout, Model, Examination],
        )
    layout, model, examined = begun
    require_sound(examined.findings)
    log.info("event=network parameters=%d bytes=%d ram_gb=%.2f", layout.n_params, examined.size_bytes, examined.ram_gb)
    for finding in examined.findings:
        log.warning("event=check detail=%r", str(finding))
    return layout, model


def _make_first_model(
    task: TaskSpec, seed: int, without_profile: str, name: str, data: Path | None
) -> tuple[Layout, Model, Examination]:
    from fedge.models.build import make_initial_model

    layout, model = make_initial_model(task, seed)

    def log_step(step: str) -> None:
        log.info("event=checking step=%r", step)

    return layout, model, examine(task, layout, without_profile, None, read_few(name, task, data), log_step)


def require_sound(findings: tuple[Finding, ...]) -> None:
    """Refuse a run that would be useless.

    Raises:
        ConfigError: the run would be useless; the text has all reasons.
    """
    if stops := [str(finding) for finding in findings if finding.stops]:
        raise ConfigError("; ".join(stops))
