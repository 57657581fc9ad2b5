import math
from pathlib import Path

import msgspec
import pytest

from coordinator.methods.catalogue import get_installed_methods, make_method
from coordinator.methods.method import Server
from coordinator.simulation.federation import partition_samples
from coordinator.simulation.reports.outcome import DeviceOutcome, RunOutcome, compute_worst_decile
from coordinator.simulation.reports.terminal import list_figures
from coordinator.simulation.run import describe_bundles, run_on, simulate, validate
from coordinator.simulation.settings import Scenario
from edge_agent.privacy.dp_ledger import Ledger
from fedge.errors import ConfigError, FruitlessError
from tests.support.comparison import a_score

SCENARIO = Scenario(devices=4, samples=400, rounds=4, evaluate_every=2, partition="groups", n_groups=2)


def outcome(tmp_path: Path, method: str = "fedavg", scenario: Scenario = SCENARIO, **options: object) -> RunOutcome:
    return simulate(scenario, method, dict(options), 1, tmp_path / method, lambda _: None, method)


def test_the_outcome_adds_up(tmp_path: Path) -> None:
    told: list[str] = []
    found = simulate(SCENARIO, "fedavg", {}, 1, tmp_path, told.append, "mine")
    accuracies = [device.score.accuracy for device in found.devices]
    assert (found.method, found.seed, found.bundles) == ("mine", 1, 4)
    assert found.accuracy == pytest.approx(sum(accuracies) / 4)
    assert found.minimum == min(accuracies)
    assert found.worst_decile == compute_worst_decile(accuracies)
    right = sum(device.score.accuracy * device.score.n for device in found.devices)
    assert found.sample_accuracy == pytest.approx(right / sum(device.score.n for device in found.devices))
    assert [device.group for device in found.devices] == [0, 1, 0, 1]
    assert [device.trained for device in found.devices] == [4] * 4
    assert found.max_abs_diff <= 1e-4
    assert 0 < found.evaluation_s < found.wall_s
    assert told[0] == "sharing out the samples, and checking the network"
    assert told[-2] == "the devices write their bundles"
    assert len(told) == len(found.curve) + 2


def test_the_curve_goes_from_the_first_model_to_the_bundles(tmp_path: Path) -> None:
    found = outcome(tmp_path)
    assert [point.round for point in found.curve] == [0, 2, 4, 4]  # the last one: the bundles
    assert found.curve[0].accuracy < 0.4
    assert found.curve[-1].accuracy == found.accuracy
    assert found.curve[-2].accuracy == found.accuracy  # FedAvg installs what it serves
    assert found.curve[-2].global_accuracy == found.curve[-1].global_accuracy == found.global_accuracy
    for what in ("bytes_up", "bytes_down", "seconds"):
        values = [getattr(point, what) for point in found.curve]
        assert values[0] == 0
        assert values == sorted(values)
        assert values[-1] == getattr(found, what) > 0


def test_the_method_tells_numbers_of_its_own(tmp_path: Path) -> None:
    assert outcome(tmp_path, "fedavg").details == {}
    assert -1 <= outcome(tmp_path, "scmoe-pfl").details["silhouette"] <= 1


def test_equal_arguments_give_equal_figures(tmp_path: Path) -> None:
    same = {"wall_s": 0.0, "evaluation_s": 0.0}
    one, again = (
        msgspec.structs.replace(outcome(tmp_path / name, "fedge"), **same) for name in ("one", "again")
    )  # in two places
    assert one == again


def test_all_methods_of_a_seed_begin_with_the_same_model_and_devices(tmp_path: Path) -> None:
    one, other = outcome(tmp_path, "fedavg"), outcome(tmp_path, "fedprox")
    assert one.curve[0].accuracy == other.curve[0].accuracy
    assert [device.n_train for device in one.devices] == [device.n_train for device in other.devices]


def test_options_reach_the_method(tmp_path: Path) -> None:
    assert outcome(tmp_path / "a", "fedprox", proximal_mu=0.0).accuracy >= 0
    with pytest.raises(ConfigError, match="no option 'mu'"):
        outcome(tmp_path / "b", "fedprox", mu=1)


def test_the_server_has_samples_of_its_own_where_a_method_needs_them(tmp_path: Path) -> None:
    found = outcome(tmp_path, "fedcoe", msgspec.structs.replace(SCENARIO, global_test=0.3))
    assert found.bundles == 4
    with pytest.raises(ConfigError, match="--server-data"):
        outcome(tmp_path / "none", "fedcoe", msgspec.structs.replace(SCENARIO, global_test=0.0))


def test_without_a_clock_nothing_takes_time(tmp_path: Path) -> None:
    assert outcome(tmp_path, scenario=msgspec.structs.replace(SCENARIO, hardware="none")).seconds == 0


@pytest.mark.parametrize("method", get_installed_methods())
def test_late_joiners_come_when_training_is_over_and_are_measured_apart(tmp_path: Path, method: str) -> None:
    scenario = msgspec.structs.replace(SCENARIO, devices=5, samples=600, rounds=2, global_test=0.3, late_joiners=2)
    found = outcome(tmp_path, method, scenario)
    late, others = ([d for d in found.devices if d.late_joiner is flag] for flag in (True, False))
    assert (len(late), len(others)) == (2, 3)
    assert found.cold_start == pytest.approx(sum(d.score.accuracy for d in late) / 2)
    assert found.accuracy == pytest.approx(sum(d.score.accuracy for d in others) / 3)
    assert [d.trained for d in late] == [0, 0]
    assert found.bundles == (3 if method == "local" else 5)  # nobody asks a late joiner to train alone


