"""What one device alone could spoil a mean with."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.fleet import update_norms
from coordinator.fleet.fleet import AcceptedUpdate, Answer
from coordinator.fleet.update_norms import FACTOR, AnswerScreen
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.settings import MethodSettings
from edge_agent.device.worker import FinishedOrder
from edge_agent.learning.batched import execute_jobs
from fedge.steps.contract import Declined
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.system.files import compute_digest
from fedge.tensors import codecs
from fedge.tensors.codecs import Norms
from fedge.tensors.layout import Codec, Model, unflatten
from fedge.wire.messages import BlobRef
from tests.support.device import LAYOUT
from tests.support.simulation import digits

REF = BlobRef(digest="0" * 64, size_bytes=1)


def answers(*sizes: int) -> dict[str, Answer]:
    return {f"d{k}": Answer(f"d{k}", Trained(update=REF, n_samples=n), 2.0) for k, n in enumerate(sizes)}


def norms(*values: float, buffers: float = 0.0) -> dict[str, Norms]:
    return {f"d{k}": (value, buffers) for k, value in enumerate(values)}


def limited(told: dict[str, Answer], measured: dict[str, Norms], start: Norms = (0.0, 0.0)):
    return update_norms.screen_by_norms(told, measured, lambda _: start)[:2]


def test_an_update_beyond_a_hundred_medians_is_none_and_the_others_stay() -> None:
    found, refused = limited(answers(5, 5, 5, 5), norms(1.0, 2.0, 3.0, 100 * 2.5))
    assert not refused  # the bound itself is believed
    found, refused = limited(answers(5, 5, 5, 5), norms(1.0, 2.0, 3.0, 251.0))
    assert found == answers(5, 5, 5, 5) | {"d3": Answer("d3", None, 2.0)}
    assert list(refused) == ["d3"]
    assert refused["d3"].name == "update-too-large"
    assert "norms 251, 0" in str(refused["d3"])
    assert "at most 250" in str(refused["d3"])
    assert list(limited(answers(5, 5, 5), norms(0.0, 1.0, 1e6))[1]) == ["d2"], "an update of zero removes no limit"


def test_the_first_updates_of_a_cluster_are_believed_beside_those_of_one_with_nothing_left_to_learn() -> None:
    """FedEPC's clusters, a quarter of 20 devices in a round: honest norms of 7 beside a median of 0.002."""
    told, measured = answers(5, 5, 5, 5), norms(0.001, 0.002, 0.002, 7.0)
    assert limited(told, measured, start=(0.7, 0.0)) == (told, {})
    assert list(limited(told, measured, start=(0.69, 0.0))[1]) == ["d3"]
    assert list(limited(told, norms(1, 1, 1, 1e16), start=(1e15, 0.0))[1]) == ["d3"]  # nonsense is nonsense


def test_buffers_are_measured_by_themselves() -> None:
    found, refused = limited(answers(5, 5, 5), norms(1, 1, 1, buffers=7.0) | {"d1": (1.0, 701.0)})
    assert list(refused) == ["d1"]
    assert found["d1"].result is None


def test_a_claim_counts_as_a_hundred_medians_at_most() -> None:
    found, refused = limited(answers(10, 30, 50, 2**53), norms(1, 1, 1, 1))
    assert not refused
    assert [a.result.n_samples for a in found.values() if isinstance(a.result, Trained)] == [10, 30, 50, 4000]


def test_two_say_nothing_of_each_other_but_nonsense_is_nonsense() -> None:
    two = answers(1, 2**53)
    assert limited(two, norms(1e-6, 1e6)) == (two, {})
    assert list(limited(two, norms(1.0, 1e30))[1]) == ["d1"]
    assert limited({}, {}) == ({}, {})


def test_one_by_one_each_is_measured_against_those_before_it() -> None:
    """The fourth is refused, and is no measure for the fifth."""
    values = iter((1.0, 2.0, 3.0, 500.0, 4.0))
    refs = [BlobRef(digest=str(k) * 64, size_bytes=1) for k in range(6)]
    known = {ref: (value, 0.0) for ref, value in zip(refs, values, strict=False)} | {refs[5]: (1.0, 0.0)}
    guard = AnswerScreen(LAYOUT, lambda ref, _: known[ref])
    action = Train(starts=(Start(model=refs[5]),), sgd=Sgd())
    found = [
        guard.screen(Answer("d", Trained(update=ref, n_samples=n)), action)
        for ref, n in zip(refs, (5, 5, 5, 5, 10_000), strict=False)
    ]
    assert [believed.answers["d"].result is not None for believed in found] == [True, True, True, False, True]
    assert [error.name for believed in found for error in believed.refused.values()] == ["update-too-large"]
    last = found[4].answers["d"].result
    assert isinstance(last, Trained)
    assert last.n_samples == 500, "a claim counts as a hundred medians"


