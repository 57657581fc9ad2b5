"""A student: where it starts, on what it learns, that it answers as its mixture, and when it may replace it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from export import Candidate
from export.student import BEYOND, Student, average_candidates, choose_start, make_student, make_teacher, mix_inputs
from fedge.data.problems.calibration import Calibration
from fedge.models.training import Network
from fedge.system.stopping import StoppedError
from fedge.tensors.layout import Model
from fedge.wire.messages import Role
from tests.support.tables import inputs, mixture_of, task_of

LOGITS = np.array([[[2.0, 0, 0], [0, 1.0, 0], [0, 0, 0.5]], [[1.8, 0.2, 0], [0, 1.2, 0], [0.2, 0, 0.5]]])
"""Of two candidates for three samples."""
Y = np.array([0, 1, 2])
NOTHING = np.zeros(0, np.float32), np.zeros(0, np.int64)
MIXTURE = mixture_of(LOGITS, weights=[0.75, 0.25], beta=0.0)


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_mean_of_candidates_by_their_weights() -> None:
    first, second = (
        Candidate(
            Role.PRIVATE,
            name,
            Model(np.array([value, 0], np.float32), np.array([2 * value], np.float32), np.array([n])),
            np.array([value, value]),
            Calibration(temperature=1 + value, kappa=value),
            weight=weight,
        )
        for name, value, n, weight in (("a", 0.0, 3, 0.3), ("b", 1.0, 2, 0.1))
    )
    mean = average_candidates((first, second))
    assert mean.model.params.tolist() == [0.25, 0]
    assert mean.model.buffers.tolist() == [0.5]
    assert mean.model.counters.tolist() == [3]
    assert mean.offset.tolist() == pytest.approx([0.25, 0.25])
    assert (mean.calibration.temperature, mean.calibration.kappa) == pytest.approx((1.25, 0.25))
    none = average_candidates((replace(first, weight=0.0), replace(second, weight=0.0)))
    assert none.model.params.tolist() == [0.5, 0], "without weights all count the same"


@pytest.mark.parametrize(
    ("other", "start"),
    [(LOGITS[1], 0.75 * LOGITS[0] + 0.25 * LOGITS[1]), (-30 * LOGITS[0], LOGITS[0])],
    ids=["near each other", "nothing in common"],
)
def test_the_start_is_the_mean_if_candidates_have_something_in_common(other: np.ndarray, start: np.ndarray) -> None:
    """The second mixture listens to its first candidate alone where the other knows nothing of a sample."""
    mixture = mixture_of(np.stack([LOGITS[0], other]), weights=[0.75, 0.25], beta=0.0)
    network = Network(task_of(3, 3))
    found = choose_start(network, mixture, inputs(3), make_teacher(network, mixture)(inputs(3)))
    np.testing.assert_allclose(found.model.params, start.ravel(), rtol=1e-6)
    assert (found.name, found.role, found.weight) == ("student", Role.PRIVATE, 1.0)


def test_inputs_are_on_lines_through_two_samples_and_whole_numbers_stay_those_of_one() -> None:
    x = np.array([[0.5, 0.5, 7], [1.5, 2.5, 9]], np.float32)
    mixed = mix_inputs(x, np.array([False, False, True]), draw())
    share = mixed[:, 0] - 0.5
    np.testing.assert_allclose(mixed[:, 1], 0.5 + 2 * share, atol=1e-6)
    assert -BEYOND <= share.min() < 0
    assert 1 < share.max() <= 1 + BEYOND
    assert set(mixed[:, 2].tolist()) == {7, 9}


def test_a_student_answers_as_its_mixture_and_has_the_energies_of_its_own_logits() -> None:
    """The samples' numbers look up rows of a table, so a mixed one would raise."""
    network = Network(task_of(3, 3))
    scaled = [Model(c.model.params * np.float32(k), *NOTHING) for k, c in enumerate(MIXTURE.candidates, 1)]
    sharp = replace(MIXTURE, candidates=tuple(map(put_model, MIXTURE.candidates, scaled)))
    start = average_candidates(sharp.candidates)
    wanted = make_teacher(network, sharp)(inputs(3))
    found = make_student(network, sharp, inputs(3), (inputs(3), Y), draw())
    (student,) = found.mixture.candidates
    before, after = (
        np.abs(make_teacher(network, replace(found.mixture, candidates=(c,)))(inputs(3)) - wanted).max()
        for c in (start, student)
    )
    assert after < before / 2
    energies = np.log(np.exp(student.model.params.reshape(3, 3).astype(np.float64)).sum(axis=1))
    assert (student.energy_mean, student.energy_std) == pytest.approx((energies.mean(), energies.std()), rel=1e-5)
    assert (found.n, found.right, found.mixture_right) == (3, 3, 3)
    assert found.mixture_loss == pytest.approx(-np.log(wanted[Y, Y]).mean())
    assert found.loss == pytest.approx(found.mixture_loss, abs=0.02)
    assert found.is_good


def put_model(candidate: Candidate, model: Model) -> Candidate:
    return replace(candidate, model=model)


@pytest.mark.parametrize(
    ("n", "loss", "right", "good"),
    [
        (20, 0.3, 15, True),
        (20, 0.349, 14, True),
        (20, 0.351, 15, False),
        (20, 0.3, 13, False),
        (1000, 0.3, 10, True),
        (1000, 0.3, 9, False),
        (0, 0.3, 15, False),
        (20, np.nan, 15, False),
    ],
)
def test_a_student_may_be_a_little_worse(n: int, loss: float, right: int, good: bool) -> None:
    assert Student(MIXTURE, n, loss, 0.3, right, 15).is_good is good


def test_a_device_that_is_to_stop_stops() -> None:
    with pytest.raises(StoppedError):
        make_student(Network(task_of(3, 3)), MIXTURE, inputs(3), (inputs(3), Y), draw(), lambda: True)
