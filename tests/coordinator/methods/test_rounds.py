"""Random numbers of a round, its answers, its line of the history, and whether it was the last."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

import fedge
from coordinator.aggregation.protection import Protection
from coordinator.fleet.fleet import Answer
from coordinator.methods.catalogue import make_method
from coordinator.methods.rounds import ATTEMPTS, compute_mean_loss, make_round_rng, run_with_retries, stop_early
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import ModelState, RoundSummary, decode_state, encode_state
from fedge.errors import ConfigError
from fedge.steps.contract import Action, Declined
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.training.train import Trained
from fedge.tensors.layout import Layout, TensorInfo
from fedge.wire.messages import BlobRef, iterate_blobs


def test_the_mean_loss_of_a_round_is_weighted_by_samples_and_needs_all_of_them() -> None:
    update = BlobRef(digest="0" * 64, size_bytes=8)
    few, many = (Trained(update=update, n_samples=n, loss_before=loss) for n, loss in ((5, 1.0), (15, 2.0)))
    assert compute_mean_loss([few, many]) == (5 * 1.0 + 15 * 2.0) / 20
    assert compute_mean_loss([few, msgspec.structs.replace(many, loss_before=None)]) is None
    assert compute_mean_loss([]) is None


def test_random_numbers_depend_on_seed_and_round_alone() -> None:
    settings = MethodSettings(seed=4)
    assert make_round_rng(settings, 2).integers(1 << 40) == make_round_rng(settings, 2).integers(1 << 40)
    assert make_round_rng(settings, 2).integers(1 << 40) != make_round_rng(settings, 3).integers(1 << 40)


class Deaf:
    """Devices that answer when they are asked for the n-th time. `asked`: step and devices, in order."""

    def __init__(self, **hears: int) -> None:
        self._hears = dict(hears)
        self.asked: list[tuple[str, list[str]]] = []

    async def run(self, step: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.asked.append((step, list(actions)))
        self._hears = {i: n - (i in actions) for i, n in self._hears.items()}
        return {i: Answer(i, Declined(reason=step) if self._hears[i] <= 0 else None) for i in actions}


async def test_who_does_not_answer_the_last_step_is_asked_again_a_few_times() -> None:
    fleet = Deaf(a=1, b=2, never=99)
    answers = await run_with_retries(fleet, "install", dict.fromkeys(("a", "b", "never"), DescribeLabels()))  # type: ignore[arg-type]
    assert [(i, a.result and a.result.reason) for i, a in answers.items()] == [  # type: ignore[union-attr]
        ("a", "install"), ("b", "install-2"), ("never", None),
    ]  # fmt: skip
    assert fleet.asked == [
        ("install", ["a", "b", "never"]), ("install-2", ["b", "never"]), ("install-3", ["never"]),
    ]  # fmt: skip
    assert len(fleet.asked) == ATTEMPTS


SCORES = (0.2, 0.5, 0.6, 0.55, 0.6, 0.59, 0.9)
"""Of the model that the devices of round 1, 2, ... received."""


LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))


def make_state(number: int) -> ModelState:
    ref = BlobRef(digest=f"{number:064x}", size_bytes=1)
    return ModelState(round=number, layout=LAYOUT, model=ref)


def train(scores: tuple[float | None, ...], patience: int, last: int) -> ModelState:
    """The state after the rounds; as a coordinator that is killed after each of them would read it."""
    state = make_state(0)
    for score in scores:
        number = state.round + 1
        if number > last:
            break
        line = RoundSummary(round=number, asked=1, answered=1, accuracy=score, loss=None)
        after = msgspec.structs.replace(make_state(number), history=(*state.history, line), best_state=state.best_state)
        state = decode_state(encode_state(stop_early(state, after, last, patience)), ModelState)
    return state


def test_the_best_state_comes_back_once_there_is_no_better_one_for_so_many_rounds() -> None:
    stopped = train(SCORES, 3, 30)
    assert stopped.best_state
    assert (stopped.round, stopped.best_state.stopped, stopped.best_state.round) == (30, 6, 2)
    assert stopped.model == make_state(2).model, "the model that reached 0.6 in round 3 came from round 2"
    assert len(stopped.history) == 6
    assert {ref.digest for ref in iterate_blobs(stopped)} == {stopped.model.digest}, "nothing else is kept"


def test_until_then_training_goes_on_and_the_best_tensors_stay() -> None:
    state = train(SCORES, 4, 30)
    assert state.best_state
    assert (state.round, state.best_state.round, state.best_state.stopped) == (7, 6, None)
    waiting = train(SCORES[:5], 4, 30)
    assert {ref.digest for ref in iterate_blobs(waiting)} == {make_state(k).model.digest for k in (5, 2)}


def test_at_the_end_of_all_rounds_the_best_state_is_kept_unless_the_last_one_may_be_better() -> None:
    assert train(SCORES, 10, 5).model == make_state(2).model
    assert train(SCORES, 10, 7).model == make_state(7).model


def test_rounds_without_a_score_wait_too() -> None:
    assert train((None, None), 2, 30).round == 2
    assert train((0.5, None, None), 2, 30).model == make_state(0).model


def test_more_rounds_after_a_stop_begin_to_wait_anew() -> None:
    stopped = train(SCORES, 3, 30)
    line = RoundSummary(round=31, asked=1, answered=1, accuracy=0.1, loss=None)
    after = msgspec.structs.replace(make_state(31), history=(*stopped.history, line), best_state=stopped.best_state)
    again = stop_early(stopped, after, 40, 3)
    assert again.best_state
    assert (again.round, again.best_state.score, again.best_state.since) == (31, 0.1, 0)


def test_a_run_stops_early_with_bundles_of_the_best_round() -> None:
    told: list[str] = []
    given: dict[str, Any] = {"task": "digits", "samples": 300, "devices": 3, "local_steps": 30, "seed": 1}
    result = fedge.simulate(**given, method="fedavg", rounds=40, patience=2, learning_rate=0.3, progress=told.append)
    (line,) = [line for line in told if line.startswith("training stops after round")]
    stopped, best = (int(word.strip(":.")) for word in line.split() if word.strip(":.").isdigit())
    assert best + 3 == stopped == result.rounds < 40
    assert result.curve[-1].round == stopped
    scores = result.validation
    assert max(scores.values()) == scores[best + 1], "the best model was received a round later"
    shorter = fedge.simulate(**given, method="fedavg", rounds=best, learning_rate=0.3, progress=None)
    assert shorter.accuracy == result.accuracy


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("ditto", {}, "what devices keep is of their last round"),
        ("fedrep", {}, "what devices keep is of their last round"),
        ("scmoe-pfl", {}, "it stops by itself, after"),
        ("fedbuff", {}, "devices are at work for later models"),
        ("fedge", {"options": {"buffer": 3}}, "with a buffer devices are at work"),
        ("fedavg", {"protection": Protection(dp_epsilon=8.0)}, "no device tells its validation score"),
    ],
)
def test_methods_that_cannot_stop_say_why(method: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"{method} takes no --patience: .*{says}"):
        make_method(method, MethodSettings(patience=3, **settings))
