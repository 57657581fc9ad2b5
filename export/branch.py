"""One network as an ONNX graph with named weights; torch exports each architecture once.

The exporter sees random weights. Anything computed from weights (such as a folded BatchNorm) would be wrong for every
other model of the architecture. So the graph is simplified with its weights as inputs, and accepted only if each weight
equals a tensor of the network bit for bit. Everything else must be simplified, because ONNX Runtime folds BatchNorm and
gives convolutions their fast layout at load time only if weights and biases are plain constants.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fedge.data.task import INPUT, LOGITS, TaskSpec
from fedge.errors import ConfigError, StoreError
from fedge.system.files import get_cache_folder, write_atomically
from fedge.system.loading import describe_error

if TYPE_CHECKING:
    import onnx
    import torch

OPSET: Final = 20
IR_VERSION: Final = 9
_FORMAT: Final = 2
"""Version of cached graphs; increase it when a change here makes the graphs cached on disk useless."""
_SILENT: Final = threading.Lock()
"""Held while the terminal is silenced."""
_TERMINAL: Final = (1, 2)
"""File descriptors of standard output and standard error."""

_known: dict[str, bytes] = {}


def export_branch(task: TaskSpec) -> onnx.ModelProto:
    """Return the task's network as ONNX: input x (n, *input_shape) float32, logits (n, C), weights by name only.

    The graph comes from memory, else from the cache folder (`get_cache_folder`), else from torch. If several processes
    need the same graph, one exports it and the others wait.

    Raises:
        ConfigError: the network cannot be expressed in ONNX.
    """
    import onnx

    from fedge.models.build import make_network

    module = make_network(task).eval()
    key = _compute_key(task, module)
    if key not in _known:
        with _lock_cache_file(key) as file:
            data = _read(file)
            if data is None:
                data = _export(task, module).SerializeToString(deterministic=True)
                with suppress(StoreError):  # an unwritable cache only costs time
                    write_atomically(file, data)
        _known[key] = data
    return onnx.load_from_string(_known[key])


def _compute_key(task: TaskSpec, module: torch.nn.Module) -> str:
    """Hash all that the graph depends on: the task, the layers, their code and constants, the exporter's versions."""
    import onnx
    import torch

    from fedge.models.constants import collect_constants, compute_digest

    own = {type(m) for m in module.modules() if not type(m).__module__.startswith("torch.")}
    sources = sorted(_read_source(kind) for kind in own)
    # values computed from weights (by torch's older weight_norm) are left out, since other weights give other values
    held = {
        place: compute_digest(v)
        for place, v in collect_constants(module).items()
        if getattr(v, "grad_fn", None) is None
    }
    architecture = [task.model, task.model_options, task.input_shape, task.n_classes, repr(module), sources, held]
    versions = [_FORMAT, OPSET, str(torch.__version__), onnx.__version__]
    return hashlib.sha256(msgspec.json.encode([architecture, versions], order="deterministic")).hexdigest()


def _read_source(kind: type) -> str:
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):  # defined in a shell
        return f"{kind.__module__}.{kind.__qualname__} {os.getpid()}"


@contextmanager
def _lock_cache_file(key: str) -> Iterator[Path]:
    """Lock a graph's cache file against other processes, if the folder is writable."""
    folder = get_cache_folder("graphs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{key}.lock").open("w")
    except OSError:
        yield folder / f"{key}.onnx"
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / f"{key}.onnx"


def _read(file: Path) -> bytes | None:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        data = file.read_bytes()
        onnx.load_from_string(data)
    except (OSError, DecodeError):
        return None
    return data


def _export(task: TaskSpec, module: torch.nn.Module) -> onnx.ModelProto:
    import torch

    from fedge.models.network import find_aliases

    tensors, other_names = _randomise(module), find_aliases(module)
    sample = torch.zeros(2, *task.input_shape)
    faults = []
    for attempt in (_dynamo, _torchscript):
        try:
            with warnings.catch_warnings(), _silence():
                warnings.simplefilter("ignore")  # the exporter's warnings about itself
                model = attempt(module, sample)
            return _merge_names(_strip_weights(model, tensors), other_names)
        except Exception as error:  # noqa: BLE001 exporters raise anything; the next one may do better
            faults.append(f"{attempt.__name__.strip('_')}: {describe_error(_find_cause(error))}")
    raise ConfigError(f"the network of task {task.name} cannot be exported to ONNX ({'; '.join(faults)})")


