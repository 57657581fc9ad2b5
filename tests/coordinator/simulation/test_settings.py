from pathlib import Path

import msgspec
import pytest

from coordinator.methods.catalogue import make_method
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.settings import (
    CompareSettings,
    DemoSettings,
    Scenario,
    Setup,
    SimulationSettings,
)
from fedge.errors import ConfigError
from fedge.settings import describe_settings
from fedge.steps.sgd import Sgd
from fedge.tasks import partition_pool
from fedge.tasks.partition import load_samples
from fedge.tasks.shares import check_partitioning


def test_the_method_is_told_budget_and_options() -> None:
    scenario = Scenario(rounds=7, participation=0.3, local_steps=4, batch_size=8, learning_rate=0.1, momentum=0.0)
    settings = scenario.make_method_settings(5, {"base": "dbe"})
    assert (settings.rounds, settings.participation, settings.seed, settings.options) == (7, 0.3, 5, {"base": "dbe"})
    assert settings.sgd == Sgd(steps=4, batch_size=8, learning_rate=0.1, momentum=0.0)


def test_a_plain_recipe_says_what_orders_of_fedge_0_2_say() -> None:
    assert Scenario().make_method_settings(0, {}).sgd == Sgd()
    assert Scenario().make_method_settings(0, {}).sgd.version == 0


@pytest.mark.parametrize("kind", [Scenario, CoordinatorSettings])
def test_commands_say_the_whole_recipe_by_the_same_names(kind: type[Scenario | CoordinatorSettings]) -> None:
    needed = {"broker": "mqtt://here", "federation": "f", "home": Path("h"), "task": "digits"}
    given = {
        "optimizer": "adamw", "learning_rate": 0.002, "schedule": "cosine", "momentum": 0.8, "weight_decay": 0.05,
        "clip_norm": 2.0, "label_smoothing": 0.1, "class_weights": "balanced",
    }  # fmt: skip
    found = kind(**given | (needed if kind is CoordinatorSettings else {}))
    method = found.make_method_settings(0, {}) if isinstance(found, Scenario) else found.make_method_settings()
    assert method.schedule == "cosine"
    assert method.sgd == Sgd(
        learning_rate=0.002, momentum=0.8, weight_decay=0.05, optimizer="adamw", clip_norm=2.0, label_smoothing=0.1,
        class_weights="balanced",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "rate", "decay"), [("sgd", 0.05, 0.0), ("adam", 0.003, 0.0), ("adamw", 0.003, 0.01)]
)
def test_each_optimizer_has_a_learning_rate_and_a_weight_decay_of_its_own(
    optimizer: str, rate: float, decay: float
) -> None:
    sgd = Scenario(optimizer=optimizer).make_method_settings(0, {}).sgd
    assert (sgd.learning_rate, sgd.weight_decay) == (rate, decay)
    given = Scenario(optimizer=optimizer, learning_rate=0.3, weight_decay=0.2).make_method_settings(0, {}).sgd
    assert (given.learning_rate, given.weight_decay) == (0.3, 0.2)


@pytest.mark.parametrize(
    ("given", "what_to_do"),
    [
        ({"nesterov": True, "momentum": 0.0}, "--nesterov needs a momentum: give --momentum"),
        ({"nesterov": True, "optimizer": "adam"}, "--nesterov is for --optimizer sgd.*leave it out"),
        ({"optimizer": "adamw", "weight_decay": 0.0}, "is adam: say so"),
        ({"clip_norm": 1.0, "dp_epsilon": 8.0}, "give --dp-clip in place of --clip-norm"),
        ({"class_weights": "balanced", "dp_noise": 1.0}, "does not hide these counts: leave it out"),
    ],
)
def test_a_recipe_whose_parts_do_not_fit_is_refused_before_a_run(given: dict[str, object], what_to_do: str) -> None:
    with pytest.raises(ConfigError, match=what_to_do):
        Scenario(**given).make_method_settings(0, {})  # type: ignore[arg-type]


def test_a_method_refuses_the_part_of_a_recipe_that_it_cannot_take() -> None:
    settings = Scenario(class_weights="balanced", optimizer="adam").make_method_settings(0, {})
    assert make_method("fedavg", settings).settings.sgd.version == 1
    with pytest.raises(ConfigError, match="fedrod takes no --class-weights: its balanced softmax"):
        make_method("fedrod", settings)


def test_passes_over_the_samples_instead_of_steps() -> None:
    assert Scenario(local_epochs=5).make_method_settings(0, {}).sgd.epochs == 5
    with pytest.raises(ConfigError, match="--local-steps changes nothing with --local-epochs"):
        Scenario(local_epochs=5, local_steps=20).make_method_settings(0, {})


@pytest.mark.parametrize("kind", [Scenario, CoordinatorSettings])
@pytest.mark.parametrize(
    ("name", "in_orders", "most"),
    [
        ("local_steps", "steps", 10**7),
        ("local_epochs", "epochs", 10**5),
        ("batch_size", "batch_size", 2**20),
        ("learning_rate", "learning_rate", 100.0),
        ("weight_decay", "weight_decay", 1.0),
    ],
)
def test_a_command_takes_no_training_that_no_order_can_say(kind, name: str, in_orders: str, most: float) -> None:
    """Or it would be found out when the data are dealt out and devices wait."""
    needed = {"broker": "mqtt://here", "federation": "f", "home": Path("h"), "task": "digits"}
    given = needed if kind is CoordinatorSettings else {}
    for of, others, field in ((kind, given, name), (Sgd, {}, in_orders)):
        msgspec.convert(others | {field: most}, of)
        with pytest.raises(msgspec.ValidationError, match=rf"<= .*\$\.{field}"):
            msgspec.convert(others | {field: most + 1}, of)


def test_a_tenth_of_the_rounds_is_between_two_points() -> None:
    assert [Scenario(rounds=r).spacing for r in (0, 5, 30, 105)] == [1, 1, 3, 10]
    assert Scenario(rounds=30, evaluate_every=7).spacing == 7


def test_a_demo_shares_all_but_what_is_simulated() -> None:
    shared = {setting.name: setting for setting in describe_settings(Setup, "x")}
    demo = {setting.name: setting for setting in describe_settings(DemoSettings, "x")}
    assert set(shared) < set(demo)
    assert DemoSettings(local_steps=3, weight_decay=0.1).make_method_settings(0, {}).sgd == Sgd(
        steps=3, weight_decay=0.1
    )


def test_a_demo_of_two_devices_needs_no_third_group() -> None:
    check_partitioning(DemoSettings(devices=2))
    with pytest.raises(ConfigError, match="2 devices cannot be in 4 groups"):
        check_partitioning(DemoSettings(devices=2, n_groups=4))


def test_both_commands_share_the_scenario() -> None:
    shared = {setting.name for setting in describe_settings(Scenario, "simulate")}
    for kind in (SimulationSettings, CompareSettings):
        settings = describe_settings(kind, "x")
        assert shared < {setting.name for setting in settings}
        assert all(setting.help.endswith(".") for setting in settings)


def test_a_demo_and_a_simulation_deal_the_same_samples_out_alike() -> None:
    given = {"samples": 300, "n_groups": 3, "partition": "groups", "sensitive": 0.2}
    partitions = []
    for settings in (DemoSettings(**given), Scenario(**given)):
        samples, apart = load_samples(settings, 1, 0.0)
        assert len(apart.y) == 0
        partitions.append([share.y_test.tolist() for share in partition_pool(samples, 4, settings, seed=1)])
    assert partitions[0] == partitions[1]
