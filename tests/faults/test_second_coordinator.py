"""A second coordinator of a federation: with a home of its own, with a copy of the first one's, after its death."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation
from tests.support.waiting import until

REFUSED = "another coordinator of federation f is at this broker: "


async def test_the_second_ends_with_an_error_and_the_first_says_so_and_goes_on(
    mosquitto: LocalBroker, tmp_path: Path
) -> None:
    async with Federation(mosquitto, tmp_path, devices=("cam0",)) as federation:
        first = await federation.coordinator(method="fedavg", rounds=1)
        await first.said("waiting")
        copy = shutil.copytree(federation.home, tmp_path / "copy")
        for name, home in (("other", tmp_path / "other"), ("copied", copy)):
            second = await federation.coordinator(log=name, method="fedavg", rounds=1, home=home)
            assert await second.ended() == 2
            text = second.log.read_text()
            assert REFUSED in text
            assert f"{federation.home}, incarnation " in text
        await until(lambda: [e["event"] for e in first.events].count("second_coordinator") == 2)
        assert [Path(e["where"].partition(":")[2]) for e in first.events if "where" in e] == [tmp_path / "other", copy]
        assert "event=second_coordinator" in first.log.read_text()
        assert "event=thrown_off" not in first.log.read_text()
        assert "event=disconnected" not in first.log.read_text()
        await first.kill()
        second = await federation.coordinator(log="after", method="fedavg", rounds=1, home=tmp_path / "other")
        await second.said("waiting")
