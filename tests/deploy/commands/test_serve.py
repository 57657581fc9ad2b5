"""`fedge serve` as its users meet it: help, settings, and the process between start and SIGTERM."""

import asyncio
import json
import signal
import time

import pytest

pytest.importorskip("aiohttp")

from click.testing import CliRunner

from deploy.commands.install import install
from deploy.commands.serve import INTERRUPTED, ServeSettings, serve
from deploy.updates.slots import Slots, lock_slots
from fedge.errors import ConfigError, TransportError, UpdateRejected
from fedge.settings import describe_settings

from ..bundles import GOLDEN, broken_gate, other_gate, source, variant
from ..serve_process import PATIENCE, X, ask, process
from ..served import body
from ..tcp import TcpServer

pytestmark = pytest.mark.torch_free


def refused(*arguments):
    """The error of a call that starts nothing."""
    result = CliRunner().invoke(serve, list(map(str, arguments)))
    assert result.exception is not None
    return result.exception


def test_help_shows_every_setting():
    text = CliRunner().invoke(serve, ["--help"]).output
    for setting in describe_settings(ServeSettings, "serve"):
        assert setting.flag in text
        assert setting.help, setting.name


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ((), ConfigError, "give --home"),
        ((GOLDEN.parent / "nothing",), ConfigError, "no bundle at"),
        ((GOLDEN, f"bundle={GOLDEN}"), ConfigError, "NAME="),
        ((f"a/b={GOLDEN}",), ConfigError, "not a name of a model"),
        ((f"={GOLDEN}",), ConfigError, "not a name of a model"),
        (("--home", "/nowhere"), ConfigError, "fedge install"),
        ((GOLDEN.parent,), UpdateRejected, "manifest"),
        ((GOLDEN, "--port", "70000"), ConfigError, "--port"),
        ((GOLDEN, "--runtime", "int8"), ConfigError, "fedge export --int8"),
        ((GOLDEN, "--max-batch", "0"), ConfigError, "--max-batch"),
        ((GOLDEN, "--broker", "localhost"), ConfigError, "--federation, --id"),
        ((GOLDEN, f"b={GOLDEN}", "--broker", "x", "--federation", "f", "--id", "a"), ConfigError, "exactly one model"),
        ((GOLDEN, f"bundle={GOLDEN}", f"b={GOLDEN}"), ConfigError, "two models are called bundle"),
        ((GOLDEN, "--provider", "cuda"), ConfigError, "no execution provider cuda here: onnxruntime"),
        ((GOLDEN, "--provider", "cpu", "--provider-options", "fast"), ConfigError, "KEY=VALUE"),
        ((GOLDEN, "--broker", "x:y", "--federation", "f", "--id", "a"), ConfigError, "not an address of a broker"),
        ((GOLDEN, "--host", "203.0.113.1"), TransportError, "cannot listen"),
    ],
)
def test_what_cannot_be_served_says_what_to_do(arguments, kind, says):
    error = refused(*arguments)
    assert isinstance(error, kind), error
    assert says in str(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_several_bundles_until_it_is_stopped(number, tmp_path):
    other = variant(tmp_path / "cam2", release=9)
    async with process(GOLDEN, f"back={other}") as (child, said, session):
        assert said["models"] == ["bundle", "back"]
        assert said["url"].startswith("http://127.0.0.1:")
        for model, release in (("bundle", 3), ("back", 9)):
            status, content = await ask(session, model)
            assert (status, content["parameters"]["release"]) == (200, release)
        child.send_signal(number)
        assert await asyncio.wait_for(child.wait(), PATIENCE) == INTERRUPTED
        assert b"Traceback" not in await child.stderr.read()


def confirmed(file):
    while json.loads(file.read_bytes())["trial"] is not None:
        time.sleep(0.05)


async def test_a_device_with_a_bundle_on_trial_confirms_it_by_its_work(tmp_path):
    slots = Slots(tmp_path)
    slots.stage(*source(variant(tmp_path / "new", release=4)))
    slots.switch()
    async with process("--home", tmp_path) as (child, said, session):
        assert said["models"] == ["digits"]
        with pytest.raises(ConfigError, match="fedge serve"), lock_slots(tmp_path):
            pass
        for _ in range(2):
            assert (await ask(session, "digits"))[1]["parameters"]["release"] == 4
        await asyncio.wait_for(asyncio.to_thread(confirmed, tmp_path / "slots.json"), PATIENCE)
        child.terminate()
        assert await asyncio.wait_for(child.wait(), PATIENCE) == INTERRUPTED
    assert Slots(tmp_path).good is not None


async def test_what_an_agent_wrote_is_served_without_an_installation_by_hand(tmp_path):
    for release in (1, 2):
        variant(tmp_path / "bundles" / str(release), release=release)
    async with process("--home", tmp_path) as (_, said, session):
        assert said["models"] == ["digits"]
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 2
    assert Slots(tmp_path).good is not None


async def test_several_tasks_of_a_device_are_served_each_under_its_name_and_updated(tmp_path):
    people, doors = tmp_path / "people", tmp_path / "doors"
    for home in (people, doors):
        variant(home / "bundles" / "1", release=1)
    models = ("--home", people, f"doors={doors}", f"fixed={GOLDEN}")
    async with process(*models) as (child, said, session):
        assert said["models"] == ["digits", "doors", "fixed"]
        assert set(map(tuple, said["providers"].values())) == {("CPUExecutionProvider",)}
        variant(doors / "bundles" / "2", release=2, gate=other_gate)
        async with asyncio.timeout(PATIENCE):
            while (await ask(session, "doors"))[1]["parameters"]["release"] == 1:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        releases = [(await ask(session, model))[1]["parameters"]["release"] for model in said["models"]]
        assert releases == [1, 2, 3]
        async with session.post("/v2/repository/index") as response:
            index = await response.json()
        assert [(one["name"], one["version"]) for one in index] == [("digits", "1"), ("doors", "2"), ("fixed", "3")]
        child.terminate()
        assert await asyncio.wait_for(child.wait(), PATIENCE) == INTERRUPTED
    for home in (people, doors):
        with lock_slots(home):
            pass


def test_a_home_without_any_bundle_says_what_it_waits_for(tmp_path):
    assert "wait until the agent has written one" in str(refused("--home", tmp_path))


async def test_settings_come_from_the_environment_and_the_file(tmp_path):
    file = tmp_path / "fedge.toml"
    file.write_text("[serve]\nmax_body = 0.01\n")
    async with process(GOLDEN, FEDGE_CONFIG=str(file), FEDGE_SERVE_MAX_WAITING="1") as (_, _, session):
        async with session.post("/v2/models/bundle/infer", data=b" " * 20_000) as response:
            assert response.status == 413
        assert (await ask(session, "bundle", outputs=[{"name": "class"}]))[0] == 200


@pytest.mark.broker
async def test_http_goes_on_while_the_broker_is_away_and_sensors_are_answered_when_it_is_there(tmp_path):
    pytest.importorskip("amqtt")
    from fedge.commands.broker import LocalBroker
    from fedge.wire.connection.broker import BrokerSettings
    from fedge.wire.topics import Topics
    from fedge.wire.transport import Transport

    async with LocalBroker("auto", home=tmp_path / "broker") as broker:
        address = f"{broker.host}:{broker.port}"
    flags = ("--broker", address, "--federation", "shop", "--id", "cam1")
    async with process(GOLDEN, *flags) as (child, _, session):
        assert (await ask(session, "bundle"))[0] == 200
        async with LocalBroker("auto", home=tmp_path / "again", port=broker.port):
            answers = asyncio.Queue()
            sensor = Transport(BrokerSettings(broker.host, broker.port), "sensor")
            await sensor.subscribe(Topics("shop").make_agent_topic("cam1", "predictions"), answers.put)
            async with sensor, asyncio.timeout(PATIENCE):
                while answers.empty():  # until the device has found the broker: some ask in the moment it connects
                    assert child.returncode is None
                    await sensor.publish(Topics("shop").make_agent_topic("cam1", "predict"), body(X))
                assert "outputs" in json.loads((await answers.get()).payload)
            child.terminate()
            assert await asyncio.wait_for(child.wait(), PATIENCE) == INTERRUPTED


async def test_http_goes_on_with_a_broker_that_refuses_us_or_certificates_that_are_damaged(tmp_path):
    async def refuse(reader, writer):
        await reader.read(1)
        writer.write(b"\x20\x03\x00\x87\x00")  # CONNACK: not authorized

    home = tmp_path / "home"
    run(home, variant(tmp_path / "4", release=4))
    (tmp_path / "ca.crt").write_bytes(b"\0")
    async with TcpServer(refuse) as broker:
        address = f"127.0.0.1:{broker.port}"
        flags = ("--home", home, "--broker", address, "--federation", "shop", "--id", "cam1")
        for more, says in (((), "Not authorized"), (("--ca-file", tmp_path / "ca.crt"), "holds no certificates")):
            async with process(*flags, *more) as (child, _, session), asyncio.timeout(PATIENCE):
                lines = []
                while not any("event=no_broker" in line for line in lines):
                    lines.append((await child.stderr.readline()).decode())
                assert says in lines[-1]
                assert (await ask(session, "digits"))[0] == 200
                child.terminate()
                assert await child.wait() == INTERRUPTED


@pytest.mark.broker
async def test_a_device_takes_in_what_its_agent_writes_while_it_is_served(tmp_path):
    pytest.importorskip("amqtt")
    from fedge.commands.broker import LocalBroker

    home = tmp_path / "home"
    slots = Slots(home)
    slots.stage(*source(variant(tmp_path / "new", release=4)))
    slots.switch()
    slots.confirm()
    variant(home / "bundles" / "5", release=5, gate=other_gate)
    async with LocalBroker("auto", home=tmp_path / "broker") as broker:
        flags = ("--broker", f"{broker.host}:{broker.port}", "--federation", "shop", "--id", "cam1")
        async with process("--home", home, *flags) as (child, _, session), asyncio.timeout(PATIENCE):
            release = 4
            while release != 5:
                status, content = await ask(session, "digits")
                assert status == 200
                release = content["parameters"]["release"]
            child.terminate()
            assert await child.wait() == INTERRUPTED
            assert b"Traceback" not in await child.stderr.read()


async def test_what_is_installed_while_it_is_served_answers(tmp_path):
    """No broker, no restart: the bundle is handed over, examined and switched to; one that is not fit is refused."""
    home = tmp_path / "home"
    run(home, variant(tmp_path / "4", release=4))
    async with process("--home", home) as (child, _, session), asyncio.timeout(PATIENCE):
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 4
        await asyncio.to_thread(run, home, variant(tmp_path / "5", release=5, gate=other_gate))
        status, content = await ask(session, "digits")
        assert (status, content["parameters"]["release"]) == (200, 5)
        with pytest.raises(ConfigError, match="takes in higher ones alone"):
            await asyncio.to_thread(run, home, variant(tmp_path / "3", release=3))
        while json.loads((home / "slots.json").read_bytes())["trial"] is not None:
            assert (await ask(session, "digits"))[0] == 200
        with pytest.raises(UpdateRejected, match="not-finite"):
            await asyncio.to_thread(run, home, variant(tmp_path / "6", release=6, gate=broken_gate))
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 5
        child.terminate()
        assert await child.wait() == INTERRUPTED
        assert b"Traceback" not in await child.stderr.read()
    assert not list((home / "bundles").iterdir()), "nothing is left of what was handed over"


def run(home, bundle):
    """`fedge install`."""
    result = CliRunner().invoke(install, ["--home", str(home), str(bundle)])
    if result.exception is not None:
        raise result.exception
