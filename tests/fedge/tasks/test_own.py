"""Tasks made in Python: what samples and networks become, and what is refused."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import deploy
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from fedge.data.problems.own import Own
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models.build import make_initial_model, make_network
from fedge.models.problems.losses import compute_losses
from fedge.system.loading import register_object
from fedge.tasks import Task, load_pool
from fedge.tasks.own import get_network_name
from fedge.tensors.layout import HEAD

RNG = np.random.default_rng(0)
X, Y = RNG.random((30, 5)), RNG.integers(0, 3, 30)


class Net(nn.Module):
    """As in a notebook: no argument, no module that another process could import."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, hidden), nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def with_the_task(task: TaskSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(task.input_shape[0], task.n_classes))


def test_arrays_are_standardised_and_get_a_network() -> None:
    task = Task.from_arrays(X, Y, classes=["a", "b", "c"], name="mine")
    assert (task.spec.name, task.spec.classes, task.spec.input_shape) == ("mine", ("a", "b", "c"), (5,))
    assert task.spec.model == "mlp"
    assert task.spec.preprocessing.mean == pytest.approx(tuple(X.mean(axis=0)))
    assert load_pool(register_object(task)).y.tolist() == Y.tolist()
    assert len(load_pool(register_object(task), limit=10).y) == 10


@pytest.mark.parametrize(
    ("shape", "dtype", "wanted", "mode", "model"),
    [
        ((8, 32, 32, 3), np.uint8, (3, 32, 32), "RGB", "cnn"),
        ((8, 28, 28), np.uint8, (1, 28, 28), "L", "cnn"),
        ((8, 1, 8, 8), np.float32, (1, 8, 8), None, "mlp"),
        ((8, 28, 28), np.float32, (28, 28), None, "mlp"),
    ],
)
def test_images_have_their_channels_first(
    shape: tuple[int, ...], dtype: type, wanted: tuple[int, ...], mode: str | None, model: str
) -> None:
    spec = Task.from_arrays(np.arange(np.prod(shape)).reshape(shape).astype(dtype), np.arange(8) % 2).spec
    assert (spec.input_shape, spec.preprocessing.image_mode, spec.model) == (wanted, mode, model)


@pytest.mark.parametrize("shape", [(8, 20, 20), (8, 20, 20, 3), (8, 1, 20, 20)])
@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int32])
def test_pixels_are_pixels_in_every_whole_type(shape: tuple[int, ...], dtype: type) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, shape), np.arange(8) % 2
    wanted, found = Task.from_arrays(x.astype(np.uint8), y), Task.from_arrays(x.astype(dtype), y)
    assert found.spec == wanted.spec
    assert found.spec.model == "cnn"
    assert np.array_equal(found.pool.x, wanted.pool.x)


def test_whole_numbers_that_are_no_pixels_stay_in_their_shape() -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (8, 20, 20)), np.arange(8) % 2
    for other in (x - 1, x + 256, x.astype(np.float32)):
        assert Task.from_arrays(other, y).spec.input_shape == (20, 20)
    assert Task.from_arrays(x, y, model=Net).spec.input_shape == (20, 20)
    assert Task.from_arrays(x, y, model="cnn").spec.input_shape == (1, 20, 20)


@pytest.mark.parametrize("model", [Net, lambda: Net(7), with_the_task, Net()], ids=["class", "function", "task", "net"])
def test_any_network_can_be_built_and_has_a_fingerprint(model: object) -> None:
    task = Task.from_arrays(X, Y, model=model)
    assert len(task.spec.compute_fingerprint()) == 16
    assert make_network(task.spec)(torch.zeros(2, 5)).shape == (2, 3)
    assert make_initial_model(task.spec, 1)[0].select(HEAD)


def test_a_module_begins_with_the_weights_that_it_has_and_is_left_alone() -> None:
    net = Net()
    task = Task.from_arrays(X, Y, model=net)
    one, two = make_network(task.spec), make_network(task.spec)
    assert torch.equal(one.body.weight, net.body.weight)
    with torch.no_grad():
        one.body.weight.zero_()
    assert torch.equal(two.body.weight, net.body.weight)


