"""Writing bundles: all or nothing, equal bytes for equal mixtures, one new file for a new expert."""

import numpy as np
import pytest
from msgspec import UNSET

import deploy
import export.parity
from export import Candidate, GateWeights, Guard, Mixture, write_bundle
from fedge.bundle.conformal import summarise_scores
from fedge.bundle.energies import compute_reference
from fedge.bundle.formula import count_gate_features
from fedge.bundle.manifest import BRANCH, MANIFEST, OUTLIER_BELOW, SKELETON, decode_manifest, encode_manifest
from fedge.data.problems.calibration import Calibration
from fedge.data.task import TaskSpec, choose_gate_pool
from fedge.errors import ConfigError, UpdateRejected
from fedge.models.build import make_initial_model
from fedge.system.files import compute_digest
from fedge.tensors.layout import to_bytes, unflatten
from fedge.wire.messages import Role
from tests.support.problem_bundles import KINDS, make_kind
from tests.support.tables import mixture_of, write

IMAGES = TaskSpec(name="images", classes=("a", "b", "c"), input_shape=(2, 20, 28), model="cnn")
SQUARE = TaskSpec(name="images", classes=("a", "b", "c"), input_shape=(2, 20, 20), model="cnn")


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(3, 10, 4))


def files(folder):
    return {path.name: (path.stat().st_ino, compute_digest(path.read_bytes())) for path in folder.iterdir()}


def image_mixture(seed=0, m=3, task=IMAGES):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape) * 0.2

    roles = (Role.PRIVATE, Role.GLOBAL, Role.EXPERT)
    layout, _ = make_initial_model(task, 0)
    prior, how = np.log([0.2, 0.3, 0.5]), Calibration(temperature=1.4, kappa=0.5)
    candidates = tuple(
        Candidate(roles[k], roles[k].value, make_initial_model(task, seed + k)[1], prior, how, 1.0, 0.02, 1 / m)
        for k in range(m)
    )
    n_features = count_gate_features(task.input_shape)
    gate = GateWeights(normal(16, n_features), normal(16), normal(m, 16), normal(m))
    return layout, Mixture(candidates, 0.5, gate, Guard(1))


def write_images(folder, layout, mixture, validation, **changes):
    arguments = {"task": IMAGES, "release": 1, "method": "fedge", "metrics": {"accuracy": 0.5}} | changes
    return write_bundle(folder, layout=layout, mixture=mixture, validation=validation, **arguments)


def test_images_through_gate_pooling_and_convolutions(tmp_path):
    assert choose_gate_pool(IMAGES.input_shape) == (3, 4)
    layout, mixture = image_mixture()
    x = np.random.default_rng(1).random((12, 2, 20, 28), dtype=np.float32)
    assert write_images(tmp_path / "1", layout, mixture, x).max_abs_diff < 1e-6
    found = deploy.load(tmp_path / "1").predict(x)
    p, weights, _ = export.parity.compute_expected(IMAGES, layout, mixture, x)
    np.testing.assert_allclose(found.probabilities, p, atol=1e-6)
    np.testing.assert_allclose(found.weights, weights, atol=1e-5)
    assert weights.std(axis=0).min() > 1e-3  # the gate sees the images


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_what_a_turned_camera_sees_is_turned_back_before_any_graph(tmp_path, quarters):
    layout, mixture = image_mixture(task=SQUARE)
    x = np.random.default_rng(1).random((12, 2, 20, 20), dtype=np.float32)
    write_images(tmp_path / "plain", layout, mixture, x, task=SQUARE)
    write_images(tmp_path / "turned", layout, mixture, x, task=SQUARE, quarters=quarters)
    wanted = deploy.load(tmp_path / "plain").predict(x)
    seen = np.rot90(x, -quarters, axes=(2, 3))
    for engine in ("fused", "separate", "lazy"):
        found = deploy.load(tmp_path / "turned", engine=engine).predict(seen)
        np.testing.assert_allclose(found.probabilities, wanted.probabilities, atol=1e-6)
    assert b"turned" not in (tmp_path / "plain" / MANIFEST).read_bytes(), "bundles of others stay as they are"


def test_only_square_images_are_turned(tmp_path):
    layout, mixture = image_mixture()
    x = np.zeros((0, *IMAGES.input_shape))
    with pytest.raises(UpdateRejected, match="only square images can be turned"):
        decode_manifest(encode_manifest(write_images(tmp_path / "1", layout, mixture, x, quarters=1)))


