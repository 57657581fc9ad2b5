from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from PIL import Image

from fedge.data.preprocessing import preprocess
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.tasks import load_task, write_task
from fedge.tasks.problems import Stated
from fedge.tasks.specs import BUILT_IN, MOST_SCALES, make_array_spec


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks_have_a_network(name: str) -> None:
    spec = load_task(name, None)
    assert spec.name == name
    assert build.make_initial_model(spec, 0)[0].n_params > 0


def test_digits_have_2410_parameters() -> None:
    assert build.make_initial_model(load_task("digits", None), 0)[0].n_params == 2410


def test_a_written_task_is_read_again(tmp_path: Path) -> None:
    write_task(load_task("mnist"), tmp_path / "task.json")
    assert load_task(str(tmp_path / "task.json")) == load_task("mnist")


@pytest.mark.parametrize("field", ["name", "model"])
@pytest.mark.parametrize("code", ["os:fork", "my_evil_module:run", "here:Net-1"])
def test_a_file_names_no_code_that_its_reader_did_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, code: str
) -> None:
    (tmp_path / "my_evil_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(*_): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_task(msgspec.structs.replace(BUILT_IN["digits"], **{field: code}), tmp_path / "task.json")
    for allow in ((), ("",), (code[:-1],), ("my_evil_module",)):
        with pytest.raises(ConfigError, match=f"names code that would be run here: {code}.* --allow {code}$"):
            load_task("task.json", allow=allow)
    assert not (tmp_path / "ran").exists()
    assert getattr(load_task("task.json", allow=("a:b", code)), field) == code


def test_what_must_be_allowed_is_said_in_one_piece(tmp_path: Path) -> None:
    task = msgspec.structs.replace(BUILT_IN["digits"], name="own.task:Mine", model="own.task:network")
    write_task(task, tmp_path / "task.json")
    with pytest.raises(ConfigError, match=r"run here: own\.task:network; .* --allow own\.task:Mine,own\.task:network$"):
        load_task(str(tmp_path / "task.json"), allow=["own.task:Mine"])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"name": "x"}', b"\xff"])
def test_a_file_that_is_no_task(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_task(str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_task(str(tmp_path / "none.json"))


def test_images_describe_themselves(tmp_path: Path) -> None:
    for name in ("dog/a.png", "cat/b.png"):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(np.zeros((5, 5, 3), np.uint8)).save(tmp_path / name)
    spec = load_task("image-folder", tmp_path)
    assert (spec.classes, spec.input_shape, spec.model) == (("cat", "dog"), (3, 32, 32), "cnn")
    assert spec.preprocessing.image_mode == "RGB"


def test_arrays_describe_themselves(tmp_path: Path) -> None:
    x = np.repeat([1.0, 5.0], 60).reshape(10, 3, 4)
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1] * 5, classes=["sit", "stand"])
    spec = load_task("arrays", tmp_path / "a.npz")
    assert (spec.classes, spec.input_shape, spec.model) == (("sit", "stand"), (3, 4), "mlp")
    assert (spec.preprocessing.mean, spec.preprocessing.std) == (3.0, 2.0)


def test_constant_arrays_and_image_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((4, 1, 16, 16), 7, np.uint8), y=[0, 1, 0, 1])
    spec = load_task("arrays", tmp_path / "a.npz")
    assert (spec.model, spec.preprocessing.std) == ("cnn", 1.0)


STATED = Stated(("a", "b"), UNSET, np.zeros(0, np.int64))
RNG = np.random.default_rng(0)
SIGNAL = RNG.standard_normal((400, 3))


def inputs(x: np.ndarray) -> np.ndarray:
    """What the network sees of samples that describe their task."""
    return preprocess(make_array_spec("t", x, STATED), x)


@pytest.mark.parametrize("offset", [0.0, 101349.0, -2e8])
@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e6])
def test_columns_are_standardised_each_whatever_their_offset_and_unit(offset: float, unit: float) -> None:
    wanted = (SIGNAL - SIGNAL.mean(axis=0)) / SIGNAL.std(axis=0)
    x = SIGNAL * [unit, 1.0, 1.0] + [offset, 0.0, offset]
    np.testing.assert_allclose(inputs(x), wanted, atol=1e-3)
    np.testing.assert_allclose(inputs(x[:, :1]), wanted[:, :1], atol=1e-3)


def test_an_offset_of_samples_that_are_no_columns_is_kept_in_full() -> None:
    windows = SIGNAL[:399].reshape(-1, 1, 21)
    spec = make_array_spec("t", windows + 101349, STATED)
    assert spec.preprocessing.mean == pytest.approx(windows.mean() + 101349, abs=1e-9)
    np.testing.assert_allclose(inputs(windows + 101349), (windows - windows.mean()) / windows.std(), atol=1e-3)


