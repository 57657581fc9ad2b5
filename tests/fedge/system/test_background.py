"""No task is lost, and none fails unseen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fedge.system.background import Background, on_signal, raise_first_failure, run_until_stopped


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

    with pytest.raises(OSError, match="first") as caught, raise_first_failure():
        await together()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyError), raise_first_failure():
        raise KeyError


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of pytest are there again afterwards, and nothing ends it."""
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr("atexit.register", lambda act: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_work_and_is_no_failure(number: signal.Signals) -> None:
    async def works() -> str:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)
        return "never"

    assert await run_until_stopped(works()) is None
    assert await run_until_stopped(asyncio.sleep(0, "done")) == "done"


STUCK = {
    "at once": "await asyncio.sleep(0)",
    "by a loop that waits": "await asyncio.sleep(60)",
    "by a loop that is busy": "time.sleep(60)",
    "by a thread that nobody stops": "await asyncio.to_thread(time.sleep, 60)",
}
PROGRAM = """
import asyncio, signal, sys, threading, time
from fedge.system.background import on_signal
async def main():
    on_signal(asyncio.current_task().cancel if sys.argv[1] == "cancel" else print, within_s=float(sys.argv[2]))
    print("ready", flush=True)
    try:
        {work}
    finally:
        print("done", flush=True)
asyncio.run(main())
threading.Event().wait() if sys.argv[1] == "hangs" else None
"""


def stuck(work: str, *words: object) -> subprocess.Popen[str]:
    code = PROGRAM.format(work=work)
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("work", [STUCK[name] for name in STUCK if name != "at once"])
@pytest.mark.parametrize("how", ["nothing", "cancel"])
def test_a_process_that_was_asked_to_stop_ends_in_time_whatever_holds_it_up(work: str, how: str) -> None:
    with stuck(work, how, 0.5) as process:
        process.send_signal(signal.SIGTERM)
        ends_by_itself = how == "cancel" and work == STUCK["by a loop that waits"]
        assert process.wait(30) == (1 if ends_by_itself else 130)


@pytest.mark.parametrize("work", STUCK.values(), ids=STUCK)
def test_the_second_signal_ends_it_at_once_also_after_the_loop(work: str) -> None:
    with stuck(work, "hangs", 60) as process:
        assert process.stdout is not None
        if work == STUCK["at once"]:
            assert process.stdout.readline() == "done\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # two at once count as one
        assert process.wait(30) == 130


async def test_who_asks_once_is_heard_once() -> None:
    asked = asyncio.Event()
    on_signal(asked.set)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(300):
        await asked.wait()
