"""A second kind of memory for torch, to find tensors that are not where the others are.

It stands in for a GPU: its tensors are `Elsewhere`, which hold one of the CPU inside. What torch does with them is done
with what they hold, so the numbers are those of the CPU to the last bit; but an operation on tensors of both kinds is
an error, as it is on a GPU, and so is `numpy()`. Its random numbers are those of the CPU's generator.

torch knows one such device for each process, for good, and its threads end badly. Hence a program of its own, which
runs methods on the CPU and on this device: `python -m tests.support.elsewhere METHOD[:OPTION=VALUE...][@MODEL] ...`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree, backend_registration

from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.server.learning import ServerData
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import encode_state
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.data import preprocessing
from fedge.models.training import CPU
from fedge.steps.sgd import Sgd
from fedge.tasks import load_pool
from fedge.tensors.layout import Codec
from tests.support.simulation import Fleet, digits

NAME: Final = "elsewhere"
MOVES: Final = {"aten._to_copy.default", "aten.copy_.default"}
"""From one kind of memory to the other."""
INDEXES: Final = {"aten.index.Tensor"}
"""Positions may be given by the CPU."""


class Elsewhere(torch.Tensor):
    """A tensor on the device; `inner` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        own = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        own.inner = inner
        return own

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Elsewhere) -> None:
        torch.Tensor.data.__set__(self, new)
        self.inner = new.inner

    @classmethod
    def __torch_dispatch__(cls, operation, _, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        tensors = [t for t in _pytree.tree_leaves((arguments, keywords)) if isinstance(t, Tensor)]
        strangers = [t for t in tensors if not isinstance(t, cls) and t.ndim > 0]
        if strangers and str(operation) not in MOVES | INDEXES:
            raise RuntimeError(f"{operation}: a tensor of {strangers[0].device} among those of {NAME}")
        leaves = keywords.get("device") == torch.device("cpu")
        if "device" in keywords:
            keywords["device"] = torch.device("cpu")
        inside, keywords = _pytree.tree_map_only(cls, lambda own: own.inner, (arguments, keywords))
        with torch.inference_mode(False):  # whose tensors know no views
            result = operation(*inside, **keywords)
        if leaves or (str(operation) == "aten.copy_.default" and not isinstance(arguments[0], cls)):
            return result
        before = {id(own.inner): own for own in tensors if isinstance(own, cls)}  # of an operation in place
        with torch.inference_mode(False):
            return _pytree.tree_map_only(
                Tensor, lambda made: before[id(made)] if id(made) in before else cls(made), result
            )


class Device:
    """The module that torch asks about the device."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, _: object = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _: object = 0) -> None:
        torch.set_rng_state(state)


def install() -> tuple[torch.device, torch.library.Library]:
    """Make it known to torch: the device, and what must be kept as long as it is used."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Device())

    def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Elsewhere:
        return Elsewhere(torch.empty(size, dtype=dtype))

    def strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Elsewhere:
        return Elsewhere(torch.empty_strided(size, stride, dtype=dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", strided, "PrivateUse1")
    return torch.device(NAME, 0), library


def trained(text: str, model: str, processor: torch.device, home: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    """A method's last state, and the weights of the model that each device would use in the end."""
    name, *options = text.split(":")
    fleet, layout, first, _ = digits(home, n=3, limit=300, model=model, processor=processor)
    samples = load_pool("digits", seed=1, limit=150)
    server_data = preprocessing.preprocess(fleet.task, samples.x), samples.y
    sgd, own = Sgd(steps=2, batch_size=16, weight_decay=1e-3), dict(option.split("=") for option in options)
    settings = MethodSettings(rounds=2, sgd=sgd, codec=Codec.FLOAT32, down="float32", options=own)
    method = make_method(name, settings, Server(fleet.task, server_data))
    if isinstance(getattr(method, "server_data", None), ServerData):
        method.server_data = ServerData(fleet.task, *server_data, processor)
    state = asyncio.run(run_rounds(method, method.init(layout, first), fleet))
    assert all(worker.network.weights.device == processor for worker in workers(fleet))
    return encode_state(state), {
        w.id: w.make_personal_model(fleet.get(method.get_model(state, w.id), layout)).params for w in workers(fleet)
    }


def workers(fleet: Fleet) -> list[Worker]:
    """Those that train."""
    return [worker for worker in fleet.workers.values() if isinstance(worker, Worker)]


def said(action: Callable[[], object]) -> str:
    """The error that comes of it; nothing if none does."""
    try:
        action()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def main(cases: Sequence[str]) -> None:
    """Print as JSON what is said of misuse, and for each case whether the states are the same bytes and by how much
    the devices' models differ at most.
    """
    torch.set_num_threads(1)
    processor, _kept = install()
    own = torch.ones(2, device=processor)
    report: dict[str, object] = {"mixed": said(lambda: own + torch.ones(2)), "unreadable": said(own.numpy)}
    for case in cases:
        text, _, model = case.partition("@")
        with tempfile.TemporaryDirectory() as home:
            (here, wanted), (there, found) = (
                trained(text, model or "mlp", on, Path(home, on.type)) for on in (CPU, processor)
            )
        apart = max(float(np.abs(wanted[i] - found[i]).max()) for i in wanted)
        report[case] = {"same": here == there, "apart": apart}
    sys.stdout.write(json.dumps(report))
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
