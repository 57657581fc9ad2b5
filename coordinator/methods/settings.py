"""Settings of every method, and the types with which commands declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from coordinator.aggregation.protection import Protection
from coordinator.methods.promises import Shared
from fedge.data.problems.problem import Problem
from fedge.errors import ConfigError
from fedge.settings import CODE
from fedge.steps.sgd import Optimizer, Sgd
from fedge.system.hardware import Processor
from fedge.system.text import Heading
from fedge.tensors.layout import Codec
from fedge.wire.messages import Share

Option = int | float | str | bool


def require_fitting_recipe(sgd: Sgd, protection: Protection) -> None:
    """Refuse, before a run, a recipe whose parts do not fit each other or the guards.

    Raises:
        ConfigError: the text says what to give instead.
    """
    adaptive = sgd.optimizer in {"adam", "adamw"}
    if sgd.nesterov and adaptive:
        raise ConfigError(f"--nesterov is for --optimizer sgd, and changes nothing with {sgd.optimizer}: leave it out")
    if sgd.nesterov and not sgd.momentum:
        raise ConfigError("--nesterov needs a momentum: give --momentum, such as 0.9, or leave --nesterov out")
    if sgd.optimizer == "adamw" and not sgd.weight_decay:
        raise ConfigError(
            "--optimizer adamw with --weight-decay 0 is adam: say so, or give a weight decay, such as 0.01"
        )
    if protection.dp and sgd.clip_norm:
        raise ConfigError(
            "with differential privacy the gradient of each sample is clipped already: give --dp-clip in place of "
            "--clip-norm"
        )
    if protection.dp and sgd.class_weights:
        raise ConfigError(
            "--class-weights balanced counts a device's labels, and the noise of differential privacy does not hide "
            "these counts: leave it out"
        )


def require_known_by(problem: Problem, sgd: Sgd) -> None:
    """Refuse, before a run, parts of a recipe that need classes, for a problem without.

    Raises:
        ConfigError: the text names these parts.
    """
    given = {"--label-smoothing": sgd.label_smoothing, "--class-weights": sgd.class_weights}
    if not problem.CLASSED and (there := " and ".join(name for name, value in given.items() if value)):
        raise ConfigError(f"leave out {there}: for classification, not for {problem.NAME}")


class MethodSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of every method.

    `rounds`: the number for which a method plans. `first`: the round after which the present campaign began; round
    numbers go on over campaigns. `last`: the last round of training if a run continues after its end; if None, `first`
    + `rounds`. `train_on`: the processor for the server's own networks.
    """

    rounds: Rounds = 30
    first: Rounds = 0
    last: Rounds | None = None
    participation: Participation = 1.0
    min_reports: MinReports = 1
    seed: Annotated[int, Meta(ge=0)] = 0
    sgd: Sgd = Sgd()
    schedule: Schedule = "constant"
    patience: Patience = None
    codec: Encoding = Codec.INT8
    down: Down = "int8"
    train_on: Processor = Processor.CPU
    protection: Protection = Protection()
    fine_tune: bool = False  # "+ft": every device fine-tunes its model before installing it
    options: dict[str, Option] = {}  # the method's own, by the names of its `Options`

    def __post_init__(self) -> None:
        require_fitting_recipe(self.sgd, self.protection)

    def get_shared(self) -> dict[Shared, tuple[object, object]]:
        """Return the settings that a method may not heed, each with its default (masked sums: only means)."""
        average = "mean" if self.protection.masking else DEFAULT.protection.average
        return {
            "participation": (self.participation, DEFAULT.participation),
            "min_reports": (self.min_reports, DEFAULT.min_reports),
            "average": (self.protection.average, average),
        }


DEFAULT: Final = MethodSettings()
"""Default settings, whose values are the defaults of the commands."""


ROUNDS_HELP: Final = "Training takes this many rounds."


Rounds = Annotated[int, Meta(ge=0), Heading.TRAINING, ROUNDS_HELP]


Patience = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Heading.TRAINING,
    "Training ends after this many rounds without a better validation score, and the best state is kept; by default it "
    "takes all rounds.",
]


Participation = Annotated[float, Meta(gt=0, le=1), Heading.TRAINING, "This share of the devices is asked in a round."]


MinReports = Annotated[int, Meta(ge=1), Heading.TRAINING, "A round with fewer updates than this changes nothing."]


Encoding = Annotated[Codec, Heading.UPDATES, "Updates are sent in this encoding."]


LocalSteps = Annotated[int, Meta(ge=1, le=10**7), Heading.TRAINING, "A device takes this many steps per participation."]


LocalEpochs = Annotated[
    Annotated[int, Meta(ge=1, le=10**5)] | None,
    Heading.TRAINING,
    "A device makes this many passes over its own samples per participation, instead of the steps.",
]


BatchSize = Annotated[int, Meta(ge=1, le=2**20), Heading.TRAINING, "A step uses this many samples."]


