"""What the protocol takes and refuses, and that nothing from outside makes it fail otherwise."""

import base64
import io
import json
import math

import numpy as np
import pytest
from PIL import Image

from deploy.inference.prediction import Prediction
from deploy.inference.runtime import load
from deploy.serving import protocol
from fedge.errors import ConfigError

from ..bundles import GOLDEN, variant
from ..served import binary, body, golden, outputs

pytestmark = pytest.mark.torch_free

X = golden()["x"]
NAMES = ("probabilities", "class", "class_name", "weights", "energies", "outlier")


def decode(data, header_bytes=None, *, names=NAMES):
    return protocol.decode(data, header_bytes, names)


@pytest.fixture(scope="module")
def runtime():
    return load(GOLDEN)


def request_of(**changes):
    return json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | changes]})


@pytest.mark.parametrize("datatype", sorted({*protocol.DATATYPES} - {"BF16"}))
def test_every_datatype_in_json_and_in_binary(datatype):
    x = (X[:3] % 2).astype(protocol.DATATYPES[datatype])

    in_json = decode(body(x, datatype))
    nested = decode(body(x, datatype).replace(b'"data": [', b'"unused": [', 1)[:-3] +
                             f', "data": {json.dumps(x.tolist())}}}]}}'.encode())  # fmt: skip
    in_binary = decode(*binary(x, datatype))

    for found in (in_json, nested, in_binary):
        assert found.x.dtype in (np.float32, np.float64)
        np.testing.assert_array_equal(found.x, x)


def test_numbers_are_not_rounded_before_they_are_scaled():
    for value, datatype in ((101349.0123, "FP64"), (2**24 + 1, "INT32"), (2**32 - 1, "UINT32")):
        assert decode(body([[value]], datatype)).x.tolist() == [[value]]


