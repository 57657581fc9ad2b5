"""One network in place of a device's mixture, distilled on inputs of the device alone.

Specification: docs/methods/student.md. Sources: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural
Network", 2015; Wortsman et al., "Model soups", ICML 2022 (the start); Zhang et al., "mixup", ICLR 2018, and Beyer et
al., "Knowledge distillation: A good teacher is patient and consistent", CVPR 2022 (the inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.mixture import Candidate, GateWeights, Mixture
from export.parity import make_formula
from fedge.bundle.formula import compute_gate_scores, fuse
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array
from fedge.models.optimizer import make_optimizer
from fedge.models.training import Network, to_tensor
from fedge.steps.sgd import Sgd
from fedge.system.stopping import Stop, StoppedError, never
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

STUDENT: Final = "student"
"""Name of the candidate in a bundle."""
STEPS: Final = 200
TAIL: Final = 100
"""Last steps over which the weights are averaged."""
RECIPE: Final = Sgd(optimizer="adam", learning_rate=1e-3, batch_size=32)
BEYOND: Final = 1.0
"""How far a mixed input may be beyond its two samples, in distances between them."""
MARGIN_NATS: Final = 0.05
"""Most by which the student's mean validation loss may exceed the mixture's."""
MARGIN_SHARE: Final = 0.005
"""Share of the validation samples, at least one, that the student may get right less often than the mixture."""

Teach = Callable[[NDArray[np.float32]], Array]
"""Model inputs (n, *input_shape) -> the mixture's probabilities (n, C)."""


@dataclass(frozen=True, slots=True)
class Student:
    """A student, and how it compares with its mixture on n validation samples: mean losses in nats, right answers."""

    mixture: Mixture
    n: int
    loss: float
    mixture_loss: float
    right: int
    mixture_right: int

    @property
    def is_good(self) -> bool:
        """Whether the student may take the mixture's place (section 5); never without validation samples."""
        fewest = self.mixture_right - max(1, MARGIN_SHARE * self.n)
        return self.n > 0 and self.loss <= self.mixture_loss + MARGIN_NATS and self.right >= fewest


def make_student(
    network: Network,
    mixture: Mixture,
    x: NDArray[np.float32],
    validation: tuple[NDArray[np.float32], NDArray[Any]],
    rng: np.random.Generator,
    stop: Stop = never,
) -> Student:
    """Distil a mixture of classes into one network of the task, and compare the two.

    Args:
        network: that of the task; its present weights are lost.
        mixture: the teacher.
        x: inputs that the student learns on, (n, *input_shape), n >= 1; no labels are needed.
        validation: inputs (m, *input_shape) and classes (m,), which the student does not learn on.
        rng: draws the inputs' mixtures.
        stop: checked between steps.

    Raises:
        StoppedError: `stop()` was true.
    """
    problem, (x_val, y_val) = network.task.problem, validation
    teach = make_teacher(network, mixture)
    learned = train_student(network, teach, choose_start(network, mixture, x, teach(x)), x, rng, stop)
    outputs = network.compute_logits(learned.model, x_val)
    says = problem.calibrate(outputs, learned.calibration, np.asarray(learned.offset, np.float64))
    energies = problem.compute_energies(outputs, says)
    if len(y_val):
        learned = replace(learned, energy_mean=float(energies.mean()), energy_std=float(energies.std()))
    alone = Mixture(
        candidates=(learned,), beta=0.0, gate=GateWeights.make_untrained(network.task.input_shape, n_candidates=1)
    )
    with np.errstate(divide="ignore"):
        wanted = Answers(np.log(teach(x_val)))
    found = [problem.compute_log_likelihood(answers, y_val) for answers in (says, wanted)]
    right = [int((answers.values.argmax(axis=1) == y_val).sum()) for answers in (says, wanted)]
    losses = [-float(each.mean()) if len(each) else 0.0 for each in found]
    return Student(alone, len(y_val), losses[0], losses[1], right[0], right[1])