OptimizerName = Annotated[
    Optimizer, Heading.TRAINING, "Devices learn by this optimizer; its state begins afresh in each participation."
]


LearningRate = Annotated[
    Annotated[float, Meta(gt=0, le=100)] | None,
    Heading.TRAINING,
    "The devices' optimizer has this learning rate; by default it is 0.05 with sgd, and 0.003 with adam and adamw.",
]


Schedule = Annotated[
    Literal["constant", "cosine", "steps"],
    Heading.TRAINING,
    "Over the rounds the learning rate stays, or falls along half a cosine, or in steps. Steps are a tenth after half "
    "of the rounds, and a hundredth after three quarters.",
]


Momentum = Annotated[
    float, Meta(ge=0, lt=1), Heading.TRAINING, "The devices' SGD has this momentum; with adam and adamw it is beta1."
]


Nesterov = Annotated[bool, Heading.TRAINING, "The momentum of SGD is Nesterov's."]


ClipNorm = Annotated[
    Annotated[float, Meta(gt=0, le=1e6)] | None,
    Heading.TRAINING,
    "The gradient of a step is shortened to this L2 norm if it is longer.",
]


LabelSmoothing = Annotated[
    float, Meta(ge=0, lt=1), Heading.TRAINING, "This share of each label is spread evenly over all classes."
]


Weighting = Annotated[
    Literal["equal", "balanced"],
    Heading.TRAINING,
    "In the loss all samples count the same, or all classes that a device has.",
]


Down = Annotated[
    Literal["int8", "float32"],
    Heading.UPDATES,
    "Models reach devices that have an earlier one as a difference in int8, or whole.",
]


WeightDecay = Annotated[
    Share | None,
    Heading.TRAINING,
    "The devices' optimizer has this weight decay, a factor of the weights; by default it is 0, and 0.01 with adamw.",
]


MethodName = Annotated[
    str, CODE, Heading.METHOD, "The method is one of `fedge methods`; NAME+ft fine-tunes at the end."
]
"""Settings of all methods that the commands share; those of local training have the bounds of `Sgd`."""


RATES: Final[Mapping[Optimizer, float]] = {"sgd": Sgd().learning_rate, "adam": 0.003, "adamw": 0.003}
"""Default learning rates. FedAvg with Adam on digits (10 devices, 30 rounds of 10 steps) reaches 92.5 % with 0.001,
95.9 % with 0.003 and 96.8 % with 0.01, with SGD 96.2 %; large networks want less than small ones."""
DECAYS: Final[Mapping[Optimizer, float]] = {"sgd": 0.0, "adam": 0.0, "adamw": 0.01}
"""Default weight decays."""


def make_method_settings(given: Struct, seed: int, options: Mapping[str, Option]) -> MethodSettings:
    """Make a method's settings from those of a command: rounds, learning and codec have equal names.

    Raises:
        ConfigError: both steps and epochs are given, or parts of the recipe do not fit.
    """
    found = msgspec.structs.asdict(given)
    names = ("rounds", "patience", "participation", "min_reports", "schedule", "codec", "down", "train_on")
    own = {name: found[name] for name in names if name in found}
    guards = {n: found[n] for n in Protection.__struct_fields__ if n in found}
    return MethodSettings(
        seed=seed, sgd=make_recipe(found), options=dict(options), protection=Protection(**guards), **own
    )


def make_recipe(found: Mapping[str, Any]) -> Sgd:
    """Make the recipe from the settings of a command, by name. Whatever is as in fedge 0.2 stays out of the orders.

    Raises:
        ConfigError: both steps and epochs are given.
    """
    if found["local_epochs"] and found["local_steps"] != Sgd().steps:
        raise ConfigError("--local-steps changes nothing with --local-epochs: give one of them")
    optimizer, rate, decay = found["optimizer"], found["learning_rate"], found["weight_decay"]
    return Sgd(
        steps=found["local_steps"],
        epochs=found["local_epochs"] or 0,
        batch_size=found["batch_size"],
        learning_rate=RATES[optimizer] if rate is None else rate,
        momentum=found["momentum"],
        weight_decay=DECAYS[optimizer] if decay is None else decay,
        optimizer=UNSET if optimizer == "sgd" else optimizer,
        nesterov=found["nesterov"] or UNSET,
        clip_norm=found["clip_norm"] or UNSET,
        label_smoothing=found["label_smoothing"] or UNSET,
        class_weights="balanced" if found["class_weights"] == "balanced" else UNSET,
    )


def require_takeable(method: str, settings: MethodSettings, refused: Mapping[str, str]) -> None:
    """Refuse a recipe that a method cannot take. `refused`: why not, by names of settings, other keys are ignored.

    Raises:
        ConfigError: the text has the reason.
    """
    for part in (*settings.sgd.parts, *(() if settings.schedule == "constant" else ("schedule",))):
        if part in refused:
            raise ConfigError(f"{method} takes no --{part.replace('_', '-')}: {refused[part]}")
