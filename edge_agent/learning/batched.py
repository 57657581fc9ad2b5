"""Batched execution: many devices' orders at once, for a fleet in one process.

A step whose device half has `many` gets all its orders together; each result equals what its device alone gives, to
float tolerance. Orders of other steps are done one by one. With large networks, if the step draws from no generator of
the process (`THREADED`), each processor gets a thread, which waits for arithmetic rather than for Python. `cnn_fedavg`
on two idle processors takes 10.4 s of processor time in 5.4 s; on a busy machine threads gain nothing. Results of
threads are equal to the last bit. The choice depends on step and network alone, never on the other devices. A GPU gets
no threads, because they would share its random numbers.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache

import torch

from edge_agent.device.device import Fetch, cache_models
from edge_agent.device.worker import FinishedOrder, Worker, finish_order
from fedge.models.training import CPU, is_small, uses_randomness
from fedge.steps.contract import Action, load_device_half
from fedge.wire.messages import Order


@dataclass(frozen=True, slots=True)
class Job:
    """One order with its action, its worker, and the source of its blobs."""

    worker: Worker
    order: Order
    action: Action
    fetch: Fetch

    def run(self) -> FinishedOrder:
        """Carry out the order alone, and return the worker's result."""
        return self.worker.execute(self.order, self.fetch, action=self.action)


def execute_singly(jobs: Sequence[Job]) -> list[FinishedOrder]:
    """Run each worker alone, as on its device."""
    return [job.run() for job in jobs]


def execute_jobs(jobs: Sequence[Job]) -> list[FinishedOrder]:
    """Carry out orders of different workers, and return results in the order of the jobs.

    Each job uses one torch thread, since the last bit of a sum depends on the number of threads.
    """
    found: dict[int, FinishedOrder] = {}
    with use_one_thread(), cache_models(), torch.random.fork_rng(devices=[]):
        of_step: dict[type[Action], list[int]] = defaultdict(list)
        for number, job in enumerate(jobs):
            if job.worker.find_refusal(job.action) is None:
                of_step[type(job.action)].append(number)
        for step, numbers in of_step.items():
            found |= _execute_batched(step, {number: jobs[number] for number in numbers})
        for number, job in enumerate(jobs):
            if number not in found:
                found[number] = job.run()
    return [found[number] for number in range(len(jobs))]


def _execute_batched(step: type[Action], jobs: dict[int, Job]) -> dict[int, FinishedOrder]:
    """Execute the orders of one step that can be batched."""
    found: dict[int, FinishedOrder] = {}
    half = load_device_half(step)
    if hasattr(half, "many"):
        devices = {
            number: job.worker.make_device(job.order, job.fetch, action=job.action) for number, job in jobs.items()
        }
        results = half.many(list(devices.values()), [job.action for job in jobs.values()])
        for (number, device), result in zip(devices.items(), results, strict=True):
            if result is not None:
                found[number] = finish_order(device, result)
    if getattr(half, "THREADED", False):
        left = {n: job for n, job in jobs.items() if n not in found and _needs_thread(job.worker)}
        found |= dict(zip(left, _execute_threaded(list(left.values())), strict=True))
    return found


def _needs_thread(worker: Worker) -> bool:
    """Return whether a separate thread pays off for a network, without changing results."""
    network = worker.network
    return network.processor == CPU and not is_small(network) and not uses_randomness(network)


def _execute_threaded(jobs: Sequence[Job]) -> list[FinishedOrder]:
    if not jobs:
        return []
    pool = _get_threads(len(os.sched_getaffinity(0)))
    return list(pool.map(lambda job, context: context.run(job.run), jobs, [copy_context() for _ in jobs]))


@lru_cache(maxsize=1)
def _get_threads(n: int) -> ThreadPoolExecutor:
    """Return threads kept between steps, since each caches a network (`get_shared_network`)."""
    return ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,))


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Use one thread within this context, as an agent does, since a sum's last bit depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
