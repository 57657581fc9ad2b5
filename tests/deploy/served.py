"""What tests of the inference server share: requests and a running server over the golden bundle."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np

from deploy.inference.runtime import load
from deploy.serving.batching import Batcher
from deploy.serving.endpoints import FixedModel, ServedModel

from .bundles import GOLDEN


def golden():
    """x (12, 8, 8) uint8 and what the bundle says of them."""
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        return dict(arrays)


def body(x, datatype="UINT8", **fields):
    """An inference request in JSON."""
    tensor = {"name": "x", "shape": list(np.shape(x)), "datatype": datatype, "data": np.asarray(x).ravel().tolist()}
    return json.dumps({"inputs": [tensor], **fields}).encode()


def binary(x, datatype="UINT8", **fields):
    """The same with the samples behind it, and the length of the JSON object."""
    tail = np.asarray(x).tobytes()
    tensor = {"name": "x", "shape": list(np.shape(x)), "datatype": datatype}
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(tail)}}], **fields}).encode()
    return head + tail, len(head)


def outputs(response):
    """The outputs of a JSON response by name."""
    found = json.loads(response if isinstance(response, bytes) else response.body)
    return {output["name"]: output for output in found["outputs"]}


@asynccontextmanager
async def served(model=None, name="digits", **batching):
    """A model under its name, with a pool of its own."""
    model = model or FixedModel(load(GOLDEN))
    with ThreadPoolExecutor(1) as graph, ThreadPoolExecutor(1) as pictures:
        yield ServedModel(name, model, Batcher(model.answer, graph, **batching), pictures)
