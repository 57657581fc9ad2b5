from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from fedge import models
from fedge.errors import ConfigError
from fedge.task import TaskSpec
from fedge.tasks import task_spec, write_task
from fedge.tasks.specs import BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks_have_a_network(name: str) -> None:
    spec = task_spec(name, None)
    assert spec.name == name
    assert models.initial(spec, 0)[0].n_params > 0


def test_digits_have_2410_parameters() -> None:
    assert models.initial(task_spec("digits", None), 0)[0].n_params == 2410


def test_a_written_task_is_read_again(tmp_path: Path) -> None:
    write_task(task_spec("mnist"), tmp_path / "task.json")
    assert task_spec(str(tmp_path / "task.json")) == task_spec("mnist")


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
            task_spec("task.json", allow=allow)
    assert not (tmp_path / "ran").exists()
    assert getattr(task_spec("task.json", allow=("a:b", code)), field) == code


def test_what_must_be_allowed_is_said_in_one_piece(tmp_path: Path) -> None:
    task = msgspec.structs.replace(BUILT_IN["digits"], name="own.task:Mine", model="own.task:network")
    write_task(task, tmp_path / "task.json")
    with pytest.raises(ConfigError, match=r"run here: own\.task:network; .* --allow own\.task:Mine,own\.task:network$"):
        task_spec(str(tmp_path / "task.json"), allow=["own.task:Mine"])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"name": "x"}', b"\xff"])
def test_a_file_that_is_no_task(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        task_spec(str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match=r"none\.json"):
        task_spec(str(tmp_path / "none.json"))


def test_images_describe_themselves(tmp_path: Path) -> None:
    for name in ("dog/a.png", "cat/b.png"):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(np.zeros((5, 5, 3), np.uint8)).save(tmp_path / name)
    spec = task_spec("image-folder", tmp_path)
    assert (spec.classes, spec.input_shape, spec.model) == (("cat", "dog"), (3, 32, 32), "cnn")
    assert spec.preprocessing.image_mode == "RGB"


def test_arrays_describe_themselves(tmp_path: Path) -> None:
    x = np.repeat([1.0, 5.0], 60).reshape(10, 3, 4)
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1] * 5, classes=["sit", "stand"])
    spec = task_spec("arrays", tmp_path / "a.npz")
    assert (spec.classes, spec.input_shape, spec.model) == (("sit", "stand"), (3, 4), "mlp")
    assert (spec.preprocessing.mean, spec.preprocessing.std) == (3.0, 2.0)


def test_constant_arrays_and_image_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((4, 1, 16, 16), 7, np.uint8), y=[0, 1, 0, 1])
    spec = task_spec("arrays", tmp_path / "a.npz")
    assert (spec.model, spec.preprocessing.std) == ("cnn", 1.0)


def test_without_data_or_with_a_wrong_name() -> None:
    for name in ("image-folder", "arrays"):
        with pytest.raises(ConfigError, match="describes itself by its data"):
            task_spec(name, None)
    with pytest.raises(ConfigError, match="unknown task cifar"):
        task_spec("cifar", None)


def test_a_task_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_task.py").write_text(
        "from fedge.task import TaskSpec\n"
        "class Mine:\n"
        "    def spec(self, data):\n"
        "        return TaskSpec(name='any', classes=('a', 'b'), input_shape=(2,), model='mlp')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = task_spec("my_own_task:Mine", None)
    assert spec == msgspec.structs.replace(
        TaskSpec(name="", classes=("a", "b"), input_shape=(2,), model="mlp"), name="my_own_task:Mine"
    )
