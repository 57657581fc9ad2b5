"""Settings of every method, and the types with which commands declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from coordinator.aggregation.protection import Protection
from coordinator.methods.promises import Shared
from fedge.errors import ConfigError
from fedge.settings import CODE
from fedge.steps.sgd import Sgd
from fedge.system.hardware import Processor
from fedge.system.text import Heading
from fedge.tensors.layout import Codec
from fedge.wire.messages import Share

Option = int | float | str | bool


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
    codec: Encoding = Codec.INT8
    down: Down = "int8"
    train_on: Processor = Processor.CPU
    protection: Protection = Protection()
    fine_tune: bool = False  # "+ft": every device fine-tunes its model before installing it
    options: dict[str, Option] = {}  # the method's own, by the names of its `Options`

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


Participation = Annotated[float, Meta(gt=0, le=1), Heading.TRAINING, "This share of the devices is asked in a round."]


MinReports = Annotated[int, Meta(ge=1), Heading.TRAINING, "A round with fewer updates than this changes nothing."]


Encoding = Annotated[Codec, Heading.UPDATES, "Updates are sent in this encoding."]


LocalSteps = Annotated[
    int, Meta(ge=1, le=10**7), Heading.TRAINING, "A device takes this many SGD steps per participation."
]


LocalEpochs = Annotated[
    Annotated[int, Meta(ge=1, le=10**5)] | None,
    Heading.TRAINING,
    "A device makes this many passes over its own samples per participation, instead of the steps.",
]


BatchSize = Annotated[int, Meta(ge=1, le=2**20), Heading.TRAINING, "A step uses this many samples."]


LearningRate = Annotated[float, Meta(gt=0, le=100), Heading.TRAINING, "The devices' SGD has this learning rate."]


Momentum = Annotated[float, Meta(ge=0, lt=1), Heading.TRAINING, "The devices' SGD has this momentum."]


Down = Annotated[
    Literal["int8", "float32"],
    Heading.UPDATES,
    "Models reach devices that have an earlier one as a difference in int8, or whole.",
]


WeightDecay = Annotated[Share, Heading.TRAINING, "The devices' SGD has this weight decay, a factor of the weights."]


MethodName = Annotated[
    str, CODE, Heading.METHOD, "The method is one of `fedge methods`; NAME+ft fine-tunes at the end."
]
"""Settings of all methods that the commands share; those of local training have the bounds of `Sgd`."""


def make_method_settings(given: Struct, seed: int, options: Mapping[str, Option]) -> MethodSettings:
    """Make a method's settings from those of a command: rounds, learning and codec have equal names.

    Raises:
        ConfigError: both steps and epochs are given.
    """
    found = msgspec.structs.asdict(given)
    learning = {name: found[name] for name in ("batch_size", "learning_rate", "momentum", "weight_decay")}
    own = {n: found[n] for n in ("rounds", "participation", "min_reports", "codec", "down", "train_on") if n in found}
    if found["local_epochs"] and found["local_steps"] != Sgd().steps:
        raise ConfigError("--local-steps changes nothing with --local-epochs: give one of them")
    sgd = Sgd(steps=found["local_steps"], epochs=found["local_epochs"] or 0, **learning)
    guards = {n: found[n] for n in Protection.__struct_fields__ if n in found}
    return MethodSettings(seed=seed, sgd=sgd, options=dict(options), protection=Protection(**guards), **own)
