"""The simulated clock: how long an order takes on a device, whether the device is there, whether it ever answers.

    seconds = latency + bytes down / link + work / speed * noise + bytes up / link

Work is counted in floating-point operations (`work`). Every random number is a function of (seed, round, step, device)
and of what it is for: who else is asked, in what order, changes nothing. Nothing here has state.
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist
from typing import Final

from coordinator.fleet.devices import Hardware
from fedge.messages import (
    Action,
    FitCandidates,
    FitEnergy,
    FitGate,
    FitMixture,
    FitPool,
    FitWeights,
    Install,
    KeepHead,
    KeepModel,
    KeepPart,
    Profile,
    Sgd,
    Train,
    Trial,
)

FLOPS: Final = 4e9
"""Floating-point operations a second that a Raspberry Pi 4 (speed 1) reaches in training: a third of the 13 GFLOP/s
that Linpack reaches on it, for batches are small (assumed)."""
TRAINING_PASSES: Final = 3
"""A step of training costs as much as so many forward passes: one forward, two backward."""
CANDIDATE_STEPS: Final = 160
"""Of the private model, at most (fedge.md section 6)."""
_NORMAL: Final = NormalDist()


def passes(  # noqa: PLR0911 - a table
    action: Action, *, n_shared: int, n_train: int, n_val: int
) -> float:
    """How many forward passes of one sample an order costs, roughly: what is not training or a look at data is free.

    n_shared, n_train, n_val: samples of the device: not sensitive, all of its training samples, validation.
    """
    n_all = n_train + n_val
    match action:
        case Train():
            looks = (TRAINING_PASSES + 1) * n_shared + n_val + (len(action.starts) - 1) * (n_val or n_shared)
            heads = action.keep.head_steps if isinstance(action.keep, KeepPart) else 0
            work = _training(action.sgd, action.sgd.steps_for(n_shared) + heads, n_shared)
            if isinstance(action.keep, KeepHead):
                work *= 2
            elif isinstance(action.keep, KeepModel):
                work += _training(action.sgd, action.sgd.steps_for(n_train), n_train)
            return looks + work
        case Profile():
            return n_shared
        case Trial():
            return 2 * n_val
        case FitCandidates():
            looks = (5 + len(action.experts)) * n_val
            steps = (action.private_steps or CANDIDATE_STEPS) + action.local_steps
            return looks + _training(action.sgd, steps, n_train)
        case FitWeights() | FitEnergy():
            return len(action.calibration) * len(action.pooled) * n_val
        case FitGate():
            return len(action.calibration) * n_val + _training(action.sgd, CANDIDATE_STEPS, n_all)
        case Install():
            tuning = action.fine_tune
            return n_val + (_training(tuning.sgd, max(tuning.checkpoints), n_train) if tuning else 0)
        case FitMixture():
            return (2 + len(action.experts)) * n_all + _training(action.sgd, action.sgd.steps_for(n_train), n_train)
        case FitPool():
            return n_all * (1 + action.epochs)
        case _:
            return n_all


def _training(sgd: Sgd, steps: int, n: int) -> float:
    return TRAINING_PASSES * steps * min(sgd.batch_size, n)


def seconds(
    hardware: Hardware,
    *,
    work: float,
    bytes_down: int,
    bytes_up: int,
    seed: int,
    round_number: int,
    step: str,
    device: str,
) -> float:
    """Time from the moment an order is sent to the moment its answer is there.

    work: floating-point operations. bytes_down, bytes_up: of the order's models and the answer's tensors.
    """
    moving = 8e-6 * (bytes_down / hardware.down_mbit_s + bytes_up / hardware.up_mbit_s)
    where = (seed, round_number, step, device)
    return hardware.latency_s + moving + work / (hardware.speed * FLOPS) * noise(hardware, *where)


def noise(hardware: Hardware, seed: int, round_number: int, step: str, device: str) -> float:
    """Factor of the computing time: log-normal, for stragglers with a long tail."""
    factor = math.exp(hardware.jitter * _normal(seed, round_number, step, device, "jitter"))
    if _uniform(seed, round_number, step, device, "straggles") < hardware.straggles:
        factor *= math.exp(abs(_normal(seed, round_number, step, device, "tail")))
    return factor


def dropped(hardware: Hardware, *, seed: int, round_number: int, step: str, device: str) -> bool:
    """Whether the order is never answered."""
    return _uniform(seed, round_number, step, device, "drops") < hardware.drops


def there(hardware: Hardware, before: bool | None, *, seed: int, round_number: int, device: str) -> bool:
    """Whether a device is there in a round. `before`: whether it was there in the round before; None: the first one."""
    chance = hardware.availability if before is None else hardware.stays if before else hardware.returns
    return _uniform(seed, round_number, "", device, "there") < chance


def _uniform(seed: int, round_number: int, step: str, device: str, purpose: str) -> float:
    """In [0, 1)."""
    digest = hashlib.sha256(f"{seed}.{round_number}.{step}.{device}.{purpose}".encode()).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def _normal(seed: int, round_number: int, step: str, device: str, purpose: str) -> float:
    return _NORMAL.inv_cdf(max(_uniform(seed, round_number, step, device, purpose), 2**-54))