def test_a_network_that_was_defined_anew_is_another_task() -> None:
    one, two = (Task.from_arrays(X, Y, model=type("Net", (Net,), {})) for _ in range(2))
    assert one.spec.compute_fingerprint() != two.spec.compute_fingerprint()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (3, "a network is a name, a torch.nn.Module or what makes one, not int"),
        (lambda: 1 / 0, "fails with ZeroDivisionError"),
        (lambda: 3, "returned int, not a torch.nn.Module"),
        ("resnet", "unknown model resnet"),
    ],
)
def test_what_is_no_network_is_refused(model: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_network(Task.from_arrays(X, Y, model=model).spec)


@pytest.mark.parametrize(
    ("x", "y", "more", "words"),
    [
        (X, Y[:-1], {}, "one whole number per sample"),
        (X, Y + 0.5, {}, "one whole number per sample"),
        (X * np.nan, Y, {}, r"arrays: sample 0, column 0 \(counted from 0\) is not a finite number"),
        (X, Y, {"classes": ["a"]}, "the largest label is 2"),
        (X, Y, {"users": [0, 1]}, "users must be one per sample"),
        ([[1.0, 2.0], [3.0]], [0, 1], {}, "arrays: x cannot be made an array: give all samples one shape"),
        (torch.ones(4, 2, requires_grad=True), [0, 1, 0, 1], {}, r"arrays: x .*: give x\.detach\(\)\.cpu\(\)"),
        (X, torch.ones(len(Y), requires_grad=True), {}, r"arrays: y .*: give y\.detach\(\)\.cpu\(\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x: object, y: object, more: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Task.from_arrays(x, y, **more)


class Broken:
    """A data set whose file is not there."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> None:
        raise OSError(f"no file {i}")


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"x": X, "y": Y}, r"dict is a dictionary of x, y: give its arrays to Task\.from_arrays\(x, y\)"),
        ([{"image": X[0], "label": 1}], "the samples of list are dictionaries of 'image', 'label': give pairs"),
        ([], "list has no samples"),
        (Broken(), "Broken cannot give its first sample: OSError: no file 0"),
        ([(X[0], 1, 2)], "list must give pairs"),
        ([(X[0], 1), (X[0][:1], 1)], "list must give pairs .* of one shape"),
    ],
)
def test_a_data_set_that_gives_no_pairs_is_refused(dataset: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Task.from_dataset(dataset)


def test_people_are_numbered() -> None:
    task = Task.from_arrays(X, Y, users=["b", "a", "c"] * 10)
    assert task.pool.user is not None
    assert task.pool.user[:3].tolist() == [1, 0, 2]


def test_test_samples_follow_the_others_and_shape_no_scale() -> None:
    task = Task.from_arrays(
        X, list("abc" * 10), x_test=X[:6] + 100, y_test=list("cba" * 2), block=["r", *"stu" * 9, *"rr"]
    )
    pool = task.pool
    assert pool.is_test is not None
    assert pool.is_test.tolist() == [False] * 30 + [True] * 6
    assert pool.y[30:].tolist() == [2, 1, 0, 2, 1, 0]
    assert task.spec.preprocessing == Task.from_arrays(X, Y).spec.preprocessing
    assert pool.block is not None
    assert pool.block[:5].tolist() == [0, 1, 2, 3, 1]
    assert len(set(pool.block[30:].tolist()) - set(pool.block[:30].tolist())) == 6


def test_numbers_are_standardised_by_the_targets_that_are_not_for_tests() -> None:
    y = RNG.random(30)
    alone = Task.from_arrays(X, y, problem="regression").spec
    assert Task.from_arrays(X, y, problem="regression", x_test=X, y_test=y + 50).spec == alone


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"x_test": X}, "there is y, but no y_test: give both or neither"),
        ({"y_test": Y}, "there is x, but no x_test: give both or neither"),
        ({"x_test": X, "y_test": Y, "users": Y}, "there is users, but no users_test: give both or neither"),
        ({"x_test": X, "y_test": Y, "users_test": Y}, "there is users_test, but no users"),
        ({"x_test": X[:, :4], "y_test": Y}, r"x_test is float64\(30, 4\), but x is float64\(30, 5\): give both in the"),
        ({"x_test": X.astype(int), "y_test": Y}, r"x_test is int64\(30, 5\), but x is float64"),
        ({"x_test": X, "y_test": Y.astype(str)}, r"y_test is <U21\(30,\), but y is int64"),
        ({"x_test": X, "y_test": Y[:-1]}, "one whole number per sample"),
        ({"block": Y[:-1]}, "block must be one number or name per sample"),
    ],
)
def test_test_samples_and_blocks_that_do_not_fit_are_refused(more: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Task.from_arrays(X, Y, **more)


class Pictures(Dataset):
    """Such as torchvision's: PIL images and a list of classes."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[object, int]:
        from PIL import Image

        return Image.fromarray(np.full((16, 16, 3), 40 * i, np.uint8)), i % 2


def test_datasets_of_tensors_and_of_pictures() -> None:
    tensors = Task.from_dataset(TensorDataset(torch.rand(12, 1, 8, 8), torch.arange(12) % 3))
    assert (tensors.spec.name, tensors.spec.n_classes, tensors.pool.x.shape) == ("TensorDataset", 3, (12, 1, 8, 8))
    pictures = Task.from_dataset(Pictures())
    assert (pictures.spec.classes, pictures.spec.preprocessing.image_mode) == (("cat", "dog"), "RGB")
    assert pictures.pool.x.shape == (6, 3, 16, 16)
    with pytest.raises(ConfigError, match="must give pairs"):
        Task.from_dataset([(np.zeros(3), 0), (np.zeros(4), 1)])


@pytest.mark.parametrize(
    ("labels", "classes", "y"),
    [
        ([0.0, 1.0, 0.0], ("0", "1"), [0, 1, 0]),
        (["dog", "cat", "dog"], ("cat", "dog"), [1, 0, 1]),
        (torch.eye(3), ("0", "1", "2"), [0, 1, 2]),
        ([5, 6, 5], ("5", "6"), [0, 1, 0]),
        (torch.tensor([[1], [0], [1]]), ("0", "1"), [1, 0, 1]),
    ],
    ids=["whole floats", "text", "one-hot rows", "from 5 on", "a column"],
)
def test_a_datasets_labels_are_read_in_any_form_that_leaves_no_doubt(
    labels: list, classes: tuple[str, ...], y: list[int]
) -> None:
    pool = Task.from_dataset([(torch.zeros(4), label) for label in labels]).pool
    assert pool.spec.classes == classes
    assert pool.spec.problem.convert_targets(pool.y, 3, (4,), "y").tolist() == y


def test_a_datasets_labels_are_not_rounded_or_guessed() -> None:
    with pytest.raises(
        ConfigError, match=r"list: y must be one whole number per sample \(3,\), not float64\(3,\); amounts"
    ):
        Task.from_dataset([(torch.zeros(4), label) for label in (0.5, 1.5, 0.5)])


def png(path: Path, value: int) -> None:
    """A grey picture of 8 x 8."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"".join(b"\0" + bytes([value] * 8) for _ in range(8)))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def test_a_folder_of_images(tmp_path: Path) -> None:
    for i in range(6):
        png(tmp_path / ("light", "dark")[i % 2] / f"{i}.png", 200 - 30 * i)
    task = Task.from_folder(tmp_path, model="mlp")
    assert (task.spec.classes, task.spec.model, task.pool.x.shape) == (("dark", "light"), "mlp", (6, 32, 32, 3))


def test_names_stay_names() -> None:
    assert get_network_name("cnn") == "cnn"
    assert get_network_name("package.module:factory") == "package.module:factory"


class Nearest:
    """A problem as in a notebook."""

    outputs = (2,)
    targets = (2,)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).sum(dim=1)

    def score(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        return 1 - float(((outputs - targets) ** 2).mean() / targets.var())

    def decode(self, outputs: np.ndarray) -> list[str]:
        return [f"{across:.1f} {up:.1f}" for across, up in outputs]


def test_a_problem_of_a_notebook_is_learned_and_each_device_installs_one_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, users = rng.normal(size=(600, 6)).astype(np.float32), np.arange(600) % 4
    y = np.tanh(x @ rng.normal(size=(6, 2))) + 0.5 * (users % 2)[:, None]
    task = Task.from_arrays(x, y, problem=Nearest, users=users)
    assert task.spec.problem == Own(code=register_object(Nearest), outputs=(2,), targets=(2,))
    scenario = Scenario(task=register_object(task), partition="natural", rounds=6, hardware="none")
    found = {m: simulate(scenario, m, {}, 0, tmp_path / m, lambda _: None, m) for m in ("fedavg", "fedge")}
    assert found["fedge"].score > found["fedavg"].score + 0.05 > 0.5
    runtime = deploy.load(tmp_path / "fedge" / "device-0" / "bundles" / "1")
    said = runtime.predict(x[:5])
    assert said.weights.tolist() == [[1.0]] * 5
    assert said.outputs.shape == (5, 2)
    assert said.decode(Nearest) == Nearest().decode(said.outputs)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": None}, r"Broken-\d+ lacks loss"),
        ({"outputs": 3}, r"outputs must be a shape, such as \(14,\), not 3"),
        ({"outputs": ()}, r"write \(1,\)"),
        ({"targets": (3,)}, r"y must be numbers \(30, 3\), not float64\(30, 2\)"),
    ],
)
def test_a_problem_that_lacks_something_is_refused(changes: dict[str, object], text: str) -> None:
    parts = {n: getattr(Nearest, n) for n in ("outputs", "targets", "loss", "score")} | changes
    kind = type("Broken", (), {name: part for name, part in parts.items() if part is not None})
    with pytest.raises(ConfigError, match=text):
        Task.from_arrays(X, RNG.random((30, 2)), problem=kind)


def test_a_problem_is_given_as_its_class() -> None:
    with pytest.raises(ConfigError, match=r"a problem is a name or a class .* not Nearest"):
        Task.from_arrays(X, RNG.random((30, 2)), problem=Nearest())  # type: ignore[arg-type]


def test_code_that_nobody_named_here_scores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle or a task that came from elsewhere names it; not even its module is imported."""
    (tmp_path / "not_mine.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    problem = Own(code="not_mine:Problem", outputs=(2,), targets=(2,))
    assert problem.compute_score((np.zeros((3, 2)),), np.zeros((3, 2))) is None


def test_whole_targets_of_a_problem_stay_whole_on_every_device() -> None:
    problem = Task.from_arrays(X, np.ones((30, 2), np.int64), problem=Nearest).spec.problem
    found = problem.convert_targets(np.full((4, 2), 2.0), 4, (5,), "y")
    assert (found.dtype, problem.make_no_targets((5,)).dtype) == (np.int64, np.int64)
    with pytest.raises(ConfigError, match="y must be whole numbers"):
        problem.convert_targets(np.full((4, 2), 0.5), 4, (5,), "y")
    with pytest.raises(ConfigError, match="-100 in a sample, which marks padding"):
        problem.convert_targets(np.full((4, 2), -100), 4, (5,), "y")


def test_what_a_users_loss_returns_is_checked() -> None:
    class Wrong(Nearest):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().loss(outputs, targets).mean()

    problem = Task.from_arrays(X, RNG.random((30, 2)), problem=Wrong).spec.problem
    with pytest.raises(ConfigError, match=r"loss must return a loss for each of 4 samples, not \(\)"):
        compute_losses(problem, *(torch.zeros(4, n) for n in (2, 5, 2)))


DATASETS: dict[str, tuple[str | type, list, str]] = {
    "numbers": ("regression", [0.5, 1.5, 2.5, 1.0], "regression"),
    "vectors": ("regression", [[0.5, 1], [1, 0], [2, 1], [3, 3]], "regression"),
    "several labels": ("multi-label", [[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]], "multi-label"),
    "masks": ("segmentation", [np.eye(16, dtype=np.uint8)] * 4, "segmentation"),
    "a problem of one's own": (Nearest, [[0.5, 1], [1, 0], [2, 1], [3, 3]], "own"),
}


@pytest.mark.parametrize(("problem", "targets", "kind"), DATASETS.values(), ids=DATASETS)
def test_a_dataset_has_targets_of_every_problem(problem: Any, targets: list, kind: str) -> None:
    x = torch.rand(4, 3, 16, 16) if kind == "segmentation" else torch.rand(4, 5)
    pool = Task.from_dataset(
        [(row, torch.as_tensor(y)) for row, y in zip(x, targets, strict=True)], problem=problem
    ).pool
    assert pool.spec.problem.kind == kind
    found = pool.spec.problem.convert_targets(pool.y, 4, pool.spec.input_shape, "y")
    assert len(found) == 4
    assert found.shape[1:] == pool.spec.problem.get_target_shape(pool.spec.input_shape)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([(np.zeros(3), 0), (np.zeros(4), 1)], "pad shorter ones, with a mask as a further channel"),
        ([(np.zeros(3), np.zeros(4), 0)] * 2, "concatenate several inputs of a sample"),
        ([((np.zeros(3), np.zeros(4)), 0)] * 2, "concatenate several inputs of a sample"),
        ([(np.zeros(3), {"boxes": 1, "labels": 2})] * 2, "targets of several parts go into one vector"),
        ([({"left": 1, "right": 2}, 0)] * 2, "make an array of what is in the dictionary"),
    ],
)
def test_several_inputs_and_lengths_are_refused_with_what_to_do(samples: list, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Task.from_dataset(samples)


def test_arrays_of_several_lengths_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="pad shorter ones, with a mask"):
        Task.from_arrays([[1, 2], [1, 2, 3]], [0, 1])
