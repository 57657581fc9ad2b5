from pathlib import Path

import msgspec
import pytest

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
