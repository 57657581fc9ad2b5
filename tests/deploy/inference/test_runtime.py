"""The runtime on golden bundles, by each engine. Needs numpy, onnxruntime and msgspec only: torch is not imported."""

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import deploy
from fedge.bundle.manifest import INT8, MANIFEST, SKELETON, decode_manifest
from fedge.bundle.runtime import onnxruntime
from fedge.data.problems.classification import Classification
from fedge.errors import ConfigError, UpdateRejected

from ..bundles import sha256, variant

pytestmark = pytest.mark.torch_free

GOLDEN = Path(__file__).parents[1] / "golden"
ENGINES = GOLDEN / "engines"


@pytest.fixture(scope="module")
def expected():
    with np.load(GOLDEN / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def runtime():
    return deploy.load(GOLDEN / "bundle")


@pytest.fixture
def bundle(tmp_path):
    return Path(shutil.copytree(GOLDEN / "bundle", tmp_path / "bundle"))


def test_predicts_what_torch_and_the_formula_predicted(runtime, expected):
    found = runtime.predict(expected["x"])
    np.testing.assert_allclose(found.probabilities, expected["probabilities"], atol=1e-6)
    np.testing.assert_allclose(found.weights, expected["weights"], atol=1e-6)
    np.testing.assert_allclose(found.energies, expected["energies"], atol=1e-4)
    assert found.class_index.tolist() == expected["y"].tolist()
    assert found.class_name == tuple(str(y) for y in expected["y"])
    assert found.latency_ms > 0
    assert (found.weights[:, 1:4] == 0).sum(axis=1).tolist() == [1] * 12  # of three experts two take part


def test_one_sample_in_each_of_its_shapes(runtime, expected):
    one = expected["x"][0]
    for sample in (one, one[None], one[..., None], one[None, None], one.astype(float).tolist()):
        found = runtime.predict(sample)
        np.testing.assert_allclose(found.probabilities, expected["probabilities"][:1], atol=1e-6)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_batches(runtime, expected, batch):
    x = np.resize(expected["x"], (batch, 8, 8))
    p = np.resize(expected["probabilities"], (batch, 10))
    np.testing.assert_allclose(runtime.predict(x).probabilities, p, atol=1e-6)


def test_its_text_is_one_line_however_many_samples_there_are(runtime):
    many = runtime.predict(np.random.default_rng(0).normal(8, 4, (297, *runtime.task.input_shape)).clip(0, 16))
    assert repr(many).count("\n") == 0
    assert repr(many).startswith("Prediction(297 samples; ")
    assert len(repr(many)) < 200
    assert f"{many.outlier.sum()} outliers; {many.latency_ms:.1f} ms)" in repr(many)
    answers = (np.eye(6, dtype=np.float32)[[0, 0, 1, 2, 3, 4, 5]],)
    mixed = dataclasses.replace(
        many.select_rows(0, 7), problem=Classification(classes=tuple("abcdef")), answers=answers
    )
    assert "(7 samples; 'a' 2, 'b' 1, 'c' 1, 'd' 1, 'e' 1, 1 more; " in repr(mixed)
    assert repr(many.select_rows(0, 1)).startswith("Prediction(1 sample; ")
    assert repr(many.select_rows(0, 0)).startswith("Prediction(0 samples; 0 outliers; ")


@pytest.mark.parametrize("shape", [(7, 8), (3, 8, 9), (64,), ()])
def test_other_shapes_are_refused(runtime, shape):
    with pytest.raises(ConfigError):
        runtime.predict(np.zeros(shape))


def test_a_sample_that_is_not_finite_gets_equal_probabilities(runtime):
    found = runtime.predict_inputs(np.full((1, *runtime.task.input_shape), np.nan, np.float32))
    np.testing.assert_allclose(found.probabilities, 0.1, atol=1e-7)
    assert (found.weights == 0).all()


def test_threads_share_a_runtime(runtime, expected):
    results = []
    threads = [threading.Thread(target=lambda: results.append(runtime.predict(expected["x"]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(np.array_equal(r.probabilities, results[0].probabilities) for r in results)


def test_a_folder_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "bundle"
    folder.mkdir()
    monkeypatch.setattr(
        "deploy.inference.runtime.require_utf8", lambda _: folder.rmdir()
    )  # an agent prunes it at this moment
    with pytest.raises(ConfigError, match=r"cannot open the bundle .*No such file.*name one that this user can read"):
        deploy.load(folder)


def test_wrong_arguments(tmp_path):
    with pytest.raises(ConfigError, match="no bundle at"):
        deploy.load(tmp_path / "nowhere")
    for number in "23":
        shutil.copytree(GOLDEN / "bundle", tmp_path / "home" / "bundles" / number)
    with pytest.raises(ConfigError, match=r"such as .*home/bundles/3"):
        deploy.load(tmp_path / "home")
    shutil.copytree(GOLDEN / "bundle", tmp_path / "home", dirs_exist_ok=True)
    deploy.load(tmp_path / "home")  # a bundle itself, whatever lies beside its files
    foreign = tmp_path / os.fsdecode(b"caf\xe9")
    foreign.symlink_to(GOLDEN / "bundle")
    with pytest.raises(ConfigError, match="not UTF-8"):
        deploy.load(foreign)
    with pytest.raises(ConfigError, match="threads"):
        deploy.load(GOLDEN / "bundle", threads=0)


def test_nothing_heavy_is_imported():
    """In a fresh interpreter, after a prediction: numpy, onnxruntime and msgspec have come, the trainers' have not."""
    code = (
        "import sys, json, numpy, deploy\n"
        f"deploy.load({str(GOLDEN / 'bundle')!r}).predict(numpy.zeros((8, 8)))\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stdout))
    assert {"deploy", "onnxruntime", "numpy", "msgspec"} <= imported
    ours = {"export", "edge_agent", "coordinator"}
    theirs = {"torch", "torchvision", "onnx", "onnxscript", "sklearn", "safetensors", "PIL", "click", "rich", "paho"}
    assert not (ours | theirs) & imported


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="the limit is for Linux on x86-64; where a processor is emulated, the emulator is counted, too",
)
def test_importing_it_takes_little_memory():
    """At most 50 MB at any time, of which Python, numpy and ONNX Runtime have 44."""
    code = "import deploy, re\nprint(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 <= 50


# ------------------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def recorded():
    """What each engine said on the machine that made the bundle."""
    with np.load(ENGINES / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("engine", ["fused", "separate", "lazy"])
def test_float32_engines_predict_what_they_predicted_where_the_bundle_was_made(recorded, engine):
    found = deploy.load(ENGINES / "bundle", engine=engine).predict(recorded["x"])
    np.testing.assert_allclose(found.probabilities, recorded[f"{engine}_probabilities"], atol=2e-6)
    np.testing.assert_allclose(found.weights, recorded[f"{engine}_weights"], atol=2e-6)
    np.testing.assert_allclose(found.energies, recorded[f"{engine}_energies"], atol=1e-4)  # NaN: lazy did not run it


def test_separate_is_fused_also_for_samples_that_are_not_finite():
    x = np.random.default_rng(0).normal(size=(6, 1, 8, 8)).astype(np.float32)
    x[1], x[2, 0, 0, 0], x[3], x[4], x[5] = np.nan, np.inf, -np.inf, 1e30, 1e-40
    fused, separate = (deploy.load(ENGINES / "bundle", engine=e).predict_inputs(x) for e in ("fused", "separate"))
    np.testing.assert_allclose(separate.probabilities, fused.probabilities, atol=1e-6)
    np.testing.assert_allclose(separate.weights, fused.weights, atol=1e-6)


def test_lazy_leaves_candidates_out_and_little_of_the_mixture(recorded):
    lazy = deploy.load(ENGINES / "bundle", engine="lazy").predict(recorded["x"])
    left_out = np.isnan(lazy.energies)
    assert left_out.any()
    assert not left_out[:, 0].any()  # the private model is always run
    assert np.where(left_out, recorded["fused_weights"], 0).sum(axis=1).max() <= 0.01 + 1e-6


def test_eight_bits_are_those_of_the_maker_on_every_processor(recorded):
    found = deploy.load(ENGINES / "bundle", engine="int8").predict(recorded["x"])
    same = found.class_index == recorded["fused_probabilities"].argmax(axis=1)
    assert same.mean() >= 0.98  # what the export asks for
    # but for rounding at the edge of a step
    np.testing.assert_allclose(found.probabilities, recorded["int8_probabilities"], atol=0.02)
    assert np.abs(found.probabilities - recorded["fused_probabilities"]).max() > 1e-3  # it is another graph


@pytest.mark.skipif(platform.machine() in {"aarch64", "arm64"}, reason="Arm adds products of 8 bits in 32")
def test_weights_whose_sums_may_saturate_are_refused(tmp_path):
    """As written before: full 8 bits. Haswell (qemu) named another class for 4 of these 64 samples."""
    folder = Path(shutil.copytree(ENGINES / "bundle", tmp_path / "bundle"))
    shutil.copy(GOLDEN / "full_range.onnx", folder / INT8)
    data, manifest = (folder / INT8).read_bytes(), json.loads((folder / MANIFEST).read_bytes())
    manifest["int8"] = {"digest": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert deploy.load(folder).engine == "fused"
    with pytest.raises(ConfigError, match=r"weights up to 127, with which some x86-64.*fedge export --int8"):
        deploy.load(folder, engine="int8")


# ------------------------------------------------------------------------------------------------- tampering


def part(folder, index=0):
    manifest = decode_manifest((folder / MANIFEST).read_bytes())
    return folder / manifest.parts[index].file_name


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-4])


def extend(path):
    path.write_bytes(path.read_bytes() + bytes(4))


def swap(one, other):
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def link_outside(path):
    target = path.parent.parent / "outside"
    path.rename(target)
    path.symlink_to(target)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def edit(folder, change):
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def set_path(*keys, to):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return lambda folder: edit(folder, change)


TAMPERED = {
    "manifest missing": lambda f: (f / MANIFEST).unlink(),
    "manifest empty": lambda f: (f / MANIFEST).write_bytes(b""),
    "manifest truncated": lambda f: truncate(f / MANIFEST),
    "manifest not JSON": lambda f: (f / MANIFEST).write_bytes(b"\xff{"),
    "manifest nested": lambda f: (f / MANIFEST).write_bytes(b"[" * 100_000),
    "manifest huge": lambda f: (f / MANIFEST).write_bytes(b" " * (2 << 20)),
    "manifest a link": lambda f: link_outside(f / MANIFEST),
    "schema version of tomorrow": set_path("schema_version", to=2),
    "schema version as text": set_path("schema_version", to="1"),
    "schema version missing": lambda f: edit(f, lambda c: c.pop("schema_version")),
    "unknown field": set_path("note", to="x"),
    "unknown field of a candidate": set_path("candidates", 0, "note", to="x"),
    "unknown role": set_path("candidates", 0, "role", to="boss"),
    "field missing": lambda f: edit(f, lambda c: c.pop("gate")),
    "no candidates": set_path("candidates", to=[]),
    "one candidate less": lambda f: edit(f, lambda c: c["candidates"].pop()),
    "one candidate more": lambda f: edit(f, lambda c: c["candidates"].append(c["candidates"][0])),
    "one class less": lambda f: edit(f, lambda c: c["task"]["classes"].pop()),
    "another input shape": set_path("task", "input_shape", to=[1, 4, 4]),
    "temperature 0": set_path("candidates", 0, "temperature", to=0),
    "weight above 1": set_path("candidates", 0, "weight", to=1.5),
    "guard names nobody": set_path("fusion", "guard", "candidate", to=5),
    "a signature, which belongs into the signed metadata": set_path("signature", to="abc"),
    "an expiry, which belongs into the signed metadata": set_path("expires", to="2030-01-01"),
    "digest is a path": set_path("candidates", 0, "part", "digest", to="../" * 20 + "etc/passwd"),
    "digest is absolute": set_path("gate", "digest", to="/" + "a" * 63),
    "digest in capitals": set_path("gate", "digest", to="A" * 64),
    "digest with a line break": set_path("gate", "digest", to="a" * 64 + "\n"),
    "digest of no file": set_path("gate", "digest", to="a" * 64),
    "another part's digest": lambda f: edit(f, lambda c: c["candidates"][0]["part"].update(digest=c["gate"]["digest"])),
    "size too small": set_path("gate", "size_bytes", to=8),
    "skeleton missing": lambda f: (f / SKELETON).unlink(),
    "skeleton altered": lambda f: flip(f / SKELETON, 500),
    "skeleton truncated": lambda f: truncate(f / SKELETON),
    "skeleton a link": lambda f: link_outside(f / SKELETON),
    "parts swapped": lambda f: swap(part(f, 0), part(f, 1)),
    "part and gate swapped": lambda f: swap(part(f, 0), part(f, 5)),
    "part a link": lambda f: link_outside(part(f)),
    "part a folder": lambda f: folder_instead(part(f)),
}
for k in range(6):
    name = f"part {k}" if k < 5 else "gate"
    TAMPERED |= {
        f"{name} missing": lambda f, k=k: part(f, k).unlink(),
        f"{name} truncated": lambda f, k=k: truncate(part(f, k)),
        f"{name} too long": lambda f, k=k: extend(part(f, k)),
        f"{name}: first byte altered": lambda f, k=k: flip(part(f, k), 0),
        f"{name}: header altered": lambda f, k=k: flip(part(f, k), 20),
        f"{name}: last byte altered": lambda f, k=k: flip(part(f, k), -1),
    }


@pytest.mark.parametrize("name", ["schema version of tomorrow", "unknown field", "unknown field of a candidate"])
def test_a_bundle_of_a_later_fedge_is_refused_with_what_to_do(bundle: Path, name: str) -> None:
    TAMPERED[name](bundle)
    with pytest.raises(UpdateRejected, match="if a newer fedge made this bundle, update fedge on this device"):
        deploy.load(bundle)


STRUCTURE = {"one candidate less", "one candidate more", "one class less", "another input shape"}
"""Every file is what the manifest says, but the graph is not: ONNX Runtime loads it, and it is refused then."""


@pytest.mark.parametrize("attack", TAMPERED)
def test_a_tampered_bundle_is_refused(bundle, monkeypatch, attack):
    TAMPERED[attack](bundle)
    if attack not in STRUCTURE:
        monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_a, **_k: pytest.fail("ONNX Runtime saw it"))
    with pytest.raises(UpdateRejected):
        deploy.load(bundle)


def test_untampered(bundle, expected):
    """The control of the table above: the copy itself is good."""
    found = deploy.load(bundle).predict(expected["x"])
    np.testing.assert_allclose(found.probabilities, expected["probabilities"], atol=1e-6)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.zeros((0, 8, 8)), "one or more"),
        (np.full((1, 8, 8), np.nan), r"sample 0, place \(0, 0, 0\) .* is not a finite number"),
        (np.full((2, 8, 8), 1e300), "is more than single precision holds"),
    ],
)
def test_no_samples_and_such_as_are_not_finite_are_refused(runtime, x, says):
    with pytest.raises(ConfigError, match=says):
        runtime.predict(x)


def test_a_graph_of_constants_is_refused_in_a_sentence(tmp_path):
    """As one folds into that has met a number that is not finite."""
    onnx = pytest.importorskip("onnx")
    folder = variant(tmp_path / "constant", release=4)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (file,) = folder.glob("*.onnx")
    model = onnx.load(file, load_external_data=False)
    sizes = (len(manifest["task"]["classes"]), *2 * [len(manifest["candidates"])])
    values = [onnx.numpy_helper.from_array(np.full((1, size), np.nan, np.float32)) for size in sizes]
    nodes = [
        onnx.helper.make_node("Constant", [], [output.name], value=value)
        for output, value in zip(model.graph.output, values, strict=True)
    ]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    file.write_bytes(data := model.SerializeToString())
    manifest["skeleton"] |= {"digest": sha256(data), "size_bytes": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UpdateRejected, match="all outputs of its graph are constants, such as NaN; make"):
        deploy.load(folder)
