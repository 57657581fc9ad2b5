"""Finds problems before the first round, in seconds, with only the network and a few samples.

`examine` needs torch. The coordinator runs it in the short-lived child that makes the first model (`first_model`).
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coordinator.fleet.devices import CLASSES
from coordinator.methods import Option, method_class, options_of
from fedge import child
from fedge.bundle import slot
from fedge.doctor import AGENT_GB
from fedge.errors import ConfigError, failing_as
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model, to_bytes, unflatten

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fedge.coordinator")

COPIES: Final = 16
"""Of a model's weights at the peak of an order of `fedge`: those that came, private ones, gradient, momentum, ...

Measured on x86-64 with MNIST: peaks of 0.57 GB for mobilenet-v3-small, where this says 0.50, and 1.19 GB for resnet-18,
where it says 1.19.
"""
BATCH: Final = 32
TOLERANCE: Final = 1e-3
"""Of a logit by ONNX Runtime to torch's."""


class Finding(Struct, frozen=True):
    """A problem (`what`) and its remedy (`do`); `stops`: a run would be useless."""

    what: str
    do: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.do}"


class Examined(Struct, frozen=True, kw_only=True):
    """A task's network: its trained weights, its size if it travels whole, and the memory that a device needs."""

    parameters: int
    size_bytes: int
    ram_gb: float
    findings: tuple[Finding, ...]


def examine(task: TaskSpec, layout: Layout, without_profile: str = "", devices_gb: float | None = None) -> Examined:
    """Try out the task's network.

    Args:
        task: what is learned; its network was built once (`fedge.models.initial`), which finds wrong input shapes.
        layout: of the network.
        without_profile: effect on the method if the network has no ReLU; empty: it needs none.
        devices_gb: memory that is free on the devices; None: they may be any board in `coordinator.fleet.devices`.

    Raises:
        ConfigError: as `fedge.models.build`.
    """
    import torch

    from fedge.models import build

    with torch.random.fork_rng(devices=[]):
        module = build(task).eval()
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((16, *task.input_shape), np.float32))
    numbers = _numbers(module, x)
    ram_gb = AGENT_GB + 4 * (COPIES * sum(t.numel() for t in module.state_dict().values()) + 3 * BATCH * numbers) / 1e9
    with torch.inference_mode():
        found = [*_shape(module, x, task), *_profile(module, x, without_profile)]
    found += [] if any(f.stops for f in found) else _graph(task, layout, module, x)
    return Examined(
        parameters=layout.n_params,
        size_bytes=4 * sum(math.prod(info.shape) for info in layout.tensors),
        ram_gb=round(ram_gb, 2),
        findings=(*found, *_memory(ram_gb, devices_gb)),
    )


def _numbers(module: torch.nn.Module, x: torch.Tensor) -> int:
    """The number of values that the layers output for one sample."""
    import torch

    seen: list[int] = []
    leaves = [layer for layer in module.modules() if not [*layer.children()]]
    hooks = [leaf.register_forward_hook(lambda _, __, y: seen.append(getattr(y, "numel", int)())) for leaf in leaves]
    with torch.inference_mode():
        module(x)
    for hook in hooks:
        hook.remove()
    return sum(seen) // len(x)


def _shape(module: torch.nn.Module, x: torch.Tensor, task: TaskSpec) -> list[Finding]:
    shape = tuple(getattr(module(x), "shape", ()))
    if shape == (len(x), task.n_classes):
        return []
    return [
        Finding(
            f"the network turns {len(x)} samples into numbers of the shape {shape}, and there are {task.n_classes} "
            f"classes ({', '.join(task.classes[:8])}{', ...' * (task.n_classes > 8)})",
            f"let it end with torch.nn.Linear(..., task.n_classes), so that the shape is (n, {task.n_classes})",
            stops=True,
        )
    ]


def _profile(module: torch.nn.Module, x: torch.Tensor, without_profile: str) -> list[Finding]:
    if not without_profile:
        return []
    from edge_agent.sparsity import sparsity_profile

    try:
        sparsity_profile(module, x.numpy())
    except ConfigError as error:
        return [Finding(f"devices cannot be told apart by a ReLU profile ({error})", without_profile)]
    return []


def _graph(task: TaskSpec, layout: Layout, module: torch.nn.Module, x: torch.Tensor) -> list[Finding]:
    """Check that the exported graph agrees with torch; it does not if the network branches on its input's values."""
    import torch

    from export.graph import single
    from export.parity import difference, leaning, run
    from fedge.models import dump

    do = "leave out what ONNX has no operator for, and what decides by the values of its input"
    part = to_bytes(unflatten(dump(module, layout), layout))

    def by_torch(lean: float) -> NDArray[np.floating]:
        with leaning(module, lean):
            return np.asarray(module(x))

    try:
        with tempfile.TemporaryDirectory(prefix="fedge-check-") as folder, torch.inference_mode():
            (Path(folder) / slot(0)).write_bytes(part)
            found = run(single(task, part), Path(folder), x.numpy())[0]
            largest = difference(found, by_torch)
    except ConfigError as error:
        return [Finding(str(error), do, stops=True)]
    if largest <= TOLERANCE:
        return []
    return [Finding(f"exported to ONNX the network gives other numbers, by up to {largest:.3g}", do, stops=True)]


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
    if kind.WITHOUT_PROFILE and not getattr(chosen, "buffer", 0):
        return kind.WITHOUT_PROFILE
    if getattr(chosen, "clustering", "labels") in {"labels", "mctc"}:
        return ""
    return "all will share one model: end the hidden layers with torch.nn.ReLU(), or take --option clustering=mctc"


def first_model(task: TaskSpec, seed: int, without_profile: str = "") -> tuple[Layout, Model]:
    """Layout and first weights of the task's network, equal to `fedge.models.initial`, made in a child process.

    Logs what users should know about the network before the first round.

    Raises:
        ConfigError: the network cannot be built, or a run would be useless; the text says why.
    """
    with failing_as(ConfigError, f"the network of task {task.name} cannot be built", on=ConfigError):
        begun = child.call(
            "coordinator.checks:_begin", task, seed, without_profile, returns=tuple[Layout, Model, Examined]
        )
    layout, model, examined = begun
    require_sound(examined.findings)
    log.info("event=network parameters=%d bytes=%d ram_gb=%.2f", layout.n_params, examined.size_bytes, examined.ram_gb)
    for finding in examined.findings:
        log.warning("event=check detail=%r", str(finding))
    return layout, model


def _begin(task: TaskSpec, seed: int, without_profile: str) -> tuple[Layout, Model, Examined]:
    from fedge.models import initial

    layout, model = initial(task, seed)
    return layout, model, examine(task, layout, without_profile)


def require_sound(findings: tuple[Finding, ...]) -> None:
    """Refuse a run that would be useless.

    Raises:
        ConfigError: it would be; all reasons.
    """
    if stops := [str(finding) for finding in findings if finding.stops]:
        raise ConfigError("; ".join(stops))