def test_channels_that_one_scale_would_leave_nothing_of_get_their_own() -> None:
    windows = RNG.standard_normal((50, 2, 30))
    pressure_and_acceleration = windows + np.array([[101349.0], [0.0]])
    assert isinstance(make_array_spec("t", pressure_and_acceleration, STATED).preprocessing.mean, tuple)
    assert inputs(pressure_and_acceleration).std(axis=(0, 2)) == pytest.approx([1, 1], abs=1e-3)
    assert isinstance(make_array_spec("t", windows + np.array([[3.0], [0.0]]), STATED).preprocessing.mean, float)


def test_columns_beyond_what_a_manifest_holds_share_a_scale() -> None:
    spec = make_array_spec("t", RNG.random((2, MOST_SCALES + 1)), STATED)
    assert isinstance(spec.preprocessing.mean, float)


def test_a_constant_column_is_not_blown_up() -> None:
    x = np.stack([np.full(30, 0.1), RNG.random(30)], axis=1)  # its deviation by numpy is 1e-17
    spec = make_array_spec("t", x, STATED)
    x[0, 0] = 0.2
    assert np.abs(preprocess(spec, x)).max() < 10


def test_four_digits_stand_where_more_would_change_nothing() -> None:
    x = RNG.integers(0, 256, (20, 1, 8, 8)).astype(np.uint8)
    spec = make_array_spec("t", x, STATED)
    assert (spec.preprocessing.mean, spec.preprocessing.std) == (float(f"{x.mean():.4g}"), float(f"{x.std():.4g}"))


@pytest.mark.parametrize("fill", [9.96920996838687e36, -3e38, 1e20])
@pytest.mark.parametrize("shape", [(400, 3), (100, 3, 4)])
def test_a_fill_value_beside_ordinary_numbers_is_refused(fill: float, shape: tuple[int, ...]) -> None:
    x = np.resize(SIGNAL, shape)
    x[(17, 2, *[1] * (len(shape) - 2))] = fill
    with pytest.raises(ConfigError, match=r"sample 17, (column 2|place \(2, 1\)) .* so large that all others look"):
        make_array_spec("t", x, STATED)
    assert make_array_spec("t", np.exp(3 * SIGNAL), STATED).n_classes == 2  # a heavy tail is no fill value


def test_without_data_or_with_a_wrong_name() -> None:
    for name in ("image-folder", "arrays"):
        with pytest.raises(ConfigError, match="describes itself by its data"):
            load_task(name, None)
    with pytest.raises(ConfigError, match="unknown task cifar"):
        load_task("cifar", None)


def test_a_task_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_task.py").write_text(
        "from fedge.data.task import TaskSpec\n"
        "class Mine:\n"
        "    def spec(self, data):\n"
        "        return TaskSpec(name='any', classes=('a', 'b'), input_shape=(2,), model='mlp')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = load_task("my_own_task:Mine", None)
    assert spec == msgspec.structs.replace(
        TaskSpec(name="", classes=("a", "b"), input_shape=(2,), model="mlp"), name="my_own_task:Mine"
    )


FAILING_TASKS = """
class Making:
    def __init__(self): raise KeyError("cfg")
class Describing:
    def spec(self, data): return 1 / 0
class Exiting:
    def spec(self, data): raise SystemExit("no licence")
class Other:
    def spec(self, data): return {"classes": 3}
class WithoutData:
    def spec(self): return None
class Nothing: ...
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Making", "failing_tasks:Making fails with KeyError: 'cfg' (failing_tasks.py, line 3)"),
        (
            "Describing",
            "failing_tasks:Describing.spec fails with ZeroDivisionError: division by zero (failing_tasks.py,",
        ),
        ("Exiting", "failing_tasks:Exiting.spec fails with SystemExit: no licence (failing_tasks.py, line 7)"),
        ("Other", "failing_tasks:Other.spec returned dict, not a fedge.data.task.TaskSpec"),
        ("WithoutData", "failing_tasks:WithoutData.spec fails with TypeError: WithoutData.spec() takes 1 positional"),
        ("Nothing", "failing_tasks:Nothing.spec fails with AttributeError: 'Nothing' object has no attribute 'spec'"),
    ],
)
def test_a_class_of_the_users_that_fails_is_told_in_a_sentence(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_tasks.py").write_text(FAILING_TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load_task(f"failing_tasks:{name}")
    assert str(refused.value).startswith(told)
