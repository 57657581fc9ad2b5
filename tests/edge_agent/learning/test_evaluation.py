from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.device import Device
from edge_agent.learning import evaluation
from fedge.data.problems.calibration import PLAIN
from fedge.models.training import compute_loss_and_gradient_norm
from fedge.steps.descriptions.mean_features import MeanFeatures
from fedge.steps.training.train import Start
from fedge.tasks import DeviceData
from tests.support.orders import Blobs, device, device_data

BLOBS = Blobs()
MODELS = [BLOBS.model(seed) for seed in range(8)]


def looking(data: DeviceData | None = None) -> Device:
    return device(Path("unused"), MeanFeatures(model=MODELS[0]), BLOBS, data)


def by_hand(here: Device, index: int, x: np.ndarray, y: np.ndarray) -> tuple[int, float]:
    """How many samples are right, and the sum of losses with the prior of D_L."""
    logits = here.network.compute_logits(here.fetch_model(MODELS[index]), x).astype(float)
    counts = np.bincount(here.data.shared[1], minlength=3)
    scores = logits + np.log((counts + 0.5) / (counts.sum() + 1.5))
    log_p = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return int((logits.argmax(axis=1) == y).sum()), -float(log_p[np.arange(len(y)), y].sum())


def test_the_prior_while_choosing_does_not_see_the_validation_labels() -> None:
    data = device_data()
    first, second = looking(data), looking(replace(data, y_val=np.zeros_like(data.y_val)))
    shared, own, final = (
        [fit(here, here.fetch_model(MODELS[0])) for here in (first, second)]
        for fit in (evaluation.fit_shared_offset, evaluation.fit_own_offset, evaluation.fit_final_offset)
    )
    assert (shared[0] == shared[1]).all()
    assert (own[0] == own[1]).all()
    assert (final[0] != final[1]).any()
    counts = np.bincount(data.y_train, minlength=3) + 0.5
    assert own[0] == pytest.approx(np.log(counts / counts.sum()))
    counts = np.bincount(data.shared[1], minlength=3) + 0.5
    assert shared[0] == pytest.approx(np.log(counts / counts.sum()))


@pytest.mark.parametrize("m", [15, 0])
def test_a_look_is_at_the_model_as_it_comes(m: int) -> None:
    here = looking(device_data(m=m))
    model = here.fetch_model(MODELS[1])
    found = evaluation.evaluate_model(here, model)
    here.network.load(model)
    assert (found.loss, found.gradient_norm) == compute_loss_and_gradient_norm(here.network, *here.data.shared)
    if m:
        assert found.score == by_hand(here, 1, *here.data.validation)[0] / m
    else:
        assert found.score is None
    spared = evaluation.evaluate_model(here, model, measure=False)
    assert (spared.score, spared.loss, spared.gradient_norm) == (found.score, None, None)


@pytest.mark.parametrize("m", [15, 0])
@pytest.mark.parametrize("choose", ["loss", "accuracy"])
def test_the_best_start_is_chosen_on_the_validation_samples_or_else_on_shared_ones(choose: str, m: int) -> None:
    here = looking(device_data(m=m))
    samples = here.data.validation if m else here.data.shared
    starts = [Start(model=ref, cluster=k) for k, ref in enumerate(MODELS)]
    _, chosen = evaluation.fetch_best_start(here, starts, choose)  # type: ignore[arg-type]
    seen = [by_hand(here, k, *samples) for k in range(len(MODELS))]
    if choose == "loss":
        assert chosen.cluster == int(np.argmin([loss for _, loss in seen]))
    else:
        assert seen[chosen.cluster][0] == max(correct for correct, _ in seen)
    twice = [starts[3], *starts, *starts]
    assert evaluation.fetch_best_start(here, twice, choose)[1] == chosen  # type: ignore[arg-type]


def test_the_first_of_equal_starts_is_taken_and_one_alone_is_not_looked_at() -> None:
    here = looking()
    same = [Start(model=MODELS[2], cluster=k) for k in (7, 3)]
    assert evaluation.fetch_best_start(here, same)[1].cluster == 7
    nothing = looking(device_data(0, 0))
    assert evaluation.fetch_best_start(nothing, [Start(model=MODELS[2], cluster=5)])[1].cluster == 5
    assert evaluation.fetch_best_start(nothing, same)[1].cluster == 7


def test_the_loss_has_the_prior_and_the_score_is_of_the_true_classes() -> None:
    here = looking()
    x, y = here.data.validation
    correct, loss = by_hand(here, 3, x, y)
    assert evaluation.compute_loss(here, here.fetch_model(MODELS[3]), (x, y)) == pytest.approx(loss, rel=1e-5)
    model = here.fetch_model(MODELS[3])
    logits = here.network.compute_logits(model, x)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    found = evaluation.measure_model(here, model, PLAIN, evaluation.fit_own_offset(here, model))
    assert found.total_score == correct
    assert found.log_likelihood == pytest.approx(log_p[np.arange(15), y].sum())
    assert found.metrics == {
        "validation_accuracy": correct / 15,
        "validation_loss": pytest.approx(-found.log_likelihood / 15),
    }


def test_without_validation_samples_there_are_no_figures() -> None:
    here = looking(device_data(m=0))
    model = here.fetch_model(MODELS[0])
    assert here.network.compute_logits(model, here.data.x_val).shape == (0, 3)
    assert evaluation.measure_model(here, model, PLAIN, evaluation.fit_own_offset(here, model)) == (0, 0, {})
    assert evaluation.compute_score(here, model) is None


def test_by_the_training_loss_it_is_the_model_with_the_smallest_mean_loss_on_the_shareable_samples() -> None:
    """Without prior, and whatever the validation samples say (IFCA)."""
    here = looking()
    starts = [Start(model=ref, cluster=k) for k, ref in enumerate(MODELS)]
    x, y = here.data.shared
    losses = []
    for ref in MODELS:
        logits = here.network.compute_logits(here.fetch_model(ref), x).astype(float)
        losses.append((np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(y)), y]).mean())
    assert evaluation.fetch_best_start(here, starts, "training_loss")[1].cluster == int(np.argmin(losses))
