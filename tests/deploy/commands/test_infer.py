"""`fedge infer` on the golden bundle, without torch."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from deploy.commands.infer import infer
from fedge.errors import ConfigError, UpdateRejected

from ..bundles import broken_gate, sha256, variant

pytestmark = pytest.mark.torch_free

GOLDEN = Path(__file__).parents[1] / "golden"
BUNDLE = str(GOLDEN / "bundle")


@pytest.fixture(scope="module")
def expected():
    with np.load(GOLDEN / "expected.npz") as arrays:
        return dict(arrays)


def run(*arguments):
    return run_of(BUNDLE, *arguments)


def run_of(bundle, *arguments):
    result = CliRunner().invoke(infer, [str(bundle), *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_json_of_an_npz_file(tmp_path, expected):
    y = expected["y"].copy()
    y[:3] = (y[:3] + 1) % 10
    np.savez(tmp_path / "test.npz", x=expected["x"], y=y)
    code, out = run(tmp_path / "test.npz", "--json")
    (record,) = map(json.loads, out.splitlines())
    assert code == 0
    assert record["n"] == 12
    assert record["accuracy"] == 9 / 12
    assert record["predictions"] == expected["y"].tolist()
    assert record["class_names"] == [str(y) for y in expected["y"]]
    np.testing.assert_allclose(record["probability"], expected["probabilities"].max(axis=1), atol=1e-6)
    assert list(record["weights"]) == ["private", "global", "expert-2", "expert-3", "local"]
    np.testing.assert_allclose(list(record["weights"].values()), expected["weights"].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(list(record["energies"].values()), expected["energies"].mean(axis=0), atol=1e-4)
    for name in ("probabilities", "weights", "energies"):
        np.testing.assert_allclose(record["by_sample"][name], expected[name], atol=1e-4)
    assert 0 < record["latency_ms"] <= record["latency_p99_ms"]


def test_labels_are_not_needed(tmp_path, expected):
    np.savez(tmp_path / "test.npz", x=expected["x"])
    assert json.loads(run(tmp_path / "test.npz", "--json", "--batch", 5, "--repeat", 2)[1])["accuracy"] is None


def test_it_says_how_the_bundle_was_run(tmp_path, expected):
    np.save(tmp_path / "x.npy", expected["x"])
    record = json.loads(run(tmp_path / "x.npy", "--json", "--mode", "shift", "--provider", "cpu")[1])
    assert (record["engine"], record["mode"], record["providers"]) == ("fused", "shift", ["CPUExecutionProvider"])
    assert np.abs(np.array(list(record["weights"].values())) - expected["weights"].mean(axis=0)).max() > 0.01
    for wrong in (("--provider", "NobodysProvider"), ("--runtime", "int8")):
        with pytest.raises(ConfigError, match=wrong[1]):
            run(tmp_path / "x.npy", *wrong)


def test_several_inputs_of_all_kinds(tmp_path, expected):
    np.save(tmp_path / "one.npy", expected["x"][0])
    np.save(tmp_path / "all.npy", expected["x"])
    Image.fromarray(expected["x"][0]).save(tmp_path / "one.png")
    Image.fromarray(expected["x"][0]).convert("RGB").resize((80, 60)).save(tmp_path / "photo.jpg")
    names = ["one.npy", "all.npy", "one.png", "photo.jpg"]
    code, out = run(*(tmp_path / name for name in names), "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [r["n"] for r in records] == [1, 12, 1, 1]
    assert [Path(r["input"]).name for r in records] == names
    assert records[0]["probability"] == records[2]["probability"]


def test_a_folder_with_class_folders_tells_the_accuracy_and_one_without_the_predictions(tmp_path, expected):
    classes, loose = tmp_path / "classes", tmp_path / "loose"
    wrong = (expected["y"][0] + 1) % 10
    for k, (x, y) in enumerate(zip(expected["x"], expected["y"], strict=True)):
        for folder in (classes / str(wrong if k == 0 else y), loose / "day-1"):
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x).save(folder / f"{k}.png")
    (loose / "day-1" / "1.png").rename(loose / "1.png")
    (classes / "notes.txt").write_text("of the photographer")
    record, other = (json.loads(run(folder, "--json")[1]) for folder in (classes, loose))
    assert record["n"] == other["n"] == 12
    assert record["accuracy"] == 11 / 12
    assert sum(part["n"] for part in record["by_class"].values()) == 12
    assert record["by_class"][str(wrong)]["accuracy"] < 1
    assert set(record["by_class"]) == {name.split("/")[0] for name in record["files"]}
    found = dict(zip(other["files"], other["predictions"], strict=True))
    assert found == {"1.png" if k == 1 else f"day-1/{k}.png": y for k, y in enumerate(expected["y"].tolist())}
    assert (other["accuracy"], other["by_class"]) == (None, {})
    text = run(classes)[1]
    assert "accuracy 0.9167" in text
    assert f"accuracy {record['by_class'][str(wrong)]['accuracy']:.4f} of" in text
    (classes / "7x").mkdir()
    Image.fromarray(expected["x"][0]).save(classes / "7x" / "a.png")
    with pytest.raises(ConfigError, match="7x"):
        run(classes)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no image in it"):
        run(tmp_path / "empty")


def test_a_table_for_people(tmp_path, expected):
    np.savez(tmp_path / "test.npz", x=np.resize(expected["x"], (30, 8, 8)), y=np.resize(expected["y"], 30))
    _, out = run(tmp_path / "test.npz")
    assert "30 samples" in out
    assert "... and 10 more" in out
    assert "accuracy 1.0000" in out
    assert "expert-3" in out
    assert f"{expected['probabilities'][0].max():.4f}" in out


def test_a_budget_is_told_of(tmp_path, expected):
    """Of all candidates with much of it, of one with next to nothing."""
    np.save(tmp_path / "x.npy", expected["x"])
    bundle = GOLDEN / "engines" / "bundle"
    most, least = ((bundle, tmp_path / "x.npy", "--budget-ms", ms, "--json") for ms in (1e6, 1e-6))
    record = json.loads(run_of(*most)[1])["budget"]
    assert (record["used"], record["fits"]) == (["private-0", "expert-1", "expert-2", "expert-3"], True)
    assert record["ms"] > 0
    record = json.loads(run_of(*least)[1])["budget"]
    assert (record["used"], record["in_memory"], record["fits"]) == (["private-0"], ["private-0"], False)
    assert "  budget: over budget, but used: even private-0 alone by engine" in run_of(*least[:-1])[1]
    assert "budget:" not in run_of(bundle, tmp_path / "x.npy")[1]


def test_a_sample_that_is_not_finite_is_refused(tmp_path):
    x = np.zeros((3, 8, 8))
    x[2, 1, 7] = np.nan
    np.save(tmp_path / "bad.npy", x)
    with pytest.raises(ConfigError, match=r"bad\.npy: sample 2, place \(0, 1, 7\) .* is not a finite number"):
        run(tmp_path / "bad.npy", "--json")


def claiming(n):
    """128 bytes of an .npy that claims n samples."""
    np.lib.format.write_array_header_1_0(
        header := io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (n, 8, 8)}
    )
    return header.getvalue()


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("missing.npy", lambda p: None),
        ("broken.npy", lambda p: p.write_bytes(b"not numpy")),
        ("empty.npy", lambda p: p.write_bytes(b"")),
        ("broken.npz", lambda p: p.write_bytes(b"PK\x03\x04")),
        ("claims.npy", lambda p: p.write_bytes(claiming(10**12))),
        ("claims.npz", lambda p: zipfile.ZipFile(p, "w").writestr("x.npy", claiming(10**12))),
        ("pickle.npy", lambda p: np.save(p, np.array([_Trap()], object), allow_pickle=True)),
        ("no-x.npz", lambda p: np.savez(p, z=np.zeros((8, 8)))),
        ("labels.npz", lambda p: np.savez(p, x=np.zeros((3, 8, 8)), y=np.zeros(2))),
        ("none.npy", lambda p: np.save(p, np.zeros((0, 8, 8)))),
        ("shape.npy", lambda p: np.save(p, np.zeros((8, 9)))),
        ("text.npy", lambda p: np.save(p, np.full((8, 8), "a"))),
        ("broken.png", lambda p: p.write_bytes(b"not a picture")),
        ("notes.txt", lambda p: p.write_text("hello")),
    ],
)
def test_bad_inputs_are_named(tmp_path, name, write):
    write(tmp_path / name)
    with pytest.raises(ConfigError):
        run(tmp_path / name)


def test_help_has_examples():
    code, out = run("--help")
    assert code == 0
    assert "fedge infer bundles/3 photo.png" in out


def test_labels_that_are_no_class_numbers_are_refused_rather_than_counted_as_wrong(tmp_path, expected):
    for y, says in ((expected["y"] + 9, "class numbers are 0..9 here"), (["x"] * 12, "holds the label 'x'")):
        np.savez(tmp_path / "test.npz", x=expected["x"], y=y)
        with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
            run(tmp_path / "test.npz")


def test_a_bundle_that_gives_no_numbers_says_what_is_to_blame(tmp_path, expected):
    np.savez(tmp_path / "x.npz", x=expected["x"])
    folder = variant(tmp_path / "gate", release=4, gate=broken_gate)
    with pytest.raises(UpdateRejected, match="has no answer: the gate, or the prior of a class gives numbers that are"):
        run_of(folder, tmp_path / "x.npz")
    folder = variant(tmp_path / "candidates", release=4)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for part in (candidate["part"] for candidate in manifest["candidates"]):
        data = (folder / f"{part['digest']}.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        data = data[:start] + np.full((len(data) - start) // 4, np.nan, np.float32).tobytes()
        (folder / f"{sha256(data)}.safetensors").write_bytes(data)
        part |= {"digest": sha256(data), "size_bytes": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UpdateRejected, match="no answer: candidate private, global, expert-2, expert-3, local gives"):
        run_of(folder, tmp_path / "x.npz")
