"""The Open Inference Protocol: parses requests into samples, and formats predictions as responses. No IO.

Source: Open Inference Protocol 2 (KServe), REST, with Triton's binary tensor data extension: a tensor with the
parameter `binary_data_size` has its elements after the JSON object. They come in the order of the tensors, row by row
and little-endian; a BYTES element is its length in 4 bytes, then its content.

JSON has no NaN: non-finite output values are null in JSON and unchanged in binary.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct
from numpy.typing import NDArray

from deploy.inference.prediction import Prediction
from fedge.bundle.manifest import Manifest
from fedge.data.preprocessing import choose_input_precision, load_image
from fedge.data.problems.results import Result
from fedge.data.scaling import explain_unfit
from fedge.data.task import INPUT, TaskSpec
from fedge.errors import MALFORMED, ConfigError, raise_as

MAX_SAMPLES: Final = 256
"""Most samples in a request; the graph's memory grows with their number."""
MAX_PIXELS: Final = 1 << 24
"""Most pixels of a picture: decoded, it takes up to 150 MB, however few bytes its file has."""
DATATYPES: Final = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "BF16": "<u2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""numpy type of each numeric datatype in binary. numpy lacks BF16, read here as the upper half of an FP32 number."""
MAX_OUTPUTS: Final = 9
"""Most outputs that a request may name; no model has more."""
UNFIT: Final = (ValueError, OverflowError, RecursionError)
"""Errors raised when JSON elements cannot be converted to the wanted type."""
_ELEMENTS: Final[Mapping[str, type]] = {"b": bool, "u": int, "i": int, "f": float}

Samples = NDArray[np.float32] | NDArray[np.float64]
"""Raw samples, (n, ...)."""
Parameters = dict[str, bool | int | float | str | None]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(min_length=1, max_length=8)]


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed inference request.

    `x` holds raw samples, finite in single precision, or one PNG or JPEG file per sample. `outputs` maps the name of
    each requested output to whether it is sent in binary. `target` is the true class name of a single sample, or its
    true target of another kind, if the client knows it.
    """

    id: str | None
    x: Samples | tuple[bytes, ...]
    outputs: Mapping[str, bool]
    target: Any = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """Parsed feedback: the true targets of samples, or of earlier requests by their ids; the other is empty.

    `targets` are as in JSON: names of classes, or what `Problem.read_target` takes. `word` is what the client calls
    them.
    """

    x: Samples | tuple[bytes, ...] | None
    ids: tuple[str, ...]
    targets: tuple[Any, ...]
    sensitive: bool
    word: str


@dataclass(frozen=True, slots=True)
class Response:
    """The body of a response; `header_bytes` is the length of its JSON object, or None if no binary tensors follow."""

    body: bytes
    header_bytes: int | None = None


def list_outputs(manifest: Manifest, *, sets: bool) -> dict[str, Result]:
    """Return the outputs of a model by name: those of its task's problem, its prediction sets, then those of all."""
    problem, each = manifest.task.problem, (len(manifest.candidates),)
    every = Result("weights", "FP32", each), Result("energies", "FP32", each), Result("outlier", "BOOL", ())
    own = (*problem.list_results(manifest.task.input_shape), *(problem.list_set_results() if sets else ()))
    return {result.name: result for result in (*own, *every)}


def _compute_values(prediction: Prediction, names: Collection[str]) -> dict[str, Any]:
    """Return arrays (n, ...) or n strings, at least those of the given names."""
    every = {name: getattr(prediction, name) for name in ("weights", "energies", "outlier") if name in names}
    if prediction.coverage is not None:
        every |= prediction.sets
    if set(names) <= set(every):
        return every
    return every | prediction.problem.make_results(prediction.answers, prediction.usual)


class _InputTensor(Struct, frozen=True):
    name: str
    shape: Shape
    datatype: str
    parameters: Parameters = {}
    data: Raw = Raw()


class _OutputTensor(Struct, frozen=True):
    name: str
    parameters: Parameters = {}


class _Request(Struct, frozen=True):
    inputs: Annotated[tuple[_InputTensor, ...], Meta(min_length=1, max_length=16)]
    id: str | None = None
    parameters: Parameters = {}
    outputs: Annotated[tuple[_OutputTensor, ...], Meta(max_length=MAX_OUTPUTS)] = ()


class _Feedback(Struct, frozen=True, forbid_unknown_fields=True):
    inputs: Annotated[tuple[_InputTensor, ...], Meta(max_length=16)] = ()
    id: str | None = None
    ids: Annotated[tuple[str, ...], Meta(max_length=MAX_SAMPLES)] = ()
    label: str | None = None
    labels: Annotated[tuple[str, ...], Meta(max_length=MAX_SAMPLES)] = ()
    target: Any = UNSET
    targets: Annotated[tuple[Any, ...], Meta(max_length=MAX_SAMPLES)] = ()
    sensitive: bool = False


