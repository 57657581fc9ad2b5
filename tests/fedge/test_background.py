"""No task is lost, and none fails unseen."""

from __future__ import annotations

import asyncio

from fedge.background import Background


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
