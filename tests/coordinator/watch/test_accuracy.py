"""Which accuracy is shown first: that of the bundle that answers, before that of what is in training."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.watch.accuracy import (
    Accuracy,
    FleetAccuracy,
    Measured,
    describe_fleet_accuracy,
    find_accuracy,
    find_figure,
    find_trained,
    name_scores,
    summarise_accuracy,
)

BUNDLE = {"accuracy": 0.9, "n": 40, "release": 2}


def told(right: int = 0, wrong: int = 0, recent: float | None = None, **more: Any) -> dict[str, Any]:
    return {"at_work": {"right": right, "wrong": wrong, "recent": recent}, **more}


@pytest.mark.parametrize(
    ("device", "shown"),
    [
        ({}, None),
        ({"at_work": None, "of_bundle": None}, None),
        ({"of_bundle": BUNDLE}, Accuracy(share=0.9, of=Measured.BUNDLE, n=40)),
        (told(15, 5, 0.75, of_bundle=BUNDLE), Accuracy(share=0.75, of=Measured.AT_WORK, n=20)),
        (told(150, 50, 0.5, of_bundle=BUNDLE), Accuracy(share=0.5, of=Measured.AT_WORK, n=200)),  # the latest count
        (told(9, 10, of_bundle=BUNDLE), Accuracy(share=0.9, of=Measured.BUNDLE, n=40)),  # too few answers
        (told(1, 1), Accuracy(share=0.5, of=Measured.AT_WORK, n=2)),  # few, and nothing else is known of it
        (told(), None),
    ],
)
def test_answers_at_work_come_first_then_the_bundle_on_validation_samples(
    device: dict[str, Any], shown: Accuracy | None
) -> None:
    assert find_accuracy(device, None) == shown
    in_training = Accuracy(share=0.6, of=Measured.TRAINING)
    assert find_accuracy(device, 0.6) == (shown or in_training)


def test_of_a_fleet_each_is_told_with_what_it_is_of() -> None:
    bundles: list[dict[str, Any]] = [{"of_bundle": BUNDLE | {"accuracy": share}} for share in (0.9, 0.8)]
    devices = [told(18, 2, 0.9), told(10, 30, 0.25), *bundles, {}]
    figures = summarise_accuracy(devices, 0.6)
    at_work = (20 * 0.9 + 40 * 0.25) / 60  # each answer counts alike
    assert figures == [
        FleetAccuracy(share=at_work, of=Measured.AT_WORK, n=60, devices=2),
        FleetAccuracy(share=pytest.approx((0.9 + 0.8) / 2), of=Measured.BUNDLE, n=80, devices=2),
        FleetAccuracy(share=0.6, of=Measured.TRAINING),
    ]
    assert describe_fleet_accuracy(figures) == [
        "0.467 (at work, 60 answers labelled later on 2 devices)",
        "0.850 (of the bundles that answer, 80 validation samples on 2 devices)",
        "0.600 (of the models in training, validation samples of the last cohort)",
    ]


def test_few_answers_at_work_come_after_the_bundles() -> None:
    figures = summarise_accuracy([told(1, 1), {"of_bundle": BUNDLE}], None)
    assert [figure.of for figure in figures] == [Measured.BUNDLE, Measured.AT_WORK]
    assert describe_fleet_accuracy(figures)[1] == "0.500 (at work, 2 answers labelled later on 1 device)"


def test_nothing_is_made_up() -> None:
    assert summarise_accuracy([{}], find_trained([{"accuracy": None}])) == []
    assert find_trained([{"accuracy": 0.5}, {"accuracy": None}]) == 0.5


def test_a_score_that_is_no_accuracy_is_called_score_for_programs() -> None:
    told = {"score_name": "r2", "history": ({"round": 1, "accuracy": -0.5},), "details": {"accuracy": 1.0}}
    figure = find_figure(told)
    assert (figure.words, figure.format(-0.5)) == ("R²", "-0.500")
    renamed = name_scores(told, figure)
    assert renamed["history"] == [{"round": 1, "score": -0.5}]
    assert renamed["details"] == {"accuracy": 1.0}, "names that are not ours stay"
    assert name_scores(told, find_figure({})) is told, "accuracy stays"
