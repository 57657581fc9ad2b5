import msgspec
import pytest

from fedge.task import Preprocessing, TaskSpec

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(4,), model="mlp", model_options={"hidden": 3, "bias": True})


def test_number_of_classes() -> None:
    assert TASK.n_classes == 2


def test_equal_tasks_have_equal_fingerprints_whatever_the_order_of_their_options() -> None:
    same = msgspec.structs.replace(TASK, model_options={"bias": True, "hidden": 3})
    assert same.fingerprint() == TASK.fingerprint()
    assert len(TASK.fingerprint()) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"name": "u"},
        {"classes": ("b", "a")},
        {"input_shape": (2, 2)},
        {"model": "cnn"},
        {"model_options": {"hidden": 4, "bias": True}},
        {"preprocessing": Preprocessing(scale=255.0)},
        {"preprocessing": Preprocessing(image_mode="L")},
    ],
)
def test_any_change_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert msgspec.structs.replace(TASK, **change).fingerprint() != TASK.fingerprint()


def test_a_task_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(TASK), type=TaskSpec) == TASK


@pytest.mark.parametrize(
    "change",
    [b'"classes":["a"]', b'"input_shape":[]', b'"input_shape":[1,2,3,4]', b'"unknown":1', b'"preprocessing":{"std":0}'],
)
def test_a_task_that_cannot_be_is_refused(change: bytes) -> None:
    text = b'{"name":"t","model":"mlp","classes":["a","b"],"input_shape":[4],' + change + b"}"
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=TaskSpec)


@pytest.mark.parametrize("changes", [{"name": "a\x1b[2J"}, {"classes": ["a", "b\x9b2J"]}, {"classes": ["a\n", "b"]}])
def test_names_that_command_a_terminal_are_refused(changes):
    task = {"name": "t", "classes": ["a", "é 猫"], "input_shape": [2], "model": "mlp"}
    msgspec.convert(task, TaskSpec)
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.convert(task | changes, TaskSpec)