def make_teacher(network: Network, mixture: Mixture) -> Teach:
    """Return the mixture as a function of inputs (fedge.md sections 7 to 11), computed with a network of its own."""
    own, how = Network(network.task, network.processor), make_formula(network.task, mixture)

    def compute_answers(x: NDArray[np.float32]) -> Array:
        outputs = [own.compute_logits(candidate.model, x) for candidate in mixture.candidates]
        return np.asarray(fuse(how, outputs, compute_gate_scores(how, x.astype(np.float64)))[0])

    return compute_answers


def choose_start(network: Network, mixture: Mixture, x: NDArray[np.float32], p: Array) -> Candidate:
    """Return the weighted mean of the candidates, or the candidate that is nearer to the mixture's answers p (n, C).

    Nearer is the smaller mean cross-entropy (1); on a tie the mean comes first, then the lower index.
    """
    starts = [average_candidates(mixture.candidates), *mixture.candidates]

    def compute_distance(start: Candidate) -> float:
        outputs = network.compute_logits(start.model, x)
        offset = np.asarray(start.offset, np.float64)
        q = network.task.problem.calibrate(outputs, start.calibration, offset).values
        return -float((p * q).sum(axis=1).mean())

    best = starts[int(np.argmin([np.nan_to_num(compute_distance(start), nan=np.inf) for start in starts]))]
    return replace(best, role=Role.PRIVATE, name=STUDENT, weight=1.0)


def average_candidates(candidates: tuple[Candidate, ...]) -> Candidate:
    """Return the mean of candidates by their weights: models, calibrations and offsets; counters by maximum."""
    weights = np.array([candidate.weight for candidate in candidates])
    shares = weights if weights.any() else None  # equal ones

    def average(values: list[Any]) -> Any:
        return np.average(np.stack(values).astype(np.float64), axis=0, weights=shares)

    models = [candidate.model for candidate in candidates]
    calibrations = [candidate.calibration for candidate in candidates]
    return replace(
        candidates[0],
        model=Model(
            params=average([model.params for model in models]).astype(np.float32),
            buffers=average([model.buffers for model in models]).astype(np.float32),
            counters=np.max([model.counters for model in models], axis=0),
        ),
        calibration=Calibration(
            temperature=float(average([how.temperature for how in calibrations])),
            kappa=float(average([how.kappa for how in calibrations])),
        ),
        offset=average([candidate.offset for candidate in candidates]),
    )


def train_student(
    network: Network, teach: Teach, start: Candidate, x: NDArray[np.float32], rng: np.random.Generator, stop: Stop
) -> Candidate:
    """Return `start` with weights that answer as the teacher does between and beyond the inputs x (sections 3 and 4).

    The network is in evaluation mode throughout: it learns as what will run, without dropout and with the running
    statistics of the start.
    """
    how, tail, whole = start.calibration, torch.zeros_like(network.weights), (x == np.rint(x)).all(axis=0)
    prior = to_tensor((how.kappa * start.offset).astype(np.float32), network.processor)

    def compute_loss(module: nn.Module, mixed: Tensor, p: Tensor) -> Tensor:
        return -(p * torch.log_softmax(module(mixed) / how.temperature + prior, dim=1)).sum(dim=1).mean()

    network.load(start.model)
    network.gradient.zero_()
    optimizer = make_optimizer(RECIPE)
    for step in range(STEPS):
        if stop():
            raise StoppedError
        mixed = mix_inputs(x, whole, rng)
        p = teach(mixed).astype(np.float32)
        optimizer.begin(network.gradient)
        network.backward(compute_loss, to_tensor(mixed, network.processor), to_tensor(p, network.processor))
        optimizer.step(network.weights, network.gradient)
        if step >= STEPS - TAIL:
            tail += network.weights / TAIL
    return replace(start, model=replace(start.model, params=tail.cpu().numpy()))


def mix_inputs(x: NDArray[np.float32], whole: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw a batch of inputs on the lines through two samples each, up to `BEYOND` outside of them (2).

    `whole`: which numbers of an input, (*input_shape), are whole in all samples. They may be tokens or categories, so
    they are those of one sample.
    """
    i, j = rng.integers(len(x), size=(2, RECIPE.batch_size))
    share = rng.uniform(-BEYOND, 1 + BEYOND, (len(i), *(1,) * (x.ndim - 1))).astype(np.float32)
    return np.asarray(np.where(whole, x[i], share * x[i] + (1 - share) * x[j]), np.float32)
