import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.demo.boards import BOARDS, choose_boards, compute_share, limit_shares
from coordinator.demo.processes import Child


@pytest.fixture
def child() -> Iterator[Child]:
    """A process in a group of its own, as the demo's are."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield Child("camera-0", process, Path(), Path())
        process.kill()


async def test_a_slowed_process_stands_still_in_turns_and_goes_on_at_the_end(child: Child) -> None:
    process, seen = psutil.Process(child.process.pid), set[bool]()
    async with limit_shares({child: 0.5}):
        async with asyncio.timeout(60):
            while seen != {True, False}:
                seen.add(process.status() == psutil.STATUS_STOPPED)
                await asyncio.sleep(0.01)
    assert process.status() != psutil.STATUS_STOPPED
    child.require()


async def test_the_fastest_board_is_never_stopped_and_an_ended_process_is_no_error(child: Child) -> None:
    async with limit_shares({child: 1.0}):
        assert len(asyncio.all_tasks()) == 1, "nothing is to be done"
    child.process.kill()
    child.process.wait()
    async with limit_shares({child: 0.5}):
        await asyncio.sleep(0)


def test_boards_differ_and_get_their_share_by_their_speed() -> None:
    ids = [f"camera-{i}" for i in range(len(BOARDS))]
    boards = choose_boards(ids, seed=0)
    assert sorted(board.name for board in boards.values()) == sorted(board.name for board in BOARDS)
    assert boards != choose_boards(ids, seed=1)
    shares = {board.name: compute_share(board) for board in boards.values()}
    assert shares["Jetson Orin Nano"] == max(shares.values()) == 1.0
    assert shares["Raspberry Pi Zero 2 W"] == min(shares.values()) == pytest.approx(0.3 / 2.0)
