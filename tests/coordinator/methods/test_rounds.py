"""Random numbers of a round, its answers, and its line of the history."""

from collections.abc import Mapping

import msgspec

from coordinator.fleet.fleet import Answer
from coordinator.methods.rounds import ATTEMPTS, compute_mean_loss, make_round_rng, run_with_retries
from coordinator.methods.settings import MethodSettings
from fedge.steps.contract import Action, Declined
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.training.train import Trained
from fedge.wire.messages import BlobRef


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
