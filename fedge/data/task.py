"""The task description that both sides agree on. It needs no torch, unlike `fedge.tasks` and `fedge.models`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from fedge.data.problems.classification import Classification
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.names import PRINTABLE, Word
from fedge.data.problems.own import Own
from fedge.data.problems.problem import Problem
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import Segmentation
from fedge.data.text import Text
from fedge.system.moved import alias_members

INPUT: Final = "x"


LOGITS: Final = "logits"
"""Name of the output of branch.onnx."""


TRAIN, VALIDATION, TEST = range(3)
"""Values of `split`, which say to which part of the data a sample belongs."""


class Column(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A column that becomes network inputs: a number, (value - mean) / std, or one-hot `categories`.

    `missing` replaces an empty cell; if None, a row with an empty cell is refused.
    """

    name: Word
    mean: float = 0.0
    std: Annotated[float, Meta(gt=0)] = 1.0
    categories: tuple[Word, ...] = ()
    missing: float | Word | None = None

    @property
    def width(self) -> int:
        """The number of network inputs that the column becomes."""
        return len(self.categories) or 1


class Target(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A column of numbers to predict, with the mean and the deviation by which all machines scale it."""

    name: Word
    mean: float = 0.0
    std: Annotated[float, Meta(gt=0)] = 1.0
    unit: str | UnsetType = UNSET


class Schema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The meaning of a table's columns (`fedge.data.tables`).

    What is asked follows from what the schema names:

    - `target` and `classes`: classification; the column `target` holds one of the classes.
    - `targets`: regression; each of these columns holds numbers.
    - `labels`: several labels; each label is a column of 0 and 1 or, with `target`, this one column holds the labels of
      a row, with semicolons between them.
    - nothing of these: reconstruction, perhaps with a column `target` of marks, 1 for a known anomaly.

    `sensitive` is the column of marks, 0 or 1; `user` the column of the person behind a row, for `--partition natural`.
    `ignore` lists columns that are allowed but unused.
    """

    target: Word | UnsetType = UNSET
    classes: Annotated[tuple[Word, ...], Meta(min_length=2)] | UnsetType = UNSET
    columns: Annotated[tuple[Column, ...], Meta(min_length=1)]
    sensitive: Word | None = None
    user: Word | None = None
    ignore: tuple[Word, ...] = ()
    targets: Annotated[tuple[Target, ...], Meta(min_length=1)] | UnsetType = UNSET
    labels: Annotated[tuple[Word, ...], Meta(min_length=1)] | UnsetType = UNSET

    @property
    def width(self) -> int:
        """The number of network inputs."""
        return sum(column.width for column in self.columns)

    @property
    def target_columns(self) -> tuple[str, ...]:
        """The names of the columns that say what is to be predicted; none if there is nothing but the inputs."""
        if self.target:
            return (self.target,)
        return tuple(target.name for target in self.targets or ()) or tuple(self.labels or ())


HEAD_CLASS: Final = "head_class"
"""Name of the entry in a task's `model_options` that says what a method has put in the place of the network's head."""

Positive = Annotated[float, Meta(gt=0)]


class Preprocessing(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The conversion of a raw sample into a model input: (x / scale - mean) / std, after images are resized.

    `mean` and `std` are one number each, or one for each column of samples (columns,) or channel of (channels, ...).
    `image_mode` is "L" for grey images, "RGB" for colour, None for arrays. With `table`, samples are rows, and each
    column has its own mean and std. With `text`, samples are texts, or their tokens.
    """

    scale: Positive = 1.0
    mean: float | tuple[float, ...] = 0.0
    std: Positive | tuple[Positive, ...] = 1.0
    image_mode: str | None = None
    table: Schema | UnsetType = UNSET  # omitted for other tasks, whose fingerprints are older than tables
    text: Text | UnsetType = UNSET


Asked = MultiLabel | Regression | Segmentation | Reconstruction | Own
"""Problems that a task names; single-label classification is told by its classes."""


@alias_members(fingerprint="compute_fingerprint")
class TaskSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A task: problem, input and network. Coordinator and agents must have tasks of equal fingerprints.

    `classes` are those of single-label classification; another problem is `asked`, and then there are no classes here.
    """

    name: Annotated[str, Meta(pattern=PRINTABLE)]
    classes: tuple[Annotated[str, Meta(pattern=PRINTABLE)], ...] = ()
    input_shape: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4)]  # without batch, channels first
    model: str  # "mlp", "cnn", or the user's own "package.module:factory"
    model_options: dict[str, int | float | str | bool] = {}
    preprocessing: Preprocessing = Preprocessing()
    first_label: int | UnsetType = UNSET  # number of the first class in files, omitted if it is 0
    asked: Asked | UnsetType = field(default=UNSET, name="problem")  # omitted for single-label classification
    augment: tuple[Word, ...] | UnsetType = UNSET  # changes of training samples (`fedge.data.augmentation`)

    def __post_init__(self) -> None:
        if isinstance(self.asked, UnsetType) and len(self.classes) < 2:
            raise ValueError("a task has at least two classes, or another problem")
        if not isinstance(self.asked, UnsetType) and self.classes:
            raise ValueError(f"the classes of {self.asked.NAME} are part of the problem")
        table = self.preprocessing.table
        if table and self.input_shape != (table.width,):
            raise ValueError(f"the table makes {table.width} columns, but the network takes {self.input_shape}")
        for name in ("mean", "std"):
            own = getattr(self.preprocessing, name)
            if isinstance(own, tuple) and len(own) != self.input_shape[0]:
                raise ValueError(f"{name} holds {len(own)} numbers, but the network takes {self.input_shape}")

    @property
    def problem(self) -> Problem:
        """What is asked: single-label classification unless the task says another problem."""
        if not isinstance(self.asked, UnsetType):
            return self.asked
        return Classification(classes=self.classes, first=self.first_label or 0)

    @property
    def n_classes(self) -> int:
        """C, the number of classes, at least 2."""
        return len(self.classes)

    @property
    def code(self) -> tuple[str, ...]:
        """The code that the task calls, as package.module:name: its class, its network, and its augmentation."""
        named = (self.name, self.model, self.problem.request, self.head_class, *(self.augment or ()))
        return tuple(dict.fromkeys(path for path in named if ":" in path))

    @property
    def head_class(self) -> str:
        """What a method has put in the place of the network's head (`fedge.models.build`); "" if nothing."""
        return str(self.model_options.get(HEAD_CLASS, ""))

    def with_head_class(self, name: str) -> TaskSpec:
        """Return the task with another head in its network, or with the network's own if the name is empty."""
        others = {key: value for key, value in self.model_options.items() if key != HEAD_CLASS}
        return replace(self, model_options={**others, HEAD_CLASS: name} if name else others)

    def compute_fingerprint(self) -> str:
        """Return a hash in 16 hexadecimal digits of all but the head that a method puts into the network."""
        import hashlib  # 3.5 MB of OpenSSL: import only when hashing

        own = self.with_head_class("") if self.head_class else self
        return hashlib.sha256(msgspec.json.encode(own, order="deterministic")).hexdigest()[:16]


