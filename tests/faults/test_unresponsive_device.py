"""A device that stops answering: rounds close at the deadline, the others count, and it is chosen less and less."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from statistics import mean

from coordinator.methods.papers.fedge_state import FedgeState
from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation

DEVICES = ("cam0", "cam1", "cam2", "cam3", "cam4")
BEFORE, AFTER = 12, 26
"""Whatever the groups and the timing: cam0 is asked in rounds 13, 15, 19 and 27 at the earliest (or one later, where
round 13 had begun before), for the first time in round 22 at the latest, when it is overdue (FedEPC section 5.5); the
others train in at least half of the rounds."""
DEADLINE_S = 8
"""The others need milliseconds; on a busy machine they once needed more than 2 s."""
FLAGS = {"method": "fedge", "rounds": 100, "participation": 0.5}


async def test_others_go_on_without_it(mosquitto: LocalBroker, tmp_path: Path) -> None:
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**FLAGS)
        await coordinator.said("round_done", round=BEFORE)
        coordinator.send(signal.SIGTERM)
        assert await coordinator.ended() == 130
        ((begun,),) = federation.rows("SELECT max(round) FROM rounds")  # cam0 may have answered in it, done or not

        agents["cam0"].send(signal.SIGSTOP)  # the broker still thinks that it is there
        coordinator = await federation.coordinator(**FLAGS, deadline_s=DEADLINE_S)
        await coordinator.said("round_done", round=AFTER)
        coordinator.send(signal.SIGTERM)
        assert await coordinator.ended() == 130

        asked = federation.rows(
            "SELECT device_id, count(*), sum(status = 'accepted'), sum(status = 'expired') FROM orders"
            f" WHERE label = 'train' AND round BETWEEN {begun + 1} AND {AFTER} GROUP BY device_id ORDER BY device_id"
        )
        (unresponsive, n_unanswered, *what_came), *others = asked
        assert (unresponsive, what_came) == ("cam0", [0, n_unanswered])
        assert all(n_accepted == n for _, n, n_accepted, _ in others), "the others answer, and count"
        rounds = federation.rows(
            "SELECT round FROM orders WHERE label = 'train' AND device_id = 'cam0'"
            f" AND round BETWEEN {begun + 1} AND {AFTER} ORDER BY round"
        )
        gaps = [later - earlier for (earlier,), (later,) in pairwise(rounds)]
        assert all(gap >= 2**misses for misses, gap in enumerate(gaps, start=1)), "less and less"
        assert 0 < n_unanswered < mean(n for _, n, *_ in others) / 2
        took = federation.rows(
            "SELECT done_at - begun_at, max(o.device_id = 'cam0') FROM rounds JOIN orders o USING (round)"
            f" WHERE round BETWEEN {begun + 1} AND {AFTER} GROUP BY round"
        )
        assert all(seconds >= DEADLINE_S for seconds, waited in took if waited)
        assert min(seconds for seconds, waited in took if not waited) < DEADLINE_S, "the others are not slowed"
        history = federation.state(FedgeState).history
        assert sum(line.asked - line.answered for line in history[begun:AFTER]) == n_unanswered
