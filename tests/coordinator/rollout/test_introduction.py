"""How a coordinator introduces a campaign's bundles; with runtimes: tests/integration/test_introduction.py."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec.structs import replace

from coordinator.rollout.folder import Folder, Request
from coordinator.rollout.introduction import SILENCE_S, Introducer, make_plan
from coordinator.rollout.settings import IntroductionSettings
from fedge.errors import ConfigError
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Health, Phase, Quality, Rollout, RolloutState, decode_message, encode_message
from fedge.wire.topics import Topics
from tests.support.broker import local_broker, settings, transport
from tests.support.waiting import until

RUNNING, PAUSED, ABORTED, DONE = RolloutState
SOON = IntroductionSettings(soak_s=0.0, absent_s=60.0)
TOPICS = Topics("shop")
NOWHERE = BrokerSettings("localhost", 1)


def introducer(home, broker=NOWHERE, how=SOON):
    return Introducer(home, broker, "shop", how, lambda event, fields: None)


async def hear(one, device, phase, **others):
    """What a runtime says of itself."""
    health = Health(device_id=device, at=0.0, phase=phase, release=2, **others)
    topic = TOPICS.make_agent_topic(device, "introduced")
    await one._on_health(Inbound(topic, encode_message(health), retained=False))


def test_the_first_stage_has_three_devices_and_all_bundles_one_name():
    plan, other = make_plan(3, SOON), make_plan(3, SOON)
    assert (plan.release, plan.target, plan.fewest) == (3, "campaign 3", 3)
    assert plan.id.startswith("campaign-3-")
    assert plan.id != other.id
    assert plan.digest != other.digest


def test_canaries_are_names():
    with pytest.raises(ConfigError, match="canary"):
        make_plan(1, replace(SOON, canary="not a name"))


async def test_only_devices_with_a_bundle_of_the_campaign_count(tmp_path):
    one = introducer(tmp_path)
    assert one.describe() is None
    await hear(one, "cam1", Phase.SERVING)
    await hear(one, "cam2", Phase.SERVING)
    one.introduce(1, ["cam1"])
    assert one.describe() == {
        "campaign": 1, "id": one._course.plan.id, "state": "running", "stage": 1, "stages": 3, "share": 0.0,
        "devices": 1, "running": 0, "kept": 0, "reasons": [], "silent": {},
    }  # fmt: skip
    one.introduce(1, ["cam1", "cam2", "cam3"])  # two came late
    assert one.describe()["devices"] == 2
    await hear(one, "cam3", Phase.SERVING)
    assert one.describe()["devices"] == 3
    await hear(one, "cam3", Phase.KEPT, rollout=one._course.plan.id, reason="accuracy: x")
    assert one.describe()["kept"] == 1


async def test_who_is_admitted_and_says_nothing_of_it_is_named_after_a_while(tmp_path):
    one = introducer(tmp_path, how=replace(SOON, stages="1"))
    assert one.list_silent(0.0) == {}
    one.introduce(1, ["cam1", "cam2"])
    await hear(one, "cam1", Phase.SERVING)
    await hear(one, "cam2", Phase.FETCHING, rollout=one._course.plan.id)
    one._course.advance()
    began = one._course.progress.began
    assert one.list_silent(began + SILENCE_S) == {}
    assert one.list_silent(began + SILENCE_S + 1) == {"cam1": began}
    await hear(one, "cam1", Phase.KEPT, rollout=one._course.plan.id)
    assert one.list_silent(began + SILENCE_S + 1) == {}
    await hear(one, "cam1", Phase.SERVING)
    one._course.save(replace(one._course.progress, state=PAUSED))
    assert one.list_silent(began + SILENCE_S + 1) == {}, "nobody is to begin"


async def test_it_tells_the_accuracy_of_the_bundle_that_answers_as_far_as_the_owner_lets_it_out(tmp_path):
    one = introducer(tmp_path)
    assert one.list_accuracies() == {}
    one.introduce(1, ["cam1", "cam2", "cam3"])
    both = {"before": Quality(n=8, accuracy=0.5), "now": Quality(n=8, accuracy=0.75)}
    await hear(one, "cam1", Phase.SERVING, bundle_digest="1" * 64, **both)
    await hear(one, "cam2", Phase.KEPT, **both)
    await hear(one, "cam3", Phase.SERVING, bundle_digest="1" * 64)
    assert one.list_accuracies() == {
        "cam1": {"accuracy": 0.75, "n": 8, "release": 2},
        "cam2": {"accuracy": 0.5, "n": 8, "release": 2},
    }


def test_it_goes_on_after_a_restart_and_is_not_begun_twice(tmp_path):
    one = introducer(tmp_path)
    one.introduce(1, ["cam1"])
    again = introducer(tmp_path)
    assert again.describe() == one.describe()
    again.introduce(1, ["cam1"])
    assert again.describe() == one.describe()


def test_a_later_campaign_takes_its_place_and_a_pause_stays_one(tmp_path):
    one = introducer(tmp_path)
    one.introduce(1, ["cam1"])
    first = one.describe()["id"]
    one._course.save(replace(one._course.progress, state=PAUSED))
    one.introduce(2, ["cam1"])
    assert (one.describe()["campaign"], one.describe()["state"]) == (2, "paused")
    (before,) = Folder(tmp_path).read().earlier
    assert (before.id, before.state, before.reasons) == (first, DONE, ("campaign 2 has taken its place",))


@asynccontextmanager
async def running(one):
    task = asyncio.create_task(one.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_it_announces_and_takes_requests(tmp_path):
    heard = []

    async def listen(inbound):
        heard.append(decode_message(inbound.payload, Rollout))

    async with local_broker("auto", tmp_path) as broker:
        listener = transport(broker, "listener")
        await listener.subscribe(TOPICS.introduction, listen)
        one = introducer(tmp_path / "home", settings(broker))
        async with listener, running(one):
            one.introduce(4, ["cam1"])
            await until(lambda: heard)
            assert (heard[0].release, heard[0].state, heard[0].metadata) == (4, RUNNING, {})
            Folder(tmp_path / "home").write_request(Request.PAUSE)
            await until(lambda: heard[-1].state is PAUSED)
            assert heard[-1].version > heard[0].version


async def test_where_nobody_serves_there_is_nothing_to_wait_for(tmp_path):
    async with local_broker("auto", tmp_path) as broker:
        one = introducer(tmp_path / "home", settings(broker), replace(SOON, absent_s=0.1))
        async with running(one):
            one.introduce(1, ["cam1"])
            await until(lambda: one.describe()["state"] == "done")
        assert one.describe()["share"] == 1.0
