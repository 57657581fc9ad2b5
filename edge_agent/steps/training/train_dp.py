"""Train by DP-SGD in place of SGD, so that what leaves hardly depends on any single sample.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1 (`fedge.models.dp_sgd`), run on
the device that owns the samples. Layers that stay on the device are trained in the same way, because they shape the
gradients of the layers that are sent, and without noise would leak single samples into them.

Batches and noise come from the operating system, never from the order's seed, which the coordinator knows. A repeated
order draws anew and is charged again.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from edge_agent.device.device import Device, FailedError
from edge_agent.learning.evaluation import Evaluation
from edge_agent.learning.frame import Begun, Learned, begin, finish
from edge_agent.learning.noisy_choice import choose_start
from edge_agent.privacy.answers import explain_refusal
from edge_agent.privacy.dp_ledger import Charge, Ledger, Mechanism, compute_noise
from fedge.data.augmentation import find_own
from fedge.models.dp_sgd import Clipping, PrivateNetwork, draw_poisson_batches
from fedge.models.training import Part, Trainer, make_augmenter
from fedge.steps.contract import Declined, Result
from fedge.steps.training.train_dp import TrainDp, require_no_statistics
from fedge.tensors.layers import cut, paste
from fedge.tensors.layout import Model
from fedge.wire.messages import Why

THREADED = True
overlay = paste


def run(device: Device, action: TrainDp) -> Result:
    """Train from the start that a noisy choice takes and charge the ledger, then report the update."""
    if not device.data.n_shared:
        return Declined(why=Why.NO_DATA)
    require_no_statistics(device.layout)
    if action.sgd.class_weights:
        raise FailedError("class weights count the device's labels, and no noise hides these counts")
    if own := find_own(device.task):
        raise FailedError(f"{own[0]} may mix the samples of a batch, and then no bound holds for a single one")
    charge, n = plan_charge(device, action), device.data.n_shared
    if (reason := explain_refusal(device, action.privacy, Ledger(device.home), charge, n)) is not None:
        return Declined(why=Why.BUDGET, reason=reason)
    start = choose_start(device, action.privacy, action.starts, with_prior=action.choose == "loss")
    begun = begin(device, msgspec.structs.replace(action, starts=(start,)))
    assert isinstance(begun, Begun)
    train_model(device, action, begun.start, charge.mechanism)
    Ledger(device.home).record(charge)
    trained = device.network.dump()
    kept = None if begun.keeps is None else cut(trained, device.layout, begun.keeps)
    return finish(begun, Learned(trained, kept), Evaluation(score=None), loss_after=None)


def plan_charge(device: Device, action: TrainDp) -> Charge:
    """Return the cost of the order."""
    n, sgd = device.data.n_shared, action.sgd
    rate, steps = min(1.0, sgd.batch_size / n), sgd.count_steps(n) + action.head_steps
    sigma = compute_noise(action.privacy, rate, steps)
    mechanism = Mechanism(noise_multiplier=sigma, sample_rate=rate)
    return Charge(order=device.order.id, run=device.order.run, at=time.time(), mechanism=mechanism, steps=steps)


def train_model(device: Device, action: TrainDp, start: Model, mechanism: Mechanism) -> None:
    """Train from `start` by DP-SGD on all weights, or first on the head and then on the base (FedRep)."""
    data, sgd, source = device.data, action.sgd, device.source
    network, n = device.network, data.n_shared
    network.load(start)
    clipping = Clipping(action.privacy.clip_norm, mechanism.noise_multiplier)

    def train_part(steps: int, moves: Part) -> None:
        private = PrivateNetwork(network, clipping, mechanism.sample_rate * n, source, moves)
        batches = draw_poisson_batches(n, mechanism.sample_rate, source)
        augment = None
        if device.task.augment:  # by secret numbers: those of the order's seed would tell samples apart
            rng = np.random.default_rng(np.frombuffer(source(32), np.uint32))
            augment = make_augmenter(device.task, [rng])
        Trainer(private, *data.shared, sgd, batches, moves=moves, augment=augment).run(steps, device.stop)

    if action.head_steps:
        train_part(action.head_steps, "head")
    train_part(sgd.count_steps(n), "base" if action.head_steps else "all")
