import msgspec
import pytest

from fedge.data.classes import has_grown
from fedge.data.task import Preprocessing, TaskSpec, list_differences

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(4,), model="mlp", model_options={"hidden": 3, "bias": True})


def test_number_of_classes() -> None:
    assert TASK.n_classes == 2


def test_equal_tasks_have_equal_fingerprints_whatever_the_order_of_their_options() -> None:
    same = msgspec.structs.replace(TASK, model_options={"bias": True, "hidden": 3})
    assert same.compute_fingerprint() == TASK.compute_fingerprint()
    assert len(TASK.compute_fingerprint()) == 16


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
    assert msgspec.structs.replace(TASK, **change).compute_fingerprint() != TASK.compute_fingerprint()


def test_the_head_that_a_method_puts_into_the_network_is_no_part_of_the_fingerprint() -> None:
    """So devices of the task take part, whatever the method."""
    wide = TASK.with_head_class("policy")
    assert wide.model_options == {**TASK.model_options, "head_class": "policy"}
    assert wide.compute_fingerprint() == TASK.compute_fingerprint()
    assert wide.with_head_class("valve").head_class == "valve"
    assert wide.with_head_class("") == TASK
    assert has_grown(TASK, wide)


def test_a_task_survives_json() -> None:
    columns = Preprocessing(mean=(101349.00000000001, 0.1, 0.0, 1 / 3), std=(1.0, 0.2, 5e-324, 1.0))
    for task in (TASK, msgspec.structs.replace(TASK, preprocessing=columns)):
        assert msgspec.json.decode(msgspec.json.encode(task), type=TaskSpec) == task


def test_a_task_of_version_0_1_is_read_and_has_the_fingerprint_that_it_had() -> None:
    text = (
        b'{"name":"arrays","classes":["0","1"],"input_shape":[4],"model":"mlp","model_options":{},'
        b'"preprocessing":{"scale":1.0,"mean":101300,"std":1.228,"image_mode":null}}'
    )
    task = msgspec.json.decode(text, type=TaskSpec)
    assert (task.preprocessing.mean, task.preprocessing.std) == (101300.0, 1.228)
    assert task.compute_fingerprint() == "b547269c638d072f"


@pytest.mark.parametrize(
    "change",
    [
        b'"classes":["a"]',
        b'"input_shape":[]',
        b'"input_shape":[1,2,3,4,5]',
        b'"unknown":1',
        b'"preprocessing":{"std":0}',
        b'"preprocessing":{"mean":[0,1]}',
        b'"preprocessing":{"std":[1,1,1,0]}',
    ],
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


def test_what_differs_between_two_tasks_is_said_in_words() -> None:
    digits = TaskSpec(name="digits", classes=("0", "1"), input_shape=(1, 8, 8), model="mlp")
    assert list_differences(digits, digits) == []
    other = msgspec.structs.replace(
        digits,
        classes=("1", "2"),
        input_shape=(3, 8, 8),
        model="cnn",
        model_options={"hidden": 64},
        preprocessing=Preprocessing(scale=255.0),
    )
    assert list_differences(digits, other) == [
        "without class 0",
        "with class 2",
        "the input 3 x 8 x 8 in place of 1 x 8 x 8",
        "the network cnn in place of mlp",
        "the options of the network hidden=64 in place of none",
        "another preprocessing (scale)",
    ]
    turned = msgspec.structs.replace(digits, classes=("1", "0"))
    assert list_differences(digits, turned) == ["the same classes in another order"]
