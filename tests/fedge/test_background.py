"""No task is lost, and none fails unseen."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from fedge.background import Background, first_failure, on_signal, until_stopped


async def test_a_failure_is_told_and_an_end_or_a_cancellation_is_not() -> None:
    errors: list[BaseException] = []
    background = Background(errors.append)

    async def fails() -> None:
        raise OSError("disk")

    async def ends() -> None:
        return

    tasks = [background.spawn(fails()), background.spawn(ends()), background.spawn(asyncio.sleep(60))]
    assert background.tasks == set(tasks)
    await asyncio.wait(tasks[:2])
    await asyncio.sleep(0)
    assert [str(error) for error in errors] == ["disk"]
    assert background.tasks == {tasks[2]}
    background.cancel()
    await asyncio.wait(tasks[2:])
    await asyncio.sleep(0)
    assert len(errors) == 1
    assert background.tasks == set()


async def test_of_tasks_that_fail_together_the_first_is_told_alone() -> None:
    async def fails(name: str) -> None:
        raise OSError(name) from ValueError("why")

    async def together() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails("first"))
            tasks.create_task(fails("second"))

    with pytest.raises(OSError, match="first") as caught, first_failure():
        await together()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyError), first_failure():
        raise KeyError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_work_and_is_no_failure(number: signal.Signals) -> None:
    async def works() -> str:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)
        return "never"

    assert await until_stopped(works()) is None
    assert await until_stopped(asyncio.sleep(0, "done")) == "done"


async def test_who_asks_once_is_heard_once() -> None:
    asked = asyncio.Event()
    on_signal(asked.set)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        await asked.wait()