# --------------------------------------------------------------------------------------------------------- requests


def decode(body: bytes, header_bytes: int | None, outputs: Iterable[str]) -> Request:
    """Parse an untrusted request.

    Args:
        body: a JSON object, which binary tensors may follow.
        header_bytes: length of the JSON object (Inference-Header-Content-Length); None if it is the whole body.
        outputs: the names of the model's outputs.

    Raises:
        ConfigError: the request is malformed; the text says what to change.
    """
    if header_bytes is not None and not 0 < header_bytes <= len(body):
        raise ConfigError(f"Inference-Header-Content-Length is {header_bytes}, but the body has {len(body)} bytes")
    with raise_as(ConfigError, "the body is not an inference request", on=MALFORMED):
        request = msgspec.json.decode(body[:header_bytes], type=_Request)
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT]:
        raise ConfigError(f"the inputs are {', '.join(names)[:200]}; give one, {INPUT}")
    tail = b"" if header_bytes is None else body[header_bytes:]
    selected = _select_outputs(request, tuple(outputs))
    return Request(request.id, _decode_samples(request.inputs[0], tail), selected, _read_target(request.parameters))


def _read_target(parameters: Parameters) -> Any:
    """Return the parameter label, or else target, whose lists come as JSON text, since a parameter has no list."""
    label, target = parameters.get("label"), parameters.get("target")
    if not (label is None or isinstance(label, str)):
        raise ConfigError("the parameter label must be the name of a class, as a string")
    if isinstance(target, str) and target.startswith("["):
        with raise_as(ConfigError, "the parameter target is no list in JSON", on=MALFORMED):
            return msgspec.json.decode(target)
    return target if label is None else label


def decode_feedback(body: bytes, header_bytes: int | None = None, *, needs_target: bool = True) -> Feedback:
    """Parse untrusted feedback; `header_bytes` is as for `decode`.

    Unless it `needs_target`, feedback may tell no target, of all its samples.

    Raises:
        ConfigError: the feedback is malformed; the text says what to change.
    """
    if header_bytes is not None and not 0 < header_bytes <= len(body):
        raise ConfigError(f"Inference-Header-Content-Length is {header_bytes}, but the body has {len(body)} bytes")
    with raise_as(ConfigError, "the body is not feedback", on=MALFORMED):
        found = msgspec.json.decode(body[:header_bytes], type=_Feedback)
    ids = found.ids if found.id is None else (found.id, *found.ids)
    labels = found.labels if found.label is None else (found.label, *found.labels)
    targets = found.targets if found.target is UNSET else (found.target, *found.targets)
    if labels and targets:
        raise ConfigError("give labels, the names of classes, or targets, but not both")
    word, targets = ("targets", targets) if targets else ("labels", labels)
    if bool(found.inputs) == bool(ids):
        raise ConfigError(f"give the input {INPUT} or the id of an earlier request, and the label")
    if not targets and needs_target:
        raise ConfigError("the label is missing: give the name of the true class as label, or labels for several")
    if ids:
        if len(ids) != len(targets) and (targets or needs_target):
            raise ConfigError(f"there are {len(ids)} ids and {len(targets)} {word}; give one for each")
        return Feedback(None, ids, targets, found.sensitive, word)
    if [tensor.name for tensor in found.inputs] != [INPUT]:
        raise ConfigError(f"give one input, {INPUT}")
    tail = b"" if header_bytes is None else body[header_bytes:]
    return Feedback(_decode_samples(found.inputs[0], tail), (), targets, found.sensitive, word)


def _select_outputs(request: _Request, known: tuple[str, ...]) -> dict[str, bool]:
    """Map each requested output to whether it is sent in binary; all outputs if the request names none."""
    default = request.parameters.get("binary_data_output") is True
    asked = request.outputs or tuple(_OutputTensor(name) for name in known)
    names = [tensor.name for tensor in asked]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"there is no output {unknown[0][:100]}; there are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ConfigError("an output is named twice; name each once")
    if any("classification" in tensor.parameters for tensor in asked):
        raise ConfigError("the parameter classification is not served; ask for the outputs class and class_name")
    return {tensor.name: tensor.parameters.get("binary_data", default) is True for tensor in asked}