def test_the_yardstick_is_that_of_the_outputs_on_the_validation_samples(tmp_path):
    layout, mixture = image_mixture()
    x = np.random.default_rng(1).random((12, 2, 20, 28), dtype=np.float32)
    write_images(tmp_path / "1", layout, mixture, x)
    write_images(tmp_path / "2", layout, mixture, x[:0])
    runtime = deploy.load(tmp_path / "1")
    found = runtime.predict(x)

    assert (runtime.manifest.reference, runtime.manifest.metrics[OUTLIER_BELOW]) == compute_reference(
        IMAGES.problem, found.answers, found.weights, found.energies
    )
    assert runtime.manifest.reference.n == 12
    shares = [candidate.share for candidate in runtime.manifest.candidates]
    np.testing.assert_allclose(shares, found.weights.mean(axis=0), atol=1e-6)
    without = deploy.load(tmp_path / "2").manifest
    assert (without.reference, {candidate.share for candidate in without.candidates}) == (UNSET, {UNSET})


def test_scores_are_those_of_the_answers_or_of_the_mixture_before_and_give_sets(tmp_path):
    layout, mixture = image_mixture()
    _, before = image_mixture(seed=7)
    x, y = np.random.default_rng(1).random((12, 2, 20, 28), dtype=np.float32), np.arange(12) % 3
    write_images(tmp_path / "1", layout, mixture, x, targets=y)
    write_images(tmp_path / "2", layout, mixture, x, targets=y, before=before)
    write_images(tmp_path / "3", layout, before, x, targets=y)
    write_images(tmp_path / "4", layout, mixture, x)
    one, two, three = (deploy.load(tmp_path / name, coverage=0.9) for name in "123")
    assert one.manifest.scores == summarise_scores(IMAGES.problem, one.predict(x).answers, y)
    assert two.manifest.scores == pytest.approx(three.manifest.scores, abs=2e-6)
    assert two.manifest.scores != one.manifest.scores
    held = one.predict(x).sets["set"][np.arange(12), y]
    assert held.mean() >= 0.9
    assert one.predict(x).coverage.threshold == one.manifest.scores[11], "the 12th of 12, ceil(13 * 0.9)"
    with pytest.raises(ConfigError, match="can promise no coverage"):
        deploy.load(tmp_path / "4", coverage=0.9)
    with pytest.raises(AttributeError, match="load the bundle with coverage"):
        _ = deploy.load(tmp_path / "1").predict(x).sets
    for wrong, says in (({"coverage": 1.0}, "below 1"), ({"coverage": 0.9, "mode": "shift"}, "mode normal")):
        with pytest.raises(ConfigError, match=says):
            deploy.load(tmp_path / "1", **wrong)


@pytest.mark.usefixtures("fails_on_sevens")
def test_samples_that_are_not_compared_fail_no_parity_check_and_still_make_the_yardstick(tmp_path):
    layout, mixture = image_mixture()
    x = np.random.default_rng(1).random((12, 2, 20, 28), dtype=np.float32)
    x[5] = 7
    with pytest.raises(UpdateRejected, match="disagree"):
        write_images(tmp_path / "1", layout, mixture, x)
    write_images(tmp_path / "2", layout, mixture, x, compared=x[:5])
    write_images(tmp_path / "3", layout, mixture, x, compared=x[:0])
    references = {deploy.load(tmp_path / release).manifest.reference for release in ("2", "3")}
    assert {reference.n for reference in references} == {12}


def test_the_manifest_says_what_was_written(tmp_path):
    layout, mixture = image_mixture()
    written = write_images(tmp_path / "1", layout, mixture, np.zeros((0, 2, 20, 28)), release=7)
    manifest = decode_manifest((tmp_path / "1" / MANIFEST).read_bytes())
    assert manifest.task == IMAGES
    assert (manifest.release, manifest.method, manifest.metrics) == (7, "fedge", {"accuracy": 0.5})
    assert [c.role for c in manifest.candidates] == [Role.PRIVATE, Role.GLOBAL, Role.EXPERT]
    assert manifest.candidates[1].temperature == 1.4
    assert manifest.fusion.guard.candidate == 1
    assert manifest == written
    assert set(files(tmp_path / "1")) == {MANIFEST, SKELETON, BRANCH, *(part.file_name for part in manifest.parts)}
    # a model's part is the very blob that the coordinator sends
    blob = to_bytes(unflatten(mixture.candidates[1].model, layout))
    assert manifest.candidates[1].part.digest == compute_digest(blob)


