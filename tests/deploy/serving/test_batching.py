"""Requests that come together share calls; each gets its own rows, and faults and limits touch those they must."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deploy.inference.runtime import load
from deploy.serving.batching import MAX_WAITING_BYTES, Batcher, BusyError
from fedge.errors import ConfigError

from ..bundles import GOLDEN, variant
from ..served import golden

pytestmark = pytest.mark.torch_free

X = golden()["x"].astype(np.float32)


@pytest.fixture(scope="module")
def runtime():
    return load(GOLDEN)


class Gate:
    """A model that answers when it is let; notes the size of each call."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.entered = threading.Event()
        self.open = threading.Event()
        self.calls = []

    def answer(self, x):
        self.calls.append(len(x))
        self.entered.set()
        assert self.open.wait(30)
        return self.runtime, self.runtime.predict(x)


@pytest.fixture
def gate(runtime):
    return Gate(runtime)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def begun(gate):
    assert await asyncio.to_thread(gate.entered.wait, 30)


async def test_what_waits_while_the_graph_is_busy_goes_together(gate, pool, runtime):
    batcher = Batcher(gate.answer, pool, max_batch=8)
    asked = [asyncio.create_task(batcher.predict(X[:1]))]
    await begun(gate)
    asked += [asyncio.create_task(batcher.predict(X[i : i + n])) for i, n in ((1, 2), (3, 5), (8, 2), (10, 2))]
    await asyncio.sleep(0)
    gate.open.set()

    answers = await asyncio.gather(*asked)

    assert gate.calls == [1, 7, 4]
    expected = runtime.predict(X)
    for field in ("probabilities", "weights", "energies", "class_index", "outlier"):
        found = np.concatenate([getattr(prediction, field) for _, prediction in answers])
        np.testing.assert_allclose(found, getattr(expected, field), rtol=1e-5, atol=1e-6)
    assert sum((prediction.class_name for _, prediction in answers), ()) == expected.class_name


async def test_a_request_larger_than_a_batch_has_a_call_of_its_own(gate, pool):
    gate.open.set()
    batcher = Batcher(gate.answer, pool, max_batch=4)
    answers = await asyncio.gather(*(batcher.predict(x) for x in (X[:2], X, X[:2], X[:2])))
    assert gate.calls == [2, 12, 4]
    assert [len(prediction.class_index) for _, prediction in answers] == [2, 12, 2, 2]


async def test_a_delay_gathers_what_comes_within_it(gate, pool):
    gate.open.set()
    batcher = Batcher(gate.answer, pool, max_batch=3, max_delay_s=30)

    async def later(i):
        await asyncio.sleep(0.01 * i)
        return await batcher.predict(X[:1])

    await asyncio.gather(*(later(i) for i in range(3)))

    assert gate.calls == [3]  # full: nobody waits 30 s

    batcher = Batcher(gate.answer, pool, max_batch=3, max_delay_s=0.01)
    await batcher.predict(X[:1])
    assert gate.calls == [3, 1]


async def test_one_too_many_is_told_at_once_and_the_others_are_answered(gate, pool):
    batcher = Batcher(gate.answer, pool, max_waiting=3)
    asked = [asyncio.create_task(batcher.predict(X[:1]))]
    await begun(gate)
    asked += [asyncio.create_task(batcher.predict(X[:1])) for _ in range(3)]
    await asyncio.sleep(0)

    with pytest.raises(BusyError, match="3 requests wait"):
        await batcher.predict(X[:1])

    gate.open.set()
    assert len(await asyncio.gather(*asked)) == 4
    await batcher.predict(X[:1])


async def test_the_bytes_that_wait_are_bounded(gate, pool):
    half = np.zeros((MAX_WAITING_BYTES // X[:2].nbytes, *X.shape[1:]), X.dtype)
    batcher = Batcher(gate.answer, pool)
    asked = [asyncio.create_task(batcher.predict(np.concatenate([half, half, X])))]  # alone it may be of any size
    await begun(gate)
    asked += [asyncio.create_task(batcher.predict(half)) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(BusyError):
        await batcher.predict(X[:1])

    gate.open.set()
    await asyncio.gather(*asked)


async def test_samples_of_a_wrong_shape_spoil_no_other_request(gate, pool):
    gate.open.set()
    batcher = Batcher(gate.answer, pool)
    wrong = np.zeros((1, 9), np.float32)

    results = await asyncio.gather(*map(batcher.predict, (X[:1], wrong, X[:1])), return_exceptions=True)

    assert isinstance(results[1], ConfigError)
    assert [len(results[i][1].class_index) for i in (0, 2)] == [1, 1]


async def test_samples_that_cannot_be_scaled_spoil_no_other_request(pool, tmp_path):
    narrow = json.loads((GOLDEN / "manifest.json").read_bytes())["task"]
    narrow["preprocessing"]["std"] = 1e-3
    model = Gate(load(variant(tmp_path / "narrow", release=4, task=narrow)))
    model.open.set()
    fill = np.full_like(X[:1], 3e38)

    results = await asyncio.gather(
        *map(Batcher(model.answer, pool).predict, (X[:1], fill, X[:1])), return_exceptions=True
    )

    assert isinstance(results[1], ConfigError)
    assert "is so far from the task's mean" in str(results[1])
    assert [len(results[i][1].class_index) for i in (0, 2)] == [1, 1]


async def test_clients_that_have_gone_are_skipped(gate, pool):
    batcher = Batcher(gate.answer, pool)
    asked = [asyncio.create_task(batcher.predict(X[:1])) for _ in range(3)]
    await begun(gate)
    gone = asyncio.create_task(batcher.predict(X))
    last = asyncio.create_task(batcher.predict(X[:1]))
    await asyncio.sleep(0)
    gone.cancel()
    asked[0].cancel()
    gate.open.set()

    await asyncio.gather(*asked[1:], last)

    assert gate.calls == [3, 1]


async def test_a_model_that_fails_fails_those_that_asked_and_goes_on(gate, pool):
    gate.open.set()
    gate.runtime, runtime = None, gate.runtime
    batcher = Batcher(gate.answer, pool)
    results = await asyncio.gather(*(batcher.predict(X[:1]) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [AttributeError] * 3

    gate.runtime = runtime
    await batcher.predict(X[:1])


async def test_requests_that_do_not_fit_into_memory_together_fail_and_the_next_is_answered(gate, pool, monkeypatch):
    def no_memory(_):
        raise MemoryError

    batcher = Batcher(gate.answer, pool)
    gate.open.set()
    with monkeypatch.context() as full:
        full.setattr("deploy.serving.batching.np.concatenate", no_memory)
        results = await asyncio.gather(*(batcher.predict(X[:1]) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [MemoryError] * 2

    await asyncio.wait_for(batcher.predict(X[:1]), 300)
