"""A real agent in a process of its own, whose work can be watched and held up by files in its home.

    python -m tests.support.agent_process HOST PORT HOME [YIELD_S]

It gives way to another process of its name for YIELD_S at first.
Each execution of an order appends its id to HOME/executions, and waits while HOME/hold exists; while HOME/deaf exists
it does not look whether it should stop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.agent.speech import voice
from edge_agent.device.worker import FinishedOrder
from fedge.steps.contract import Action
from fedge.system.background import STOP_S, on_signal
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import BlobRef, Order
from tests.support.peer import TASK, EchoWorker


class WatchedWorker(EchoWorker):
    """Echoes, after it was let go."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> FinishedOrder:
        with (self._home / "executions").open("a") as file:
            file.write(order.id + "\n")
        while (self._home / "hold").exists():
            if stop() and not (self._home / "deaf").exists():
                raise InterruptedError
            time.sleep(0.01)
        return super().execute(order, fetch, stop=stop, action=action)


async def main(host: str, port: str, home: str, yield_s: str = "30") -> None:
    """Run until SIGTERM."""
    logging.basicConfig(level=logging.INFO)
    voice.YIELD_BASE_S = float(yield_s)  # type: ignore[misc]
    folder = Path(home)
    device = Agent(
        Identity("pi", "test", TASK, n_shared=3),
        BrokerSettings(host, int(port)),
        folder,
        lambda: WatchedWorker(folder),
    )
    on_signal(device.stop, within_s=STOP_S)
    await device.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