@pytest.mark.parametrize("name", KINDS)
def test_an_offset_of_another_shape_than_the_problems_is_a_fault_of_the_caller(tmp_path, name):
    task = make_kind(name).task
    layout, model = make_initial_model(task, 0)
    candidate = Candidate(Role.GLOBAL, "global", model, np.zeros(7))
    mixture = Mixture((candidate,), 0.0, GateWeights.make_untrained(task.input_shape, 1))
    with pytest.raises(ValueError, match=r"the offset of global has shape \(7,\), expected"):
        write_images(tmp_path / "1", layout, mixture, np.zeros((0, *task.input_shape)), task=task)
    assert list(tmp_path.iterdir()) == []


def test_equal_mixtures_give_equal_bytes(tmp_path, logits):
    a = write(tmp_path / "a", logits, mixture_of(logits))
    b = write(tmp_path / "x" / "b", logits, mixture_of(logits))
    assert a == b
    assert {name: digest for name, (_, digest) in files(tmp_path / "a").items()} == {
        name: digest for name, (_, digest) in files(tmp_path / "x" / "b").items()
    }


def test_a_new_expert_is_one_new_file(tmp_path, logits):
    other = logits.copy()
    other[2] += 1
    write(tmp_path / "1", logits, mixture_of(logits), release=1)
    write(tmp_path / "2", other, mixture_of(other), release=2)
    before, after = files(tmp_path / "1"), files(tmp_path / "2")
    parts = {name for name in after if name.endswith(".safetensors")}
    assert len(parts - set(before)) == 1
    assert all(after[name] == before[name] for name in parts & set(before))  # the same inode: stored once
    assert after[SKELETON][1] == before[SKELETON][1]


def test_a_damaged_part_beside_is_not_linked(tmp_path, logits):
    write(tmp_path / "1", logits, mixture_of(logits))
    for part in (tmp_path / "1").glob("*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    write(tmp_path / "2", logits, mixture_of(logits))
    deploy.load(tmp_path / "2")


def test_equal_candidates_share_a_file(tmp_path):
    logits = np.ones((3, 2, 3))
    write(tmp_path / "1", logits, mixture_of(logits))
    assert len(list((tmp_path / "1").glob("*.safetensors"))) == 2
    np.testing.assert_allclose(deploy.load(tmp_path / "1").predict(np.zeros((1, 1))).probabilities, 1 / 3, atol=1e-6)


@pytest.mark.usefixtures("fails_on_sevens")
def test_a_bundle_that_disagrees_leaves_nothing(tmp_path):
    layout, mixture = image_mixture()
    x = np.random.default_rng(1).random((12, 2, 20, 28), dtype=np.float32)
    write_images(tmp_path / "1", layout, mixture, x)
    before = files(tmp_path / "1")
    x[5] = 7
    for name in ("1", "2"):
        with pytest.raises(UpdateRejected, match="disagree"):
            write_images(tmp_path / name, layout, mixture, x)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert files(tmp_path / "1") == before


def test_writing_again_replaces(tmp_path, logits):
    first = write(tmp_path / "1", logits, mixture_of(logits))
    running = deploy.load(tmp_path / "1")
    second = write(tmp_path / "1", logits + 1, mixture_of(logits * 2))
    assert first != second
    assert deploy.load(tmp_path / "1").manifest == second
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    running.predict(np.zeros((1, 1)))  # the files it has mapped are gone from the folder, not from the machine


@pytest.mark.parametrize(
    "changes",
    [
        {"log_prior": np.zeros(3)},
        {"log_prior": np.array([0.0, 0, 0, np.nan])},
        {"beta": np.inf},
        {"gate": GateWeights.make_untrained((2,), 3)},
        {"gate": GateWeights.make_untrained((1,), 2)},
        {"weights": (0.5, 0.5, 1.5)},
        {"temperature": (1.0, 0.0, 1.0)},
        {"mean": (0.0, np.nan, 0.0)},
    ],
)
def test_an_inconsistent_mixture_is_a_fault_of_the_caller(tmp_path, logits, changes):
    with pytest.raises(ValueError, match=r"shape|inputs|finite|range"):
        write(tmp_path / "1", logits, mixture_of(logits, **changes))
    assert list(tmp_path.iterdir()) == []
