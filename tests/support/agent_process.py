"""A real agent in a process of its own, whose work can be watched and held up by files in its home.

    python -m tests.support.agent_process HOST PORT HOME

Each execution of an order appends its id to HOME/executions, and waits while HOME/hold exists; while HOME/deaf exists
it does not look whether it should stop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from edge_agent.agent import Agent, Identity
from edge_agent.worker import Finished
from fedge.background import STOP_S, on_signal
from fedge.messages import BlobRef, Order
from fedge.step import Action
from fedge.transport import BrokerSettings
from tests.support.peer import TASK, EchoWorker


class WatchedWorker(EchoWorker):
    """Echoes, after it was let go."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> Finished:
        with (self._home / "executions").open("a") as file:
            file.write(order.id + "\n")
        while (self._home / "hold").exists():
            if stop() and not (self._home / "deaf").exists():
                raise InterruptedError
            time.sleep(0.01)
        return super().execute(order, fetch, stop=stop, action=action)


async def main(host: str, port: str, home: str) -> None:
    """Run until SIGTERM."""
    folder = Path(home)
    agent = Agent(
        Identity("pi", "test", TASK, n_shared=3),
        BrokerSettings(host, int(port)),
        folder,
        lambda: WatchedWorker(folder),
    )
    on_signal(agent.stop, within_s=STOP_S)
    await agent.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
