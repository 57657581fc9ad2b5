"""Many workers' orders at once, for a fleet that lives in one process; each outcome is what its worker alone gives.

Orders to train a small network run side by side, many models in one tensor (`fedge.models.training.Stack`); those of a
large one run in a thread for each processor, where they wait for arithmetic rather than for Python (`cnn_fedavg` on two
processors with nothing else to do: 10.4 s of processor time in 5.4 s; on a busy machine threads gain nothing). Which of
the two is decided by the network alone (`can_stack`), never by who else was asked, and nothing is drawn that depends on
it: an outcome of a stack agrees with the worker's own to float tolerance, all others to the last bit. A GPU has no use
for threads, which would share its random numbers; on it large networks run side by side, too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
import torch

from edge_agent.cold_start import InferenceWorker
from edge_agent.outcome import Fetch, Outcome
from edge_agent.worker import Look, Worker, remembering
from fedge.messages import FitCandidates, Order, Part, Profile, Sgd, Start, Train, Trial
from fedge.models.training import (
    CPU,
    Stack,
    Trainer,
    accuracies,
    can_stack,
    draws,
    is_small,
    joined,
    losses_and_gradient_norms,
    mean_losses,
    padded,
    side_by_side,
)
from fedge.tensors import Model

MOST_WEIGHTS: Final = 2**20
"""Of one stack: with more, the weights leave the processor's cache and a step of a model takes longer again."""
MOST_WEIGHTS_ON_GPU: Final = 2**24
"""There memory is the bound: by count a measuring pass of seven `cnn_fedavg` on 32 x 32 takes 2 GB."""
MOST_MODELS: Final = 64
THREADED: Final = (Train, Profile, Trial, FitCandidates)
"""Orders that draw from no generator of the process, so that several may run in threads."""


@dataclass(frozen=True, slots=True)
class Job:
    """One order, who carries it out, and where its blobs come from."""

    worker: Worker | InferenceWorker
    order: Order
    fetch: Fetch

    def alone(self) -> Outcome:
        """What the worker makes of it."""
        return self.worker.execute(self.order, self.fetch)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A job to train whose start has been chosen."""

    number: int
    job: Job
    worker: Worker
    action: Train
    start: Model
    chosen: Start


def execute(jobs: Sequence[Job]) -> list[Outcome]:
    """Carry out orders of different workers; outcomes in the order of the jobs.

    All arithmetic is done by one thread of torch for each job: the last bit of a sum depends on their number.
    """
    outcomes: dict[int, Outcome] = {}
    with _one_thread(), remembering(), torch.random.fork_rng(devices=[]):
        networks = {job.worker.fingerprint: job.worker.network for job in jobs if isinstance(job.worker, Worker)}
        stacked = {name for name, network in networks.items() if can_stack(network)}
        threaded = {
            name
            for name, network in networks.items()
            if network.processor == CPU and not is_small(network) and not draws(network)
        }
        ready: list[_Ready] = []
        side: list[int] = []
        for number, job in enumerate(jobs):
            worker, action = job.worker, job.order.action
            if not isinstance(worker, Worker):
                continue
            name = worker.fingerprint
            if name in stacked and isinstance(action, Train) and _is_plain(action) and worker.data.n_shared:
                found = worker.guarded(partial(worker.best_start, action.starts, job.fetch, action.choose))
                if isinstance(found, Outcome):
                    outcomes[number] = found
                else:
                    ready.append(_Ready(number, job, worker, action, *found))
            elif name in threaded and isinstance(action, THREADED):
                side.append(number)
        for group in _groups(ready):
            outcomes |= _train_or_not(group)
        outcomes |= zip(side, _in_threads([jobs[number] for number in side]), strict=True)
        for number, job in enumerate(jobs):
            if number not in outcomes:
                outcomes[number] = job.alone()
    return [outcomes[number] for number in range(len(jobs))]


def _is_plain(action: Train) -> bool:
    return action.keep is None and action.part is Part.ALL


def _groups(ready: Sequence[_Ready]) -> Iterator[list[_Ready]]:
    """Jobs that can share a stack: same network, same training, same measurements; alike in samples, so few pads."""
    alike: dict[tuple[str, Sgd, int, bool], list[_Ready]] = defaultdict(list)
    for one in ready:
        sgd = one.action.sgd
        steps = sgd.steps_for(one.worker.data.n_shared)
        alike[one.worker.fingerprint, sgd, steps, one.action.measure].append(one)
    for members in alike.values():
        most = MOST_WEIGHTS if members[0].worker.processor == CPU else MOST_WEIGHTS_ON_GPU
        n = int(np.clip(most // len(members[0].start.params), 1, MOST_MODELS))
        members.sort(key=lambda one: (one.worker.data.n_shared, one.number))
        yield from (members[first : first + n] for first in range(0, len(members), n))


def _train_or_not(group: Sequence[_Ready]) -> dict[int, Outcome]:
    """`_train`; nothing where one of them raises: then each worker is left alone with its own data."""
    try:
        return _train(group)
    except Exception:  # noqa: BLE001 - a user's network, or a label that it has no output for
        return {}


def _train(group: Sequence[_Ready]) -> dict[int, Outcome]:
    """`Worker._train` for n workers at once."""
    action, samples = group[0].action, [one.worker.data.shared for one in group]
    stack = Stack(group[0].worker.network, [one.start for one in group])
    validated = accuracies(stack, *padded([one.worker.validation for one in group]))
    looks = [Look(None if np.isnan(accuracy) else float(accuracy)) for accuracy in validated]
    losses_after: list[float | None] = [None] * len(group)
    everything = padded(samples) if action.measure else None
    if everything:
        measured = zip(looks, *losses_and_gradient_norms(stack, *everything), strict=True)
        looks = [replace(look, loss=float(loss), gradient_norm=float(norm)) for look, loss, norm in measured]
    x, y = joined(samples)
    rngs = [np.random.default_rng(one.job.order.seed) for one in group]
    drawn = side_by_side([len(own) for _, own in samples], action.sgd.batch_size, rngs)
    Trainer(stack, x, y, action.sgd, drawn).run(action.sgd.steps_for(len(samples[0][1])))
    if everything:
        losses_after = [float(loss) for loss in mean_losses(stack, *everything)]
    updates = stack.changes([one.start for one in group])
    return {
        one.number: one.worker.guarded(
            partial(one.worker.trained, one.job.order, one.action, one.chosen, look, loss_after, update)
        )
        for one, look, loss_after, update in zip(group, looks, losses_after, updates, strict=True)
    }


def _in_threads(jobs: Sequence[Job]) -> list[Outcome]:
    if not jobs:
        return []
    pool = _threads(len(os.sched_getaffinity(0)))
    return list(pool.map(lambda job, context: context.run(job.alone), jobs, [copy_context() for _ in jobs]))


@lru_cache(maxsize=1)
def _threads(n: int) -> ThreadPoolExecutor:
    """Kept from one step to the next, for each of them keeps a network (`shared_network`)."""
    return ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
