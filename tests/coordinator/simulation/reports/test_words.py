"""The setting and the figures of runs in words."""

import msgspec
import pytest

from coordinator.simulation.compare import compare_runs
from coordinator.simulation.reports import plots
from coordinator.simulation.reports.report import (
    make_comparison_report,
)
from coordinator.simulation.reports.terminal import describe_columns
from coordinator.simulation.reports.words import describe_axis, describe_comparison, describe_demo, describe_partition
from coordinator.simulation.settings import Scenario
from tests.support.comparison import a_comparison, a_run
from tests.support.demo import a_demonstration


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Dirichlet, α 1"),
        ({"iid_share": 0.2}, "Dirichlet, α 1, 20% spread evenly"),
        ({"partition": "groups", "groups": "labels"}, "4 groups by labels, α 1"),
        ({"partition": "shards", "iid_share": 0.2}, "2 shards, 20% spread evenly"),
        ({"partition": "natural"}, "people"),
        ({"partition": "iid"}, "no skew"),
        ({"partition": "generated"}, "made by number, turned in 4 groups, α 1"),
    ],
)
def test_the_setting_in_words(changes: dict, words: str) -> None:
    assert describe_partition(Scenario(**changes)) == words


def test_the_lead_tells_the_setting() -> None:
    text = describe_comparison(a_comparison(2))
    assert "2 simulated devices" in text
    assert "seeds 0, 1" in text
    assert "78.4%" in text


def test_what_minimum_sizes_took_is_said_by_seed() -> None:
    took = {0: {"draws": 1, "moved": 0}, 1: {"draws": 7, "moved": 0}, 2: {"draws": 100, "moved": 15}}
    runs = [a_run(m, seed, **took[seed]) for seed in took for m in ("m", "n")]
    found = compare_runs(Scenario(), runs, ["m", "n"], tuple(took), "m", None)
    text = "enough samples: seed 1: 7 draws, 0 samples moved; seed 2: 100 draws, 15 samples moved."
    assert text in describe_comparison(found)
    assert text in make_comparison_report(found).page
    assert text in describe_columns(found)
    for plain in (a_comparison(2), compare_runs(Scenario(), [a_run("m", 0, **took[0])], ["m"], (0,), "m", None)):
        assert "than requested" not in describe_comparison(plain) + describe_columns(plain), (
            "not needed, or of a folder that does not say"
        )


@pytest.mark.parametrize(("accuracy", "words"), [(0.8, "begins at 70%"), (0.15, "begins at zero")])
def test_the_caption_says_where_the_axis_begins(accuracy: float, words: str) -> None:
    found = compare_runs(Scenario(), [a_run("m", 0, accuracy)], ["m"], (0,), "m", None)
    assert words in make_comparison_report(found).page
    assert words in describe_axis(plots.compute_floor([accuracy]))


@pytest.mark.parametrize(("split", "words"), [(True, "2 clusters with a model each"), (False, "no clusters")])
def test_the_lead_of_a_demo_says_whether_there_was_a_split(split: bool, words: str) -> None:
    assert words in describe_demo(a_demonstration(split=split))


@pytest.mark.parametrize(("split", "words"), [(True, "2 clusters with a model each"), (False, "It made no clusters")])
def test_the_lead_of_a_demo_tells_of_no_trial_where_there_was_none(split: bool, words: str) -> None:
    text = describe_demo(a_demonstration(split=split, learned_by="fedepc"))
    assert words in text
    assert "trial" not in text
    assert "better" not in text


def test_the_lead_of_a_demo_does_not_call_experts_for_all_devices_one_model() -> None:
    demo = a_demonstration(split=False, learned_by="fedcoe")
    *others, ours = demo.runs
    runs = (*others, msgspec.structs.replace(ours, experts=5))
    text = describe_demo(msgspec.structs.replace(demo, runs=runs))
    assert "It made no clusters: all devices share 5 experts and a gate." in text
    assert "one model" not in text
