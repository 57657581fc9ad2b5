"""A federation at a broker that leaves it a part of its topics and client ids, behind a proxy and over WebSockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedge.membership import broker_configuration
from fedge.system.files import write_atomically
from tests.support.broker import OwnBroker
from tests.support.programs import Programs
from tests.support.proxies import ProxyServer

PREFIXES = ("--topic-prefix", "company/ai", "--client-prefix", "acme-")
pytestmark = pytest.mark.usefixtures("mosquitto_program")


async def test_every_command_reaches_the_broker(tmp_path: Path) -> None:
    """The agent through a proxy, the doctor over WebSockets besides, all with certificates."""
    programs = Programs(tmp_path)
    fleet, cam1 = tmp_path / "fleet", tmp_path / "cam1"
    identity = fleet / "broker"
    rules = tmp_path / "rules"
    lines = (broker_configuration.format_global_settings(), "clientid_prefixes acme-")
    by_tcp, by_web = (broker_configuration.format_member_listener(identity, rules, port) for port in (1, 2))
    by_tcp, by_web = by_tcp.replace("listener 1", "listener {other}"), by_web.replace("listener 2", "listener {port}")
    broker = OwnBroker(tmp_path / "mosquitto", *lines, by_tcp, by_web, "protocol websockets")
    await programs.fedge("sample", "--task", "digits", "--devices", 1, "--out", tmp_path / "samples")
    await programs.fedge("provision", "init", "shop", "localhost", "--port", broker.other, "--folder", fleet, *PREFIXES)
    rules.mkdir()
    write_atomically(
        rules / broker_configuration.ACCESS_LIST, broker_configuration.format_access_list("shop", "company/ai").encode()
    )
    async with broker, ProxyServer("http", login="me:pass") as proxy:
        way = ("--proxy", proxy.url)
        await programs.fedge("provision", "device", "cam1", "--folder", fleet, "--to", tmp_path)
        data = ("--task", "digits", "--data", tmp_path / "samples" / "cam1.npz")
        await programs.fedge("enrol", tmp_path / "cam1.kit", "--folder", cam1, *data)
        config = cam1 / "agent.toml"
        assert 'topic_prefix = "company/ai"\nclient_prefix = "acme-"\n' in config.read_text()
        try:
            await programs.begin("agent", "agent", "--config", config, *way)
            how = ("--config", fleet / "coordinator.toml", "--task", "digits", "--devices", 1, "--rounds", 1, "--once")
            assert "done: 1 bundle" in await programs.fedge("coordinator", *how, "--method", "fedavg")
            said = await programs.fedge(
                "doctor", "--config", config, *way, "--broker", f"wss://localhost:{broker.port}"
            )
            assert f"localhost:{broker.port} lets us in, MQTT 5, and our topics are open to us" in said
            assert "it spoke" in said
            here = ("--broker", f"localhost:{broker.other}", "--federation", "shop", "--identity", fleet / "status")
            assert "cam1" in await programs.fedge("status", *here, *PREFIXES)
            with pytest.raises(RuntimeError, match="knows no device of a federation 'shop'"):
                await programs.fedge("status", *here, "--client-prefix", "acme-")
            await programs.fedge("provision", "renew", "--folder", fleet)
        finally:
            await programs.kill_all()
        assert {("localhost", broker.port), ("localhost", broker.other)} == set(proxy.targets)