def _decode_samples(tensor: _InputTensor, tail: bytes) -> Samples | tuple[bytes, ...]:
    """Decode the input's elements and check them against its shape."""
    if not 0 < tensor.shape[0] <= MAX_SAMPLES:
        raise ConfigError(f"{INPUT} holds {tensor.shape[0]} samples; send 1 to {MAX_SAMPLES} in a request")
    size = tensor.parameters.get("binary_data_size")
    if size is None and not bytes(tensor.data):
        raise ConfigError(f"{INPUT} has neither data nor the parameter binary_data_size; shared memory is not served")
    if size is not None and size != len(tail):
        raise ConfigError(
            f"{INPUT} has a binary_data_size of {size}, but {len(tail)} bytes follow the JSON object; its length goes "
            "into the header Inference-Header-Content-Length"
        )
    if size is None and tail:
        raise ConfigError(f"{len(tail)} bytes follow the JSON object, but {INPUT} has no binary_data_size")
    if tensor.datatype == "BYTES":
        return _decode_pictures(tensor, tail if size is not None else None)
    if tensor.datatype not in DATATYPES:
        raise ConfigError(
            f"{INPUT} has the datatype {tensor.datatype[:20]}; send {', '.join(DATATYPES)}, or BYTES for pictures"
        )
    dtype = np.dtype(DATATYPES[tensor.datatype])
    n_elements = math.prod(tensor.shape)
    if not n_elements:
        raise ConfigError(f"{INPUT} of shape {list(tensor.shape)} holds no numbers")
    if size is not None:
        if len(tail) != n_elements * dtype.itemsize:
            raise ConfigError(
                f"{INPUT} of shape {list(tensor.shape)} and datatype {tensor.datatype} takes "
                f"{n_elements * dtype.itemsize} bytes, not {len(tail)}"
            )
        x = np.frombuffer(tail, dtype).reshape(tensor.shape)
        return _require_finite((x.astype("<u4") << 16).view("<f4") if tensor.datatype == "BF16" else x)
    if tensor.datatype == "BF16":
        raise ConfigError(f"{INPUT} has the datatype BF16, which JSON has not: send it in binary, or as FP32")
    return _require_finite(_decode_json(tensor, dtype, n_elements))


def _decode_json(tensor: _InputTensor, dtype: np.dtype[Any], n_elements: int) -> NDArray[Any]:
    """Decode the elements in JSON: a flat list, or nested lists of the given shape."""
    text = bytes(tensor.data)
    depth = len(tensor.shape) if re.match(rb"\s*\[\s*\[", text) else 1
    wrong = f"the data of {INPUT} are not {tensor.datatype}"
    with raise_as(ConfigError, wrong, on=UNFIT), np.errstate(over="ignore"):  # _require_finite refuses infinity
        x = np.array(_make_decoder(_ELEMENTS[dtype.kind], depth).decode(text), dtype)
    if x.size != n_elements or (depth > 1 and x.shape != tensor.shape):
        raise ConfigError(f"{INPUT} has the shape {list(tensor.shape)}, but its data have {list(x.shape)}")
    return x.reshape(tensor.shape)


@lru_cache(maxsize=64)
def _make_decoder(element: type, depth: int) -> msgspec.json.Decoder[Any]:
    kind: Any = element
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _require_finite(x: NDArray[Any]) -> Samples:
    """Check numbers and return them in float32 or, if that would round their type, in float64."""
    if fault := explain_unfit(x):
        raise ConfigError(f"{INPUT}: {fault}")
    return x.astype(np.float32) if np.can_cast(x.dtype, np.float32) else x.astype(np.float64)


def _decode_pictures(tensor: _InputTensor, tail: bytes | None) -> tuple[bytes, ...]:
    """Return the input's PNG and JPEG files, which are raw in binary and base64 in JSON."""
    pictures = _decode_base64(tensor) if tail is None else _decode_elements(tail)
    if len(pictures) > MAX_SAMPLES:
        raise ConfigError(f"{INPUT} holds {len(pictures)} pictures; send 1 to {MAX_SAMPLES} in a request")
    if len(pictures) != math.prod(tensor.shape):
        raise ConfigError(f"{INPUT} has the shape {list(tensor.shape)}, but there are {len(pictures)} pictures")
    return pictures


def _decode_base64(tensor: _InputTensor) -> tuple[bytes, ...]:
    with raise_as(ConfigError, f"the data of {INPUT} are not a list of base64 strings, a picture each", on=UNFIT):
        texts = _make_decoder(str, 1).decode(bytes(tensor.data))
        return tuple(base64.b64decode(text, validate=True) for text in texts)


def _decode_elements(tail: bytes) -> tuple[bytes, ...]:
    found: list[bytes] = []
    at = 0
    while at < len(tail):
        end = at + 4 + int.from_bytes(tail[at : at + 4], "little")
        if end > len(tail) or len(found) == MAX_SAMPLES:
            raise ConfigError(
                f"{INPUT} is cut off or has over {MAX_SAMPLES} elements; write each as its length in 4 little-endian "
                "bytes, then its content"
            )
        found.append(tail[at + 4 : end])
        at = end
    return tuple(found)