def _find_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain, since the exporter's own error says only which part failed."""
    return error if error.__cause__ is None else _find_cause(error.__cause__)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the terminal inside the `with` block, since a failing exporter prints pages, past Python's own streams.

    The streams belong to the whole process, so only one thread exports at a time.
    """
    with _SILENT, Path(os.devnull).open("w") as void:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(number) for number in _TERMINAL]
        try:
            for number in _TERMINAL:
                os.dup2(void.fileno(), number)
            with redirect_stdout(void), redirect_stderr(void):
                yield
        finally:
            for number, before in zip(_TERMINAL, kept, strict=True):
                os.dup2(before, number)
                os.close(before)


def _dynamo(module: torch.nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    import torch

    program = torch.onnx.export(
        module,
        (sample,),
        dynamo=True,
        optimize=False,
        opset_version=OPSET,
        verbose=False,
        external_data=False,
        input_names=[INPUT],
        output_names=[LOGITS],
        dynamic_shapes=({0: torch.export.Dim("n")},),
    )
    assert program is not None
    return _simplify(program.model_proto, set(module.state_dict()))


def _simplify(model: onnx.ModelProto, weights: set[str]) -> onnx.ModelProto:
    """Replace whatever can be computed without the weights by constants; `weights` are the names of the weights."""
    import onnx
    from onnxscript import optimizer

    held = [i for i in model.graph.initializer if i.name in weights]
    others = [i for i in model.graph.initializer if i.name not in weights]
    del model.graph.initializer[:]
    model.graph.initializer.extend(others)
    model.graph.input.extend(onnx.helper.make_tensor_value_info(i.name, i.data_type, i.dims) for i in held)
    simple: onnx.ModelProto = optimizer.optimize(model)
    simple.graph.initializer.extend(held)
    return simple


def _torchscript(module: torch.nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    """Export with torch's older exporter, without onnxscript; PRESERVE keeps BatchNorm unfolded."""
    import onnx
    import torch

    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        (sample,),
        buffer,  # type: ignore[arg-type]
        dynamo=False,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        opset_version=OPSET,
        input_names=[INPUT],
        output_names=[LOGITS],
        dynamic_axes={INPUT: {0: "n"}, LOGITS: {0: "n"}},
    )
    return onnx.load_from_string(buffer.getvalue())


def _randomise(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Give every float tensor of the network distinct values, and return them by name."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors = dict(module.state_dict(keep_vars=True))
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.5 + 0.5)  # variances stay positive
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items() if tensor.is_floating_point()}


def _strip_weights(model: onnx.ModelProto, tensors: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Take the weights out of the graph, along with traces of the exporting machine (paths, stack traces)."""
    import onnx
    from onnx import numpy_helper

    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    used = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer if i.name in tensors}
    changed = [name for name, value in used.items() if not np.array_equal(value, tensors[name])]
    if changed:
        raise ValueError(f"the exporter folded {changed}")
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]]
    clean = onnx.helper.make_graph(
        [_strip_node(node) for node in model.graph.node],
        "branch",
        [onnx.helper.make_tensor_value_info(INPUT, onnx.TensorProto.FLOAT, ["n", *shape])],
        [onnx.helper.make_tensor_value_info(LOGITS, onnx.TensorProto.FLOAT, None)],
        [
            _make_weight(i) if i.name in tensors else numpy_helper.from_array(numpy_helper.to_array(i), i.name)
            for i in model.graph.initializer
        ],
    )
    return onnx.helper.make_model(clean, opset_imports=list(model.opset_import), ir_version=IR_VERSION)


def _merge_names(model: onnx.ModelProto, other_names: Mapping[str, str]) -> onnx.ModelProto:
    """Rename each tensor that has several names to the one name that the model's layout uses."""
    used = [i for i in model.graph.initializer if i.name in other_names]
    there = {i.name for i in model.graph.initializer}
    for initializer in used:
        name = other_names[initializer.name]
        if name in there:
            model.graph.initializer.remove(initializer)
        initializer.name = name
        there.add(name)
    _rename(model.graph, other_names)
    return model


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, names)


def _strip_node(node: onnx.NodeProto) -> onnx.NodeProto:
    import onnx

    node.ClearField("metadata_props")
    node.ClearField("doc_string")
    for attribute in node.attribute:
        if attribute.type in {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}:
            for graph in (attribute.g, *attribute.graphs):
                graph.ClearField("value_info")
                for inner in graph.node:
                    _strip_node(inner)
    return node


def _make_weight(initializer: onnx.TensorProto) -> onnx.TensorProto:
    """Return the tensor's name, type and shape, marked as stored elsewhere."""
    import onnx

    return onnx.TensorProto(
        name=initializer.name,
        data_type=initializer.data_type,
        dims=initializer.dims,
        data_location=onnx.TensorProto.EXTERNAL,
    )
