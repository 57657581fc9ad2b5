"""Who trains where all devices are one cluster, and what a round tells of them."""

import math

import numpy as np
import pytest

from coordinator.fleet.fleet import Answer
from coordinator.methods.catalogue import make_method
from coordinator.methods.parts.cohort import ChoosingState, draw_devices, make_bandit_settings, record_answers
from coordinator.methods.rounds import make_round_rng
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import encode_state
from coordinator.selection import ccmab
from coordinator.selection.select import draw_uniform
from coordinator.simulation.rounds import run_rounds
from coordinator.store.records import Device
from fedge.steps.contract import Declined, Failed
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef, Context
from tests.support.simulation import digits

SETTINGS = MethodSettings(participation=0.5, seed=4, sgd=Sgd(steps=2))
STATE = ChoosingState(round=0, layout=Layout(tensors=()))
DEVICES = [Device(f"d{k}", 20, Context(device_id=f"d{k}", cpu_ghz=1.0 + k)) for k in range(6)]
MODEL = BlobRef(digest="1" * 64, size_bytes=5)
UPDATE = BlobRef(digest="0" * 64, size_bytes=1)
TRAINED = Trained(update=UPDATE, n_samples=5, loss_before=2.0, loss_after=1.5, gradient_norm=1.0)


def test_each_rule_draws_the_share_that_takes_part() -> None:
    ids = [device.id for device in DEVICES]
    assert draw_devices("uniform", STATE, DEVICES, SETTINGS, MODEL)[0] == draw_uniform(
        ids, 3, make_round_rng(SETTINGS, 1)
    )
    assert draw_devices("fastest", STATE, DEVICES, SETTINGS, MODEL)[0] == ["d3", "d4", "d5"]
    of_bandit, _ = draw_devices("ccmab", STATE, DEVICES, SETTINGS, MODEL)
    expected, _ = ccmab.select(
        ccmab.State(),
        [ccmab.Arm(id=d.id, n_samples=20, work=2 * 20, cpu_ghz=1.0 + k, model_bytes=5) for k, d in enumerate(DEVICES)],
        ccmab.Settings(quota=0.5),
    )
    assert of_bandit == list(expected.ids)
    assert len(of_bandit) == 3
    assert "d0" not in of_bandit, "beyond the deadline"


@pytest.mark.parametrize("how", ["uniform", "fastest", "ccmab"])
def test_without_devices_nobody_is_drawn(how) -> None:
    assert draw_devices(how, STATE, [], SETTINGS, MODEL)[0] == []


def test_only_the_bandit_learns_of_losses_and_only_the_fastest_of_times() -> None:
    for how in ("uniform", "fastest", "ccmab"):
        ids, choices = draw_devices(how, STATE, DEVICES, SETTINGS, MODEL)
        answers = {i: Answer(i, TRAINED, seconds=3.0) for i in ids}
        state = record_answers(how, STATE, choices, answers)
        assert state.seconds == (dict.fromkeys(ids, 3.0) if how == "fastest" else {})
        assert state.bandit.rewards == ((0.5, 0.5, 0.5) if how == "ccmab" else ())


def test_no_answer_is_a_failure_and_a_refusal_is_none() -> None:
    (unresponsive, refusing, trained), choices = draw_devices("ccmab", STATE, DEVICES, SETTINGS, MODEL)
    answers = {
        unresponsive: Answer(unresponsive, None),
        refusing: Answer(refusing, Declined(reason="on battery")),
        trained: Answer(trained, TRAINED, seconds=3.0),
    }
    assert record_answers("ccmab", STATE, choices, answers).bandit.rewards == (-1.0, 0.5)
    answers["x"] = Answer("x", Failed(reason="disk full"))
    assert record_answers("fastest", STATE, {}, answers).seconds == {
        unresponsive: math.inf,
        trained: 3.0,
        "x": math.inf,
    }


def test_where_everybody_is_to_train_there_is_no_deadline() -> None:
    assert make_bandit_settings(MethodSettings(participation=1.0)) == ccmab.Settings(quota=1.0, deadline_s=math.inf)
    assert make_bandit_settings(SETTINGS) == ccmab.Settings(quota=0.5, deadline_s=None)


async def test_the_bandit_of_fedavg_learns_from_what_devices_measure_and_repeats_itself(tmp_path) -> None:
    states = []
    for turn in range(2):
        fleet, layout, first, _ = digits(tmp_path / str(turn), limit=300)
        fleet.unresponsive = frozenset({"d05"})
        of = make_method("fedavg", MethodSettings(rounds=4, participation=0.5, options={"selection": "ccmab"}))
        states.append(await run_rounds(of, of.init(layout, first), fleet))
    assert encode_state(states[0]) == encode_state(states[1])
    bandit, history = states[0].bandit, states[0].history
    assert bandit.round == 4
    assert len(bandit.rewards) == sum(line.asked for line in history)
    assert bandit.rewards.count(-1.0) == 1, "d05, when it was asked"
    assert "d05" in bandit.last_asked
    assert all(line.loss is not None for line in history)
    assert np.isfinite(bandit.rewards).all()
