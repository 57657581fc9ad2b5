import pytest

from fedge.wire.messages import Rollout, RolloutState, decode_message, encode_message
from fedge.wire.rollout import compute_place, takes_part

DEVICES = [f"cam{i}" for i in range(2000)]


def stage(share, *, canaries=(), name="r1"):
    return Rollout(
        id=name, state=RolloutState.RUNNING, target="5/manifest.json", release=5, canaries=canaries, share=share,
        metadata={},
    )  # fmt: skip


def test_a_stage_is_a_share_of_the_fleet_and_the_next_holds_the_last():
    small, large = ({d for d in DEVICES if takes_part(stage(share), d)} for share in (0.1, 0.5))

    assert len(small) / len(DEVICES) == pytest.approx(0.1, abs=0.03)
    assert len(large) / len(DEVICES) == pytest.approx(0.5, abs=0.05)
    assert small < large


def test_canaries_come_first_and_everybody_last():
    assert takes_part(stage(0.0, canaries=("cam7",)), "cam7")
    assert not any(takes_part(stage(0.0), d) for d in DEVICES)
    assert all(takes_part(stage(1.0), d) for d in DEVICES)


def test_another_rollout_has_other_canaries():
    assert {d for d in DEVICES if compute_place("r1", d) < 0.1} != {d for d in DEVICES if compute_place("r2", d) < 0.1}


def test_a_rollout_travels():
    message = stage(0.25, canaries=("cam1",))

    assert decode_message(encode_message(message), Rollout) == message