def test_what_was_seen_before_is_a_measure_from_the_first_on() -> None:
    """An update of ten times the norms before is evidence; one of 500 times is refused."""
    refs = [BlobRef(digest=str(k) * 64, size_bytes=1) for k in range(3)]
    known = dict(zip(refs, ((10.0, 0.0), (500.0, 0.0), (1.0, 0.0)), strict=True))
    seen = [AcceptedUpdate(norms=(1.0, 0.0), n_samples=5)] * 3
    guard = AnswerScreen(LAYOUT, lambda ref, _: known[ref], seen)
    action = Train(starts=(Start(model=refs[2]),), sgd=Sgd())
    for ref, refused, suspicious in ((refs[0], False, True), (refs[1], True, False), (refs[2], False, False)):
        found, errors, suspects = guard.screen(Answer("d", Trained(update=ref, n_samples=5)), action)
        assert (found["d"].result is None, bool(errors), bool(suspects)) == (refused, refused, suspicious)


def test_updates_of_zero_and_other_answers_are_no_measure() -> None:
    others = {"x": Answer("x", Declined(reason="cold")), "y": Answer("y", None)}
    found, refused = limited(answers(5, 5, 5) | others, norms(0.0, 0.0, 1.0))
    assert (found, refused) == (answers(5, 5, 5) | others, {})


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(1e-3, 1e-1)), max_size=9))
def test_whoever_is_within_a_hundred_of_everybody_is_never_touched(reports: list[tuple[int, float]]) -> None:
    told = answers(*(n for n, _ in reports))
    assert limited(told, norms(*(norm for _, norm in reports))) == (told, {})


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=9), st.integers(1, 2**53))
def test_no_claim_weighs_more_than_a_hundred_medians(honest: list[int], claim: int) -> None:
    found, _ = limited(answers(*honest, claim), norms(*[1.0] * (len(honest) + 1)))
    assert found[f"d{len(honest)}"].result.n_samples <= FACTOR * np.median([*honest, claim])  # type: ignore[union-attr]


async def test_one_absurd_update_and_one_absurd_claim_do_not_take_a_federation_over(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of them as if the first had not answered; the second with the weight of a hundred."""
    fleet, layout, first, _ = digits(tmp_path, n=6)

    def spoiled(jobs) -> list[FinishedOrder]:
        outcomes = execute_jobs(jobs)
        vast = np.full(layout.n_params, 1e30, np.float32)
        update = Model(vast, np.zeros(0, np.float32), np.zeros(0, np.int64))
        data = codecs.encode(unflatten(update, layout), Codec.FLOAT32)
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data), codec=Codec.FLOAT32)
        outcomes[1] = FinishedOrder(Trained(update=ref, n_samples=40), {ref.digest: data})
        return outcomes

    fleet._execute = spoiled
    method = FedAvg(MethodSettings(rounds=1, sgd=Sgd(steps=2), codec=Codec.FLOAT32, down="float32"))
    with caplog.at_level(logging.WARNING):
        state = await method.round(method.init(layout, first), fleet)
    assert state.history[0].answered == 5
    assert "name=update-too-large device=d01" in caplog.text
    moved = fleet.get(state.model, layout).params - fleet.get(first, layout).params
    assert 0 < np.abs(moved).max() < 1


def test_an_update_longer_than_its_model_and_five_medians_is_evidence_but_counts() -> None:
    told = answers(5, 5, 5, 5)
    for largest, start, found in ((5.1, 5.0, True), (5.0, 4.0, False), (5.1, 5.2, False), (50.0, 0.1, True)):
        measured = norms(1.0, 1.0, 1.0, largest)
        said = update_norms.screen_by_norms(told, measured, lambda _, start=start: (start, 0.0)).suspects  # type: ignore[misc]
        assert list(said) == (["d3"] if found else [])
        assert limited(told, measured, (start, 0.0))[0] == told
    assert not update_norms.screen_by_norms(answers(5, 5), norms(1.0, 1e9), lambda _: (0.0, 0.0)).suspects