def list_differences(old: TaskSpec, new: TaskSpec) -> list[str]:
    """List in words what a task has that another one had not."""
    found = []
    if gone := [name for name in old.classes if name not in new.classes]:
        found.append(f"without class {', '.join(gone)}")
    if added := [name for name in new.classes if name not in old.classes]:
        found.append(f"with class {', '.join(added)}")
    if not gone and not added and old.classes != new.classes:
        found.append("the same classes in another order")
    if old.asked != new.asked:
        found.append(_describe_problem(old.problem, new.problem))
    words = {"name": "name", "input_shape": "input", "model": "network", "model_options": "options of the network"}
    for name, word in words.items():
        before, now = (getattr(task, name) for task in (old, new))
        if before != now:
            found.append(f"the {word} {_format_value(now)} in place of {_format_value(before)}")
    if old.augment != new.augment:
        before, now = (", ".join(task.augment or ()) or "none" for task in (old, new))
        found.append(f"the augmentation {now} in place of {before}")
    if old.preprocessing != new.preprocessing:
        fields = old.preprocessing.__struct_fields__
        other = [n for n in fields if getattr(old.preprocessing, n) != getattr(new.preprocessing, n)]
        found.append(f"another preprocessing ({', '.join(other)})")
    return found


def _describe_problem(before: Problem, now: Problem) -> str:
    """Describe in words another problem than before."""
    if before.NAME != now.NAME:
        return f"{now.NAME} in place of {before.NAME}"
    fields = [name for name in now.__struct_fields__ if getattr(before, name) != getattr(now, name)]
    return f"another {now.NAME} ({', '.join(fields)})"


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in sorted(value.items())) or "none"
    return str(value)


def choose_gate_pool(input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the gate's pooling window for images, which leaves at most 8 x 8 numbers (scmoe_pfl.md 11.1).

    The window is (1, 1), no pooling, for small images and for inputs that are not (channels, height, width).
    """
    if len(input_shape) != 3:
        return (1, 1)
    return (-(-input_shape[1] // 8), -(-input_shape[2] // 8))


MAX_POOL: Final = 400
"""Most private modules of a pool, since an order names each of them in about 100 bytes."""
