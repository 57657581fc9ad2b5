from __future__ import annotations

import msgspec
import pytest

from fedge.steps.mixture.install import FineTune, Install
from fedge.steps.sgd import OF_SGD, TRAINING_PASSES, Sgd, iterate_recipes, scale_learning_rates
from fedge.wire.messages import BlobRef


@pytest.mark.parametrize(
    ("fields", "n", "steps"),
    [
        ({"steps": 7}, 100, 7),
        ({"steps": 7}, 0, 7),
        ({"epochs": 2, "batch_size": 8}, 20, 5),  # 40 samples in batches of 8
        ({"epochs": 3, "batch_size": 8}, 5, 3),  # all 5 at once
        ({"epochs": 3, "batch_size": 8}, 9, 4),  # 27 samples, the last batch is not full
        ({"epochs": 2}, 0, 0),
    ],
)
def test_steps(fields: dict[str, int], n: int, steps: int) -> None:
    assert Sgd(**fields).count_steps(n) == steps  # type: ignore[arg-type]


def test_a_step_costs_three_passes_over_its_batch() -> None:
    assert TRAINING_PASSES == 3
    assert Sgd(batch_size=32).count_passes(10, 100) == 3 * 10 * 32
    assert Sgd(batch_size=32).count_passes(10, 20) == 3 * 10 * 20


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": -1}, {"batch_size": 0}, {"learning_rate": 0.0}, {"momentum": 1.0}, {"proximal_mu": -0.1},
        {"weight_decay": 2.0}, {"clip_norm": 0.0}, {"label_smoothing": 1.0}, {"optimizer": "lion"},
        {"class_weights": "given"},
    ],
)  # fmt: skip
def test_what_the_schema_refuses(fields: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Sgd)


LATER = {
    "optimizer": "adam",
    "nesterov": True,
    "clip_norm": 1.0,
    "label_smoothing": 0.1,
    "class_weights": "balanced",
}


def test_an_order_without_news_has_the_bytes_of_fedge_0_2() -> None:
    fields = ("steps", "epochs", "batch_size", "learning_rate", "momentum", "proximal_mu", "weight_decay")
    plain = Sgd(steps=3)
    assert msgspec.msgpack.encode(plain) == msgspec.msgpack.encode({name: getattr(plain, name) for name in fields})
    assert (plain.version, plain.parts) == (0, {})


@pytest.mark.parametrize("name", LATER)
def test_each_news_raises_the_version(name: str) -> None:
    sgd = Sgd(**{name: LATER[name]})  # type: ignore[arg-type]
    assert (sgd.version, sgd.parts) == (OF_SGD, {name: LATER[name]})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sgd), type=Sgd) == sgd


def test_news_that_say_what_is_usual_raise_nothing() -> None:
    assert Sgd(optimizer="sgd", nesterov=False, label_smoothing=0.0).version == 0


def test_rates_are_scaled_wherever_an_action_holds_a_recipe() -> None:
    ref = BlobRef(digest="0" * 64, size_bytes=1)
    tuning = FineTune(sgd=Sgd(learning_rate=0.2), checkpoints=(1,), otherwise=1)
    install = Install(model=ref, method="m", fine_tune=tuning)
    scaled = scale_learning_rates(install, 0.5)
    assert [sgd.learning_rate for sgd in iterate_recipes(scaled)] == [0.1]
    assert msgspec.structs.replace(scaled, fine_tune=tuning) == install
    without = Install(model=ref, method="m")
    assert scale_learning_rates(without, 0.5) is without