def test_bf16_is_the_upper_half_of_fp32_and_comes_in_binary_alone():
    x = X[:3].astype(np.float32) - 7.5  # 8 bits of fraction are enough for these
    upper = (x.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(decode(*binary(upper, "BF16")).x, x)
    with pytest.raises(ConfigError, match="not a finite"):
        decode(*binary(np.full((1, 2), 0x7F80, np.uint16), "BF16"))
    with pytest.raises(ConfigError, match="BF16, which JSON has not"):
        decode(body(x, "BF16"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not an inference request"),
        (b"[" * 100_000, "not an inference request"),
        (b'{"inputs": ' * 5000, "not an inference request"),
        (b'{"inputs": []}', "not an inference request"),
        (b'{"inputs": [{"name": "x"}]}', "shape"),
        (b"\xff\xfe{}", "not an inference request"),
        (request_of(name="image"), "the inputs are image; give one, x"),
        (request_of(shape=[-1, 2]), "not an inference request"),
        (request_of(shape=[]), "not an inference request"),
        (request_of(shape=[2**31 - 1] * 8), "send 1 to 256"),
        (request_of(shape=[1, 2**31 - 1]), "shape"),
        (request_of(shape=[0, 2], data=[]), "holds 0 samples"),
        (request_of(shape=[257, 2]), "holds 257 samples"),
        (request_of(shape=[1, 0, *[2**31 - 1] * 6], data=[]), "holds no numbers"),
        (request_of(shape=[2, 1], data=[[1, 2]]), "has the shape"),
        (request_of(data=[[1], [2]]), "has the shape"),
        (request_of(data=[[1, 2], [3]]), "not FP32"),
        (request_of(data=[[[1, 2]]]), "not FP32"),
        (request_of(data="AAAA"), "not FP32"),
        (request_of(data=["1", "2"]), "not FP32"),
        (request_of(data=[True, False]), "not FP32"),
        (request_of(data=[1, None]), "not FP32"),
        (request_of(data=[1, 1e39]), "x: sample 0, column 1 .* is not a finite number"),
        (request_of(data=[1, math.nan]), "not an inference request"),
        (request_of(datatype="UINT8", data=[1, 256]), "not UINT8"),
        (request_of(datatype="INT8", data=[1, 1.5]), "not INT8"),
        (request_of(datatype="BOOL", data=[0, 1]), "not BOOL"),
        (request_of(datatype="FP8"), "datatype FP8"),
        (request_of(datatype="BYTES"), "base64"),
        (request_of(datatype="BYTES", shape=[1], data=["=?"]), "base64"),
        (request_of(datatype="BYTES", shape=[2], data=["AAAA"]), "1 pictures"),
        (request_of(datatype="BYTES", shape=[1, 257], data=["AAAA"] * 257), "257 pictures"),
        (request_of(parameters={"binary_data_size": 8}), "binary_data_size of 8"),
        (json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32"}]}), "neither data nor"),
        (body(X[:1], outputs=[{"name": "logits"}]), "no output logits; there are probabilities, class,"),
        (body(X[:1], outputs=[{"name": "class"}] * 2), "named twice"),
        (body(X[:1], outputs=[{"name": "class"}] * 10), "not an inference request"),
        (body(X[:1], outputs=[{"name": "class", "parameters": {"classification": 2}}]), "class_name"),
    ],
)
def test_malformed_requests_are_refused_with_what_to_change(data, says):
    with pytest.raises(ConfigError, match=says):
        decode(data if isinstance(data, bytes) else data.encode())


def test_a_shape_without_elements_is_refused_in_binary_too():
    head = request_of(shape=[1, 0, *[2**31 - 1] * 6], parameters={"binary_data_size": 0}).encode()
    with pytest.raises(ConfigError, match="holds no numbers"):
        decode(head, len(head))


@pytest.mark.parametrize("header_bytes", [0, 10**9])
def test_a_wrong_length_of_the_json_object(header_bytes):
    with pytest.raises(ConfigError, match="Inference-Header-Content-Length"):
        decode(body(X[:1]), header_bytes)


def test_every_prefix_of_a_binary_request_is_refused():
    data, header_bytes = binary(X[:1])
    for n in range(len(data)):
        with pytest.raises(ConfigError):
            decode(data[:n], min(header_bytes, n))
    with pytest.raises(ConfigError, match="binary_data_size"):
        decode(data + b"\0", header_bytes)


def test_not_a_number_in_binary_is_refused():
    with pytest.raises(ConfigError, match="not a finite"):
        decode(*binary(np.full((1, 8, 8), np.nan, np.float32), "FP32"))


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_pictures_in_json_and_in_binary_are_those_samples(runtime):
    pictures = [png(image) for image in X[:2]]
    texts = [base64.b64encode(picture).decode() for picture in pictures]
    in_json = decode(request_of(datatype="BYTES", shape=[2], data=texts).encode())
    tail = b"".join(len(picture).to_bytes(4, "little") + picture for picture in pictures)
    head = {"name": "x", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [head]}).encode()
    in_binary = decode(head + tail, len(head))

    assert in_json.x == in_binary.x == tuple(pictures)
    np.testing.assert_array_equal(protocol.load_images(runtime.task, in_json.x), X[:2])

    for cut in (1, 3, 5, len(tail) - 1):
        short = head.replace(str(len(tail)).encode(), str(cut).encode())
        with pytest.raises(ConfigError, match=r"4 little-endian bytes|pictures"):
            decode(short + tail[:cut], len(short))


def test_what_is_no_picture_is_refused(runtime):
    with pytest.raises(ConfigError, match="number 1"):
        protocol.load_images(runtime.task, (png(X[0]), b"GIF89a"))


def test_a_picture_that_takes_too_much_memory_is_not_unpacked(runtime):
    file = io.BytesIO()
    Image.new("1", (4097, 4096)).save(file, "PNG")
    with pytest.raises(ConfigError, match="number 0: 4097 x 4096 pixels"):
        protocol.load_images(runtime.task, (file.getvalue(),))


def test_a_response_in_json_and_in_binary_says_the_same(runtime):
    prediction = runtime.predict(X)
    in_json = protocol.encode("m", runtime.manifest, decode(body(X, id="7")), prediction, {"release": 3})
    wanted = decode(body(X, parameters={"binary_data_output": True}))
    in_binary = protocol.encode("m", runtime.manifest, wanted, prediction, {})

    head = json.loads(in_json.body)
    assert (head["id"], head["model_name"], head["model_version"]) == ("7", "m", "3")
    assert head["parameters"] == {"release": 3}
    assert in_json.header_bytes is None
    at = in_binary.header_bytes
    plain = outputs(in_json)
    for output in json.loads(in_binary.body[:at])["outputs"]:
        end = at + output["parameters"]["binary_data_size"]
        piece, at = in_binary.body[at:end], end
        if output["datatype"] == "BYTES":
            values = [str(piece[i + 4 : i + 5], "ascii") for i in range(0, len(piece), 5)]
        else:
            values = np.frombuffer(piece, protocol.DATATYPES[output["datatype"]]).tolist()
        assert (output["shape"], values) == (plain[output["name"]]["shape"], plain[output["name"]]["data"])
    assert at == len(in_binary.body)


def test_what_is_not_a_number_is_null_in_json():
    energies = np.array([[np.nan, 1.5]], np.float32)
    weights = np.array([[0, 1]], np.float32)
    problem = load(GOLDEN).task.problem
    prediction = Prediction(problem, (np.ones((1, 1), np.float32),), weights, energies, 0.1)
    request = decode(body(X[:1], outputs=[{"name": "energies"}, {"name": "outlier"}]))

    found = outputs(protocol.encode("m", load(GOLDEN).manifest, request, prediction, {}))

    assert found["energies"]["data"] == [None, 1.5]
    assert found["outlier"]["data"] == [False]


def test_prediction_sets_come_as_outputs_that_the_metadata_describe(tmp_path):
    runtime = load(variant(tmp_path / "scored", release=2, scores=[i / 20 for i in range(20)]), coverage=0.9)
    prediction = runtime.predict(X)
    request = decode(body(X), names=protocol.list_outputs(runtime.manifest, sets=True))
    found = outputs(protocol.encode("m", runtime.manifest, request, prediction, {}))
    described = protocol.make_metadata("m", runtime.manifest, sets=True)
    assert [one["name"] for one in described["outputs"]] == list(found)
    held = np.array(found["set"]["data"]).reshape(found["set"]["shape"])
    assert np.array_equal(held, (1 - prediction.probabilities <= 0.9) | np.eye(10, dtype=bool)[prediction.class_index])
    names = [",".join(np.array(runtime.task.classes)[row]) for row in held]
    assert found["set_names"]["data"] == names
    assert found["abstains"]["data"] == [len(name.split(",")) > 1 for name in names]
    with pytest.raises(ConfigError, match="there is no output set"):
        decode(body(X[:1], outputs=[{"name": "set"}]))


def test_metadata_and_configuration_describe_what_comes(runtime):
    described = protocol.make_metadata("m", runtime.manifest)
    prediction = runtime.predict(X)
    found = outputs(protocol.encode("m", runtime.manifest, decode(body(X)), prediction, {}))

    datatypes = ",".join((*protocol.DATATYPES, "BYTES"))
    assert described["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 1, 8, 8], "parameters": {"datatypes": datatypes}}
    ]
    for output in described["outputs"]:
        one = found[output["name"]]
        assert (one["datatype"], one["shape"]) == (output["datatype"], [12, *output["shape"][1:]])
    configured = protocol.make_configuration("m", runtime.manifest)
    assert configured["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 8, 8]}]
    assert {"name": "class_name", "data_type": "TYPE_STRING", "dims": [1]} in configured["output"]
