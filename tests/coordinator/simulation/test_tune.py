"""`fedge tune`: what is searched, how a search ends and goes on, and what it leaves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.methods.catalogue import make_method
from coordinator.methods.options import resolve_options
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.run import validate
from coordinator.simulation.settings import Scenario, SimulationSettings, TuneSettings
from coordinator.simulation.tune import (
    Range,
    TriedConfiguration,
    Tuning,
    apply_values,
    format_configuration,
    make_failure_error,
    parse_ranges,
    record_search,
    tune,
)
from fedge.errors import ConfigError, FruitlessError, ProtocolError
from fedge.settings import resolve


@pytest.mark.parametrize(
    ("search", "optimizer", "span"),
    [
        (["learning_rate"], "sgd", (0.003, 0.3)),
        (["learning_rate"], "adamw", (0.0001, 0.01)),
        (["optimizer", "learning_rate"], "sgd", (0.0001, 0.3)),
        (["learning_rate", "optimizer=adam,adamw"], "sgd", (0.0001, 0.01)),
        (["learning_rate=0.1..1", "optimizer"], "sgd", (0.1, 1.0)),
    ],
)
def test_the_usual_learning_rates_are_those_of_the_optimizers(
    search: list[str], optimizer: str, span: tuple[float, float]
) -> None:
    found = parse_ranges("fedavg", search, optimizer)["learning_rate"]
    assert (found.low, found.high) == span


def test_the_recipe_is_searched_by_its_words() -> None:
    found = parse_ranges("fedavg", ["optimizer", "schedule=constant,cosine", "clip-norm", "class_weights"])
    assert found["optimizer"].words == ("sgd", "adam")
    assert found["schedule"].words == ("constant", "cosine")
    assert (found["clip_norm"].low, found["clip_norm"].high) == (0.1, 10)
    changed, _ = apply_values(Scenario(), {}, {"optimizer": "adam", "class_weights": "balanced", "clip_norm": 0.5})
    sgd = changed.make_method_settings(0, {}).sgd
    assert sgd.parts == {"optimizer": "adam", "class_weights": "balanced", "clip_norm": 0.5}
    assert sgd.learning_rate == 0.003


def test_augmentation_and_patience_are_searched_like_the_rest_of_the_recipe() -> None:
    found = parse_ranges("fedavg", ["augment=none,flip+crop", "patience"])
    assert found == {"augment": Range(words=("none", "flip+crop")), "patience": Range(words=(3, 5, 10))}
    given = Scenario(augment="noise")
    changed, _ = apply_values(given, {}, {"augment": "flip+crop", "patience": 5})
    assert (changed.augment, changed.make_method_settings(0, {}).patience) == ("flip,crop", 5)
    assert apply_values(given, {}, {"augment": "none"})[0].augment is None
    assert apply_values(given, {}, {"patience": 5})[0].augment == "noise"


@pytest.mark.parametrize(
    ("method", "search", "given", "why"),
    [
        ("ditto", "patience", {}, "--search patience: ditto takes no --patience: what devices keep is"),
        ("fedavg", "augment=none,flip+krop", {}, "--search augment: unknown augmentation krop (did you mean crop?)"),
        ("fedavg", "augment", {"task": "arrays"}, "--search augment: the augmentation crop is for images"),
        ("fedrod", "class_weights", {}, "--search class_weights: fedrod takes no --class-weights"),
    ],
)
def test_what_a_method_or_the_samples_cannot_take_is_refused_before_the_first_trial(
    method: str, search: str, given: dict[str, str], why: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.random((60, 5)), y=np.arange(60) % 2)
    data = tmp_path / "own.npz" if given else None
    settings = TuneSettings(method=method, devices=2, samples=60, rounds=2, data=data, **given)
    with pytest.raises(ConfigError, match=re.escape(why)):
        tune(settings, [search], tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_by_default_the_learning_rate_and_the_options_with_bounds_are_searched() -> None:
    assert parse_ranges("fedge", ()) == {
        "learning_rate": Range(low=0.003, high=0.3),
        "gamma": Range(low=0, high=0.99),  # below 1
        "rho": Range(low=0, high=1),
        "class_means": Range(low=0, high=1),
    }


def test_ranges_are_what_the_user_says() -> None:
    said = ("batch-size=8,16", "local_steps=1..20", "mode=mixture,shift", "selection=ccmab,uniform", "local_steps")
    assert parse_ranges("fedge", said[:4]) == {
        "batch_size": Range(words=(8, 16)),
        "local_steps": Range(low=1, high=20),
        "mode": Range(words=("mixture", "shift")),
        "selection": Range(words=("ccmab", "uniform")),
    }
    assert parse_ranges("fedge", said[4:]) == {"local_steps": Range(low=5, high=40)}


@pytest.mark.parametrize(
    ("search", "why"),
    [
        ("rounds=1..9", "no setting of local training"),
        ("optimiser=sgd,adam", r"no option \(did you mean optimizer\?\)"),
        ("proximal_my=0.1,1", r"did you mean proximal_mu\?"),
        ("proximal_mu", "say one"),
        ("learning_rate=1..0.1", "LOW..HIGH"),
        ("learning_rate=a..b", "LOW..HIGH"),
    ],
)
def test_what_cannot_be_searched_is_refused(search: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_ranges("fedprox", [search])


def test_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        apply_values(Scenario(), {}, {"learning_rate": -1.0})


def test_the_best_configuration_is_one_of_simulate_and_of_the_coordinator(tmp_path: Path) -> None:
    best = TriedConfiguration(values={"learning_rate": 0.1, "rho": 0.25, "batch_size": 32}, score=0.8, rounds=9)
    scenario = Scenario(rounds=9, devices=5, alpha=0.3)
    tuning = Tuning(
        scenario=scenario, method="fedge:gamma=0.2", seed=4, searched={}, best=best, asked=None, trials=(best,)
    )
    assert repr(tuning).endswith(": accuracy 80.0 % after 9 of 9 rounds, the best of 1)")
    file = tmp_path / "best.toml"
    file.write_text(format_configuration(tuning))
    simulated = resolve(SimulationSettings, "simulate", file, {})
    assert (simulated.method, simulated.seed, simulated.devices, simulated.learning_rate) == ("fedge", 4, 5, 0.1)
    needed = {"broker": "localhost:1883", "federation": "f", "home": tmp_path, "task": "digits"}
    real = resolve(CoordinatorSettings, "coordinator", file, needed)
    assert (real.method, real.rounds, real.learning_rate, real.devices) == ("fedge", 9, 0.1, 1)
    options = resolve_options(file, ())
    assert options == {"gamma": 0.2, "rho": 0.25}
    make_method("fedge", real.make_method_settings(options))


def test_a_trial_looks_at_validation_samples_and_installs_nothing(tmp_path: Path) -> None:
    scenario = Scenario(devices=3, samples=300, rounds=3, evaluate_every=2)
    points: list[tuple[int, float]] = []
    validate(scenario, "fedavg", {}, 0, tmp_path, lambda *point: points.append(point))
    assert [rounds for rounds, _ in points] == [2, 3]
    assert not list(tmp_path.rglob("bundles"))


def test_a_folder_keeps_one_search(tmp_path: Path) -> None:
    settings, ranges = TuneSettings(devices=2), {"learning_rate": Range(low=0.1, high=0.2)}
    record_search(tmp_path, settings, ranges)
    record_search(tmp_path, msgspec.structs.replace(settings, out=tmp_path), ranges)
    with pytest.raises(ConfigError, match="another search"):
        record_search(tmp_path, msgspec.structs.replace(settings, devices=3), ranges)
    with pytest.raises(ConfigError, match="another search"):
        record_search(tmp_path, settings, {})


@pytest.mark.process
def test_ray_tune_reports_nothing() -> None:
    code = (
        "import coordinator.simulation.tune\n"
        "from ray._common.usage import usage_lib\n"
        "print(usage_lib.usage_stats_enabled())\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "False"


def test_a_search_whose_trials_all_failed_says_why_in_a_line() -> None:
    """Ray gives the traceback as the text, and mostly the cause beside it."""
    raised = RuntimeError("Traceback:\n  File x\nValueError: of the user's")
    assert str(make_failure_error(raised)) == "every trial failed: ValueError: of the user's"
    raised.cause = FruitlessError("nothing was learned")  # type: ignore[attr-defined]
    found = make_failure_error(raised)
    assert isinstance(found, FruitlessError)
    assert str(found) == "every trial failed: nothing was learned"
    raised.cause = ProtocolError("forged", "a report")  # type: ignore[attr-defined]
    assert str(make_failure_error(raised)) == "every trial failed: ValueError: of the user's"
