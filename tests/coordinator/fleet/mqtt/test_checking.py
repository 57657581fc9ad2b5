from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from coordinator.fleet.mqtt.checking import ATTEMPTS, CheckPool
from fedge.errors import ProtocolError, StoreError
from fedge.system.stopping import StoppedError
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, to_bytes
from tests.support.device import LAYOUT, tensors

GOOD = codecs.encode(tensors(0.5), Codec.INT8)
WAIT_S = 300.0


@pytest.fixture(params=["thread", "process"])
def pool(request: pytest.FixtureRequest) -> Iterator[CheckPool]:
    """Checks updates of six numbers in a thread, or all in processes."""
    if request.param == "process":
        request.getfixturevalue("checked_in_processes")
    with contextlib.closing(CheckPool()) as opened:
        yield opened


in_processes = pytest.mark.parametrize("pool", ["process"], indirect=True)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


async def new_child(before: set[psutil.Process]) -> psutil.Process:
    async with asyncio.timeout(WAIT_S):
        while not (new := children() - before):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    (found,) = new
    return found


async def test_the_norms_are_those_of_the_codec(pool: CheckPool, tmp_path: Path) -> None:
    file = tmp_path / "update"
    file.write_bytes(GOOD)
    found = await asyncio.gather(*(pool.compute_norms(file, Codec.INT8, LAYOUT) for _ in range(20)))
    assert set(found) == {codecs.check_blob(GOOD, Codec.INT8, LAYOUT)}


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (b"no tensors", Codec.INT8),
        (to_bytes({"w": tensors(0.5)["w"]}), Codec.FLOAT32),
        (to_bytes(tensors(np.nan)), Codec.FLOAT32),
        (bytes(100_000), Codec.FLOAT32),
    ],
)
async def test_a_hostile_update_is_refused_as_the_codec_refuses_it(
    pool: CheckPool, tmp_path: Path, data: bytes, how: Codec
) -> None:
    file = tmp_path / "update"
    file.write_bytes(data)
    with pytest.raises(ProtocolError) as expected:
        codecs.check_blob(data, how, LAYOUT)
    with pytest.raises(ProtocolError) as refused:
        await pool.compute_norms(file, how, LAYOUT)
    assert (refused.value.name, str(refused.value)) == (expected.value.name, str(expected.value))


async def test_files_that_cannot_be_read(pool: CheckPool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await pool.compute_norms(tmp_path / "gone", Codec.INT8, LAYOUT)
    with pytest.raises(StoreError, match="cannot be read"):
        await pool.compute_norms(tmp_path, Codec.INT8, LAYOUT)


@in_processes
async def test_the_check_of_a_killed_process_is_repeated_by_another(pool: CheckPool, tmp_path: Path) -> None:
    file, before = tmp_path / "update", children()
    os.mkfifo(file)  # whoever reads it waits for its writer
    check = asyncio.create_task(pool.compute_norms(file, Codec.INT8, LAYOUT))
    (await new_child(before)).kill()
    await new_child(before)
    await asyncio.to_thread(file.write_bytes, GOOD)
    assert await check == codecs.check_blob(GOOD, Codec.INT8, LAYOUT)


@in_processes
async def test_an_update_that_kills_all_its_checkers_is_refused(pool: CheckPool, tmp_path: Path) -> None:
    file, before = tmp_path / "update", children()
    os.mkfifo(file)
    check = asyncio.create_task(pool.compute_norms(file, Codec.INT8, LAYOUT))
    for _ in range(ATTEMPTS):
        killed = await new_child(before)
        before.add(killed)
        killed.kill()
    with pytest.raises(ProtocolError, match="unchecked: 3 processes died"):
        await check


@in_processes
async def test_closing_ends_the_processes_and_what_they_check(pool: CheckPool, tmp_path: Path) -> None:
    file, before = tmp_path / "update", children()
    os.mkfifo(file)
    check = asyncio.create_task(pool.compute_norms(file, Codec.INT8, LAYOUT))
    child = await new_child(before)
    pool.close()
    assert not child.is_running()
    with pytest.raises(StoppedError):
        await check


def test_processes_end_with_one_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "update"
    file.write_bytes(GOOD)
    program = f"""
import asyncio, sys
from pathlib import Path
from coordinator.fleet.mqtt import checking
from fedge.tensors.codecs import Codec
from tests.support.device import LAYOUT
checking.SMALL = 0
async def main():
    pool = checking.CheckPool()  # held: its threads end with it, and the process with its thread
    await pool.compute_norms(Path({str(file)!r}), Codec.INT8, LAYOUT)
    print("checked", flush=True)
    await asyncio.sleep({WAIT_S})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "checked\n"
        (child,) = (p for p in psutil.process_iter(["ppid"]) if p.info["ppid"] == process.pid)
        process.send_signal(signal.SIGKILL)
    child.wait(WAIT_S)