def test_who_comes_late_is_drawn_by_the_seed_and_not_all_can(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(SCENARIO, devices=8, rounds=0, late_joiners=3)
    drawn = {seed: partition_samples(scenario, seed).late_joiners for seed in range(4)}
    assert {len(ids) for ids in drawn.values()} == {3}
    assert len(set(drawn.values())) > 1
    assert outcome(tmp_path).cold_start is None
    with pytest.raises(ConfigError, match="8 late joiners of 8 devices"):
        partition_samples(msgspec.structs.replace(scenario, late_joiners=8), 0)


def test_what_a_private_run_has_spent_is_told_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    told: list[str] = []
    scenario = msgspec.structs.replace(SCENARIO, rounds=1, evaluate_every=1, dp_noise=1.0)
    found = simulate(scenario, "fedavg", {}, 1, tmp_path, told.append, "fedavg")
    most = max(Ledger(tmp_path / f"device-{i}").compute_spent(1e-5) for i in range(4))
    assert found.details == {"epsilon spent (delta 1e-05)": most}
    assert told[2].endswith(f"  epsilon spent (delta 1e-05) {most:.2f}")
    assert ("epsilon spent (delta 1e-05)", f"{most:.2f}") in list_figures(found, None)


def test_a_delta_that_promises_nothing_to_the_samples_of_a_device_is_refused(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(SCENARIO, rounds=1, dp_noise=1.0, dp_delta=0.04)
    with pytest.raises(ConfigError, match=r"of a device, --dp-delta 0\.04 promises nothing to \d+ samples: .* 1 / \d+"):
        simulate(scenario, "fedavg", {}, 1, tmp_path, label="fedavg", watch=lambda _: None)


# --------------------------------------------------------------------------------------------- ends that are no success


def of_network(name: str, **changes: object) -> Scenario:
    return msgspec.structs.replace(SCENARIO, model=f"tests.support.networks:{name}", **changes)


def unchecked(home: Path, scenario: Scenario, told: list[str], method: str = "fedavg") -> RunOutcome:
    """As `simulate`, without the check of the network."""
    federation = partition_samples(scenario, 1)
    made = make_method(method, scenario.make_method_settings(1, {}), Server(federation.task, federation.server_data))
    return run_on(federation, made, scenario, 1, home, method, told.append)


@pytest.mark.parametrize("method", sorted(get_installed_methods().keys() - {"fedcoe"}))  # its server trains, too
def test_a_run_in_which_no_update_came_fails_with_the_devices_reason(tmp_path: Path, method: str) -> None:
    told: list[str] = []
    with pytest.raises(FruitlessError, match="RuntimeError: it is tired") as caught:
        unchecked(tmp_path, of_network("Tiring", local_steps=20), told, method)
    assert caught.value.exit_code == 6
    assert not list(tmp_path.glob("*/bundles/*")), "what nobody has learned is not installed"
    if method != "local":
        assert str(caught.value).startswith("nothing was learned in 4 rounds: none of ")
        assert "device-0, device-1 and 2 more: failed: RuntimeError: it is tired" in str(caught.value)
        assert "  answered 0 of " in told[1]
        assert "failed: RuntimeError: it is tired" in told[1]


def test_a_run_in_which_never_enough_updates_came_fails(tmp_path: Path) -> None:
    few = msgspec.structs.replace(SCENARIO, min_reports=5)
    with pytest.raises(FruitlessError, match="no round brought the 5 updates that --min-reports wants, only 4 at most"):
        outcome(tmp_path, scenario=few)
    assert not list(tmp_path.glob("*/*/bundles"))


def test_a_search_learns_nothing_from_devices_that_learn_nothing(tmp_path: Path) -> None:
    with pytest.raises(FruitlessError, match="it is tired"):
        validate(of_network("Tiring"), "fedavg", {}, 1, tmp_path, lambda *_: None)


def test_a_run_without_any_bundle_fails(tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(
        FruitlessError, match=r"^no device has a bundle: device-0, device-1 and 2 more: failed: .*written"
    ):
        unchecked(tmp_path, of_network("Unwritable"), told)
    assert told[-1] == "the devices write their bundles", "and no figure of what is not there"


def test_the_figure_of_the_bundles_is_of_those_that_are_there() -> None:
    def end(i: str, accuracy: float, problem: str = "") -> DeviceOutcome:
        return DeviceOutcome(
            id=i, group=0, n_train=40, score=a_score(accuracy), trained=3, bundle=not problem, problem=problem
        )

    whole = {i: end(i, 0.5) for i in "ab"}
    assert describe_bundles(whole) == "the devices' bundles  accuracy 0.500"
    assert describe_bundles(whole | {"c": end("c", math.nan)}) == (
        "the devices' bundles  accuracy 0.500  c: undefined (NaN) for its test samples"
    )
    assert describe_bundles(whole | {"c": end("c", 0.9, "failed: no room")}) == (
        "the bundles of 2 of 3 devices  accuracy 0.500  without one: c: failed: no room"
    )
