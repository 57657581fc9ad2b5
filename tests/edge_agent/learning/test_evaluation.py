from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.device import Device
from edge_agent.learning import evaluation
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
    assert (evaluation.compute_prior(first) == evaluation.compute_prior(second)).all()
    assert (evaluation.compute_final_prior(first) != evaluation.compute_final_prior(second)).any()


@pytest.mark.parametrize("m", [15, 0])
def test_a_look_is_at_the_model_as_it_comes(m: int) -> None:
    here = looking(device_data(m=m))
    model = here.fetch_model(MODELS[1])
    found = evaluation.evaluate_model(here, model)
    here.network.load(model)
    assert (found.loss, found.gradient_norm) == compute_loss_and_gradient_norm(here.network, *here.data.shared)
    if m:
        assert found.accuracy == by_hand(here, 1, *here.data.validation)[0] / m
    else:
        assert found.accuracy is None
    spared = evaluation.evaluate_model(here, model, measure=False)
    assert (spared.accuracy, spared.loss, spared.gradient_norm) == (found.accuracy, None, None)


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
    logits = evaluation.compute_logits(here, here.fetch_model(MODELS[3]), x)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    likelihood, right = evaluation.score_predictions(here, log_p)
    assert right == correct
    assert likelihood == pytest.approx(log_p[np.arange(15), y].sum())
    assert evaluation.compute_metrics(here, log_p) == {
        "validation_accuracy": correct / 15,
        "validation_loss": pytest.approx(-likelihood / 15),
    }


def test_without_validation_samples_there_are_no_figures() -> None:
    here = looking(device_data(m=0))
    assert evaluation.compute_logits(here, here.fetch_model(MODELS[0]), here.data.x_val).shape == (0, 3)
    assert evaluation.compute_metrics(here, np.zeros((0, 3))) == {}
    assert evaluation.compute_accuracy(here, here.fetch_model(MODELS[0])) is None