def load_images(task: TaskSpec, pictures: tuple[bytes, ...]) -> NDArray[np.float32]:
    """Load image files as raw float32 samples, (n, height, width) or (n, height, width, 3). Slow.

    Raises:
        ConfigError: the task takes no images, or an image cannot be read.
    """
    images = [load_image(task, io.BytesIO(picture), f"number {i}", MAX_PIXELS) for i, picture in enumerate(pictures)]
    return np.stack(images).astype(np.float32)


# --------------------------------------------------------------------------------------------------------- responses


def encode(name: str, manifest: Manifest, request: Request, prediction: Prediction, parameters: Parameters) -> Response:
    """Encode a model's prediction as the response to a request."""
    tensors: list[dict[str, Any]] = []
    tail: list[bytes] = []
    outputs = list_outputs(manifest, sets=prediction.coverage is not None)
    found = _compute_values(prediction, request.outputs)
    for key, binary in request.outputs.items():
        output, values = outputs[key], found[key]
        shape = [len(values)] if output.datatype == "BYTES" else list(values.shape)
        tensor = {"name": key, "datatype": output.datatype, "shape": shape}
        if binary:
            tail.append(_encode_binary(output.datatype, values))
            tensors.append(tensor | {"parameters": {"binary_data_size": len(tail[-1])}})
        else:
            tensors.append(tensor | {"data": values if output.datatype == "BYTES" else values.ravel().tolist()})
    head: dict[str, Any] = {"model_name": name, "model_version": get_version(manifest)}
    if request.id is not None:
        head["id"] = request.id
    text = msgspec.json.encode(head | {"parameters": parameters, "outputs": tensors})
    return Response(b"".join([text, *tail]), len(text)) if tail else Response(text)


def encode_feedback(name: str, feedback: Feedback, n: int, stored: int) -> Response:
    """Encode the answer to feedback: how many labels or targets there were, and how many samples of them were new."""
    head: dict[str, Any] = {"model_name": name, "labels": n, "stored": stored}
    if len(feedback.ids) == 1:
        head["id"] = feedback.ids[0]
    return Response(msgspec.json.encode(head))


def _encode_binary(datatype: str, values: Any) -> bytes:
    if datatype == "BYTES":
        texts = [text.encode() for text in values]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return np.asarray(values, DATATYPES[datatype]).tobytes()


def get_version(manifest: Manifest) -> str:
    """Return a model's only version, which is the release in service."""
    return str(manifest.release)


def list_datatypes(task: TaskSpec) -> tuple[str, ...]:
    """Return all datatypes accepted for the input; the protocol's field `datatype` has room for only one."""
    return (*DATATYPES, *(("BYTES",) if task.preprocessing.image_mode else ()))


def make_metadata(name: str, manifest: Manifest, *, sets: bool = False) -> dict[str, Any]:
    """Describe a model's inputs and outputs in the protocol's terms; -1 in a shape is the number of samples.

    `sets` is whether the model has prediction sets. The input is FP64 if single precision would lose differences
    between the task's samples (`fedge.data.preprocessing.choose_input_precision`).
    """
    return {
        "name": name,
        "versions": [get_version(manifest)],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {
                "name": INPUT,
                "datatype": "FP64" if choose_input_precision(manifest.task) is np.float64 else "FP32",
                "shape": [-1, *manifest.task.input_shape],
                "parameters": {"datatypes": ",".join(list_datatypes(manifest.task))},
            }
        ],
        "outputs": [
            {"name": key, "datatype": output.datatype, "shape": [-1, *output.shape]}
            for key, output in list_outputs(manifest, sets=sets).items()
        ],
    }


def make_configuration(name: str, manifest: Manifest, *, sets: bool = False) -> dict[str, Any]:
    """Describe a model's inputs and outputs in Triton's model configuration extension; `sets` as for the metadata."""

    def make_tensor(described: dict[str, Any]) -> dict[str, Any]:
        kind = described["datatype"].replace("BYTES", "STRING")
        return {"name": described["name"], "data_type": f"TYPE_{kind}", "dims": described["shape"][1:] or [1]}

    described = make_metadata(name, manifest, sets=sets)
    return {
        "name": name,
        "platform": described["platform"],
        "backend": "onnxruntime",
        "max_batch_size": MAX_SAMPLES,
        "input": [make_tensor(one) for one in described["inputs"]],
        "output": [make_tensor(one) for one in described["outputs"]],
    }
