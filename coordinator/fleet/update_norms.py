"""Limits how much one device can spoil a mean, relative to the other updates of the step.

Nothing here knows whether a device lies; an honest device whose training diverged is treated the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

import msgspec

from coordinator.aggregation import rules
from coordinator.fleet.fleet import AcceptedUpdate, Answer
from fedge.errors import ProtocolError
from fedge.steps.contract import Action
from fedge.steps.training.train import Train, Trained
from fedge.tensors.codecs import Norms
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef

FACTOR: Final = 100.0
"""Limit of a norm, and of a number of samples, in medians of the step. Generous if all devices train one model: in four
simulated federations of 20 devices (Dirichlet 0.1 and 1, log-normal and power-law sizes) the largest norm was 2.9 times
the median, the largest number of samples 12 times. If each cluster has its own model this is not enough, since one
model may have converged while another begins."""
FACTOR_OF_START: Final = 10.0
"""Limit of an update's norm, in norms of the model that it changes; honest training does not move weights that far."""
SUSPECT: Final = 5.0
"""Suspicious norm, in medians of a step. A longer update that is also longer than the model that it changes is evidence
against its device (`coordinator.fleet.quarantine`). The update still counts; an average shortens it. After convergence
honest norms differ by a factor of 14, but are a small part of the model's."""
HUGE: Final = 1e15
"""Absolute limit of a norm, beyond which a float32 network computes nothing useful."""


class ScreenedAnswers(NamedTuple):
    """The answers of a step, without the results of refused ones. `refused`, `suspects`: the reasons, by device id."""

    answers: dict[str, Answer]
    refused: dict[str, ProtocolError]
    suspects: dict[str, str]


def screen_by_norms(
    answers: Mapping[str, Answer],
    norms: Mapping[str, Norms],
    norms_of_start: Callable[[str], Norms],
    seen: Sequence[AcceptedUpdate] = (),
) -> ScreenedAnswers:
    """Return the answers of a step without disproportionate ones: `update-too-large`.

    An update is refused if its parameters or its buffers have a norm above 100 times the median of the step and above
    10 times that of the model it changes, or above 1e15. It is suspicious if its parameters have a norm above 5 times
    the median and above that of the model. A claimed number of samples is limited to 100 times the median, for its
    weight in a mean.

    Args:
        answers: the step's answers, by device id.
        norms: the norms of each update, by device id.
        norms_of_start: device id -> norms of the model that it trained; called only for long updates.
        seen: earlier updates, which count in the medians as well.
    """
    medians = [
        rules.compute_typical([n[part] for n in (*(s.norms for s in seen), *norms.values())]) for part in range(2)
    ]
    usual, middle = [FACTOR * median for median in medians], medians[0]
    claims = [a.result.n_samples for a in answers.values() if isinstance(a.result, Trained)]
    most = FACTOR * rules.compute_typical([*(s.n_samples for s in seen), *claims])
    found = ScreenedAnswers(dict(answers), {}, {})
    for i, answer in answers.items():
        result = answer.result
        if not isinstance(result, Trained):
            continue
        limits = [min(limit, HUGE) for limit in usual]
        if _exceeds(norms[i], limits):
            own = [FACTOR_OF_START * norm for norm in norms_of_start(i)]
            limits = [min(max(pair), HUGE) for pair in zip(usual, own, strict=True)]
        if _exceeds(norms[i], limits):
            detail = "norms {:.3g}, {:.3g} of parameters and buffers; at most {:.3g}, {:.3g} are accepted"
            found.refused[i] = ProtocolError("update-too-large", detail.format(*norms[i], *limits))
            found.answers[i] = replace(answer, result=None)
            continue
        if result.n_samples > most:
            found.answers[i] = replace(answer, result=msgspec.structs.replace(result, n_samples=int(most)))
        if (norm := norms[i][0]) > SUSPECT * middle and norm > norms_of_start(i)[0]:
            text = f"norm {norm:.3g}, {norm / middle:.1f} times the median and longer than the model that it changes"
            found.suspects[i] = text
    return found


def screen_answers(
    answers: Mapping[str, Answer],
    actions: Mapping[str, Action],
    layout: Layout,
    norms_of: Callable[[BlobRef, Layout], Norms],
    seen: Sequence[AcceptedUpdate] = (),
) -> ScreenedAnswers:
    """Screen by norms (`screen_by_norms`) for a fleet that knows the norms of updates with this layout."""

    def get_start_norms(i: str) -> Norms:
        action = actions[i]
        assert isinstance(action, Train)
        found = [norms_of(start.model, layout.without(action.personal)) for start in action.starts]
        return max(params for params, _ in found), max(buffers for _, buffers in found)

    norms = {
        i: norms_of(answer.result.update, action.uploads(answer.result, layout)[answer.result.update])
        for i, answer in answers.items()
        if isinstance(answer.result, Trained) and isinstance(action := actions[i], Train)
    }
    return screen_by_norms(answers, norms, get_start_norms, seen)


class AnswerScreen:
    """A screen for a stream of answers, which compares each answer with those before it, as in `screen_answers`.

    Until three updates have arrived there is no median, and an update is accepted unless its norm is above 1e15.

    Args:
        layout: the layout of the model.
        norms_of: (reference, layout) -> norms of an update.
        seen: earlier accepted updates.
    """

    def __init__(
        self, layout: Layout, norms_of: Callable[[BlobRef, Layout], Norms], seen: Sequence[AcceptedUpdate] = ()
    ) -> None:
        self._layout = layout
        self._norms_of = cache(norms_of)
        self._seen = list(seen)

    def screen(self, answer: Answer, action: Action) -> ScreenedAnswers:
        """Return what is accepted of one answer; refused updates do not affect later limits."""
        i = answer.device_id
        found = screen_answers({i: answer}, {i: action}, self._layout, self._norms_of, self._seen)
        kept = found.answers[i]
        if isinstance(kept.result, Trained) and isinstance(action, Train):
            norms = self._norms_of(kept.result.update, action.uploads(kept.result, self._layout)[kept.result.update])
            self._seen.append(AcceptedUpdate(norms=norms, n_samples=kept.result.n_samples))
        return found


def _exceeds(norms: Iterable[float], limits: Iterable[float]) -> bool:
    return any(norm > limit for norm, limit in zip(norms, limits, strict=True))
