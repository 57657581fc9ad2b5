"""Checks large updates in separate processes, several at once, on processors that the event loop does not need."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from msgspec import Struct

from fedge.errors import ProtocolError, StoreError
from fedge.system.child import Child, DiedError
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout

log = logging.getLogger("fedge.coordinator")

SMALL: Final = 65_536
"""Most numbers in an update that is checked in a thread. The check takes up to 1 ms; asking a process takes longer."""
MAX_PROCESSES: Final = 8
"""Most processes that check updates. Each takes about 60 MB besides the update; eight keep up with one event loop."""
ATTEMPTS: Final = 3
"""Number of processes that die while checking an update before the update is refused."""


class CheckOutcome(Struct, frozen=True):
    """The norms of an update, or the name and detail of the `ProtocolError`; neither if the update's file is gone."""

    norms: codecs.Norms | None = None
    refused: tuple[str, str] | None = None


def check_update(file: Path, how: Codec, layout: Layout) -> CheckOutcome:
    """Check the update in a file, and return what `fedge.tensors.codecs.check_blob` finds.

    Raises:
        StoreError: the disk cannot be read.
    """
    try:
        return CheckOutcome(norms=codecs.check_blob(file.read_bytes(), how, layout))
    except ProtocolError as error:
        return CheckOutcome(refused=(error.name, str(error).removeprefix(f"{error.name}: ")))
    except FileNotFoundError:
        return CheckOutcome()
    except MemoryError:
        return CheckOutcome(refused=("unchecked", "it needs more memory than is free"))
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error}") from error


class CheckPool:
    """A pool that checks updates in files: small ones in a thread, one at a time; large ones in up to 8 processes.

    A process starts when it is first needed. If it dies, it is replaced and the check repeated. The kernel ends it when
    our process ends. Call `close` in the end.
    """

    def __init__(self) -> None:
        n = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
        self._threads = ThreadPoolExecutor(n, thread_name_prefix="fedge-check")  # one for each process
        self._children: dict[int, Child] = {}  # by thread
        self._closing = False
        self._small = asyncio.Lock()

    async def compute_norms(self, file: Path, how: Codec, layout: Layout) -> codecs.Norms:
        """Return the norms of an update, once it is checked.

        Args:
            file: the file with the update's bytes.
            how: the codec of the bytes.
            layout: the layout of the update's tensors.

        Raises:
            ProtocolError: as in `fedge.tensors.codecs.check_blob`, or `unchecked` if processes died while checking it.
            FileNotFoundError: there is no such file.
            StoreError: the file cannot be read.
        """
        if sum(tensor.size for tensor in layout.tensors) <= SMALL:
            async with self._small:
                found = await asyncio.to_thread(check_update, file, how, layout)
        else:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, self._check_in_process, file, how, layout)
        if found.refused is not None:
            raise ProtocolError(*found.refused)
        if found.norms is None:
            raise FileNotFoundError(file)
        return found.norms

    def close(self) -> None:
        """End all processes; checks that are under way fail."""
        self._closing = True
        self._threads.shutdown(cancel_futures=True)
        for child in self._children.values():
            child.close()

    def _check_in_process(self, file: Path, how: Codec, layout: Layout) -> CheckOutcome:
        """Call `check_update` in the process of this thread."""
        me = threading.get_ident()
        for _ in range(ATTEMPTS):
            try:
                child = self._children.pop(me, None) or Child("coordinator.fleet.mqtt.checking:check_update")
                found = child.call(file, how, layout, returns=CheckOutcome, stop=lambda: self._closing)
            except (DiedError, OSError) as error:  # OSError: no further process could be started
                log.warning("event=check_died digest=%s reason=%r", file.name, str(error))
            else:
                self._children[me] = child
                return found
        return CheckOutcome(
            refused=("unchecked", f"{ATTEMPTS} processes died while they checked it, or could not be started")
        )
