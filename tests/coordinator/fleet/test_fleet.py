"""What all fleets have in common: orders, checks, and streams of answers, over MQTT also across a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from coordinator.fleet.fleet import Answer, Fleet, make_order, prepare_actions, require_sendable
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.settings import MethodSettings
from coordinator.store.records import Device, OrderStatus
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError
from fedge.steps.contract import Action, Failed, Unsupported
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.steps.mixture.install import Install
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Codec, Layout, unflatten
from fedge.wire.messages import BlobRef, Capabilities, Order, Presence, Why, decode_message, encode_message
from tests.support.broker import settings
from tests.support.device import LAYOUT, TASK, RawDevice, tensors
from tests.support.simulation import digits
from tests.support.waiting import until

ACTION = Install(model=BlobRef(digest="0" * 64, size_bytes=8), method="fedavg")


def order(*, run: str = "r", seed: int = 0, number: int = 1, label: str = "train", device: str = "d") -> Order:
    return make_order(run, seed, number, label, device, TASK.compute_fingerprint(), ACTION, left_s=5.0)


def test_a_campaigns_number_is_in_the_orders_that_leave_a_bundle_and_in_no_others() -> None:
    finished = InstallBundle(files=dict.fromkeys("abc", ACTION.model), release=2)
    training = Train(starts=(Start(model=ACTION.model),), sgd=Sgd())
    devices = {i: Device(i, 1) for i in "abc"}
    asked = {"a": ACTION, "b": finished, "c": training}
    found, refused = prepare_actions(devices, asked, TASK, campaign=3)
    assert not refused
    assert (found["a"].campaign, found["b"].campaign, found["c"].campaign) == (3, 3, UNSET)
    assert prepare_actions(devices, asked, TASK)[0] == asked


def test_the_same_work_has_the_same_id_and_seed() -> None:
    assert order() == order()
    assert decode_message(encode_message(order()), Order) == order()


def test_other_work_has_another_id_and_seed() -> None:
    all_orders = [order(), order(number=2), order(label="trial"), order(device="e")]
    assert len({o.id for o in all_orders}) == 4
    assert len({o.seed for o in all_orders}) == 4


def test_the_seed_depends_on_the_federations_and_not_on_the_run() -> None:
    assert order(seed=1).seed != order().seed
    assert order(run="other").seed == order().seed
    assert order(run="other").id != order().id


def test_the_longest_names_fit() -> None:
    longest = make_order("f" * 63, 0, 10**6, "s" * 30, "d" * 63, TASK.compute_fingerprint(), ACTION, left_s=5.0)
    assert decode_message(encode_message(longest), Order) == longest


REF = ACTION.model
TRAIN = Train(starts=(Start(model=REF),), sgd=Sgd())


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (msgspec.structs.replace(TRAIN, sgd=Sgd(learning_rate=1000.0)), "sgd.learning_rate"),
        (msgspec.structs.replace(TRAIN, starts=TRAIN.starts * 65), "starts"),
        (FitMixture(experts=(), initial_model=REF, sgd=Sgd(), top=65), "top"),
    ],
)
def test_an_order_that_no_message_can_hold_is_the_users_error_by_field(action: Action, field: str) -> None:
    require_sendable([TRAIN, ACTION])
    with pytest.raises(ConfigError, match=rf"\$\.{field}"):
        require_sendable([TRAIN, action])


def test_a_number_beyond_64_bits_is_the_users_error_too() -> None:
    with pytest.raises(ConfigError, match=r"no order can hold this: .*ints"):
        require_sendable([msgspec.structs.replace(TRAIN, sgd=Sgd(steps=10**20))])


async def test_an_option_beyond_what_a_message_can_hold_ends_a_run_and_says_so(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    method = FedAvg(MethodSettings(sgd=Sgd(learning_rate=1000.0)))
    with pytest.raises(ConfigError, match="learning_rate"):
        await method.round(method.init(layout, first), fleet)
    assert fleet.bytes_down == 0


# -------------------------------------------------------------------------------------------------------- streams

DEVICES = ("d00", "d01", "d02")
WAIT_S = 300.0
Turn = tuple[str, int]
"""A device, and the round of the order that it answers."""
Begin = Callable[[int], Awaitable[None]]


class Devices:
    """A fleet over MQTT whose devices answer in the order of a script, each after the verdict on the one before."""

    def __init__(self, broker: LocalBroker, home: Path, stack: AsyncExitStack) -> None:
        self.store = stack.enter_context(contextlib.closing(Store(home / "server")))
        self._broker, self._home, self._stack, self._fleet = broker, home, stack, AsyncExitStack()
        stack.push_async_callback(self._fleet.aclose)
        self.devices: dict[str, RawDevice] = {}

    async def fleet(self, *, deadline_s: float = WAIT_S, steps: Sequence[type[Action]] = ()) -> MqttFleet:
        """A coordinator's, of this store: the first, or one after a restart, which ends the one before."""
        await self._fleet.aclose()
        fleet = MqttFleet(
            settings(self._broker),
            self.store,
            Assignment(federation="f", run="r", task=TASK, layout=LAYOUT, seed=3, deadline_s=deadline_s, steps=steps),
            lambda event, fields: None,
        )
        await self._fleet.enter_async_context(fleet)
        for i in DEVICES:
            if i not in self.devices:
                device = RawDevice(self._broker, i, self._home)
                self.devices[i] = await self._stack.enter_async_context(device)
        return fleet

    def answering(self, script: Sequence[Turn]) -> asyncio.Task[None]:
        return asyncio.create_task(self._answer(script))

    async def _answer(self, script: Sequence[Turn]) -> None:
        for number, (i, round_number) in enumerate(script):
            device, order_id = self.devices[i], f"r.{round_number}.s.{i}"
            await until(lambda device=device, order_id=order_id: any(o.id == order_id for o in device.orders))
            order = next(o for o in device.orders if o.id == order_id)
            await device.report(order, device.trained(float(number)))
            await device.ack(order_id)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
async def mqtt(one_broker: LocalBroker, tmp_path: Path, stack: AsyncExitStack) -> Devices:
    return Devices(one_broker, tmp_path, stack)


async def simulated(home: Path) -> tuple[SimulatedFleet, Layout, Train, Begin]:
    """Orders take 1, 5 and 9 seconds."""
    digital, layout, first, _ = digits(home, n=3, limit=120)
    hardware = {i: Hardware(latency_s=1.0 + 4 * k) for k, i in enumerate(DEVICES)}
    fleet = SimulatedFleet(digital.task, layout, digital.workers, seed=0, hardware=hardware)
    model = fleet.put(unflatten(digital.get(first, layout), layout))

    async def begin(number: int) -> None:
        fleet.round = number

    return fleet, layout, Train(starts=(Start(model=model),), sgd=Sgd(), codec=Codec.FLOAT32, measure=False), begin


async def over_mqtt(mqtt: Devices) -> tuple[MqttFleet, Layout, Train, Begin]:
    fleet = await mqtt.fleet()

    async def begin(number: int) -> None:
        async with asyncio.timeout(WAIT_S):
            await fleet.start_round(number, len(DEVICES))

    return fleet, LAYOUT, train(fleet), begin


def train(fleet: MqttFleet) -> Train:
    return Train(starts=(Start(model=fleet.put(tensors(1.0))),), sgd=Sgd(), measure=False)


async def who_leaves_the_loop_leaves_the_others_open(fleet: Fleet, layout: Layout, action: Train, begin: Begin) -> None:
    """What every fleet does."""
    await begin(1)
    assert fleet.get_busy_devices() == frozenset()
    async for answer in fleet.stream("s", dict.fromkeys(DEVICES, action)):
        assert (answer.device_id, answer.round) == ("d00", 1)
        break
    assert fleet.get_busy_devices() == {"d01", "d02"}
    await begin(2)
    heard = []
    async for answer in fleet.stream("s", {"d00": action}):
        assert isinstance(answer.result, Trained)
        assert np.isfinite(fleet.get(answer.result.update, layout).params).all()
        heard.append((answer.device_id, answer.round))
    assert heard == [("d00", 2), ("d01", 1), ("d02", 1)]
    assert fleet.get_busy_devices() == frozenset()


async def test_leaving_the_loop_in_simulation(tmp_path: Path) -> None:
    fleet, *others = await simulated(tmp_path)
    await who_leaves_the_loop_leaves_the_others_open(fleet, *others)
    assert fleet.seconds == 9.0


async def test_leaving_the_loop_over_mqtt(mqtt: Devices) -> None:
    fleet, *others = await over_mqtt(mqtt)
    answering = mqtt.answering([("d00", 1), ("d00", 2), ("d01", 1), ("d02", 1)])
    await who_leaves_the_loop_leaves_the_others_open(fleet, *others)
    await answering


async def test_simulated_time_goes_on_to_the_answer_and_is_the_same_each_time(tmp_path: Path) -> None:
    times = []
    for number in range(2):
        fleet, _, action, _ = await simulated(tmp_path / str(number))
        times.append([(a.device_id, fleet.seconds) async for a in fleet.stream("s", dict.fromkeys(DEVICES, action))])
    assert times == [[("d00", 1.0), ("d01", 5.0), ("d02", 9.0)]] * 2


async def test_streams_have_no_deadline_and_an_order_that_is_dropped_ends_after_a_minute(tmp_path: Path) -> None:
    digital, layout, first, _ = digits(tmp_path, n=2, limit=80)
    hardware = {"d00": Hardware(drops=1.0), "d01": Hardware(latency_s=3600.0)}
    fleet = SimulatedFleet(digital.task, layout, digital.workers, seed=0, hardware=hardware, deadline_s=10.0)
    model = fleet.put(unflatten(digital.get(first, layout), layout))
    action = Train(starts=(Start(model=model),), sgd=Sgd(), measure=False)
    heard = [
        (a.device_id, a.result is None, fleet.seconds) async for a in fleet.stream("s", {"d00": action, "d01": action})
    ]
    assert heard == [("d00", True, 60.0), ("d01", False, 3600.0)]


async def test_a_busy_simulated_device_does_what_it_is_asked_afterwards(tmp_path: Path) -> None:
    fleet, _, action, begin = await simulated(tmp_path)
    async for _ in fleet.stream("s", dict.fromkeys(DEVICES, action)):
        break
    await begin(2)
    assert (await fleet.run("t", {"d02": action}))["d02"].seconds == 9.0
    assert fleet.seconds == 18.0


async def test_what_was_not_handed_out_outlives_the_round(tmp_path: Path) -> None:
    fleet, layout, action, begin = await simulated(tmp_path)
    async for _ in fleet.stream("s", dict.fromkeys(DEVICES, action)):
        break
    fleet.remove_others(fleet.find_needed_blobs())
    await begin(2)
    rest = [answer.result async for answer in fleet.stream("s", {})]
    assert all(np.isfinite(fleet.get(result.update, layout).params).all() for result in rest)


# ------------------------------------------------------------------------------------------------------ over MQTT


async def test_after_a_restart_the_same_answers_come_in_the_same_order(mqtt: Devices) -> None:
    """d02 and d00 are handed out in round 1, then the coordinator dies; d01 is accepted after it."""
    fleet, _, action, begin = await over_mqtt(mqtt)
    await begin(1)
    answering = mqtt.answering([("d02", 1), ("d00", 1)])
    before: list[Answer] = []
    async for answer in fleet.stream("s", dict.fromkeys(DEVICES, action)):
        before.append(answer)
        if len(before) == 2:
            break
    await answering
    assert [answer.device_id for answer in before] == ["d02", "d00"]

    again = await mqtt.fleet()
    await again.start_round(1, 1)
    assert again.get_busy_devices() == frozenset()
    answering = mqtt.answering([("d01", 1)])
    after = [answer async for answer in again.stream("s", dict.fromkeys(DEVICES, action))]
    await answering
    assert [answer.device_id for answer in after] == ["d02", "d00", "d01"]
    assert after[:2] == before


async def test_what_was_accepted_and_not_handed_out_comes_first_in_the_next_round(mqtt: Devices) -> None:
    """Also after a restart between the rounds, and after the folder was tidied up."""
    fleet, _, action, begin = await over_mqtt(mqtt)
    await begin(1)
    answering = mqtt.answering([("d02", 1), ("d01", 1)])
    async for _ in fleet.stream("s", dict.fromkeys(DEVICES, action)):
        break
    await answering  # d01 is accepted, and nobody listens
    mqtt.store.commit_round(1, b"state", 0.0, {})
    mqtt.store.remove_others(fleet.find_needed_blobs())

    again = await mqtt.fleet()
    await again.start_round(2, 1)
    assert again.get_busy_devices() == {"d00", "d01"}
    mqtt.store.remove_others(again.find_needed_blobs())
    answering = mqtt.answering([("d00", 1)])
    heard = [answer async for answer in again.stream("s", {})]
    await answering
    assert [(answer.device_id, answer.round) for answer in heard] == [("d01", 1), ("d00", 1)]
    assert again.get(heard[0].result.update, LAYOUT).params.tolist() == [1.0] * 6
    assert mqtt.store._db.execute("SELECT handed FROM orders ORDER BY arrival") == [(1,), (2,), (2,)]


class OwnTrain(Train, frozen=True, kw_only=True):
    """A step that no entry point names."""

    STEP = "own_train"


async def test_an_open_order_of_a_methods_own_step_is_gone_on_with_after_a_restart(mqtt: Devices) -> None:
    fleet = await mqtt.fleet(steps=(OwnTrain,))
    await fleet.start_round(1, len(DEVICES))
    action = OwnTrain(starts=(Start(model=fleet.put(tensors(1.0))),), sgd=Sgd(), measure=False)
    answering = mqtt.answering([("d00", 1)])
    async for _ in fleet.stream("s", {"d00": action, "d01": action}):
        break
    await answering
    mqtt.store.commit_round(1, b"state", 0.0, {})

    without = await mqtt.fleet()
    with pytest.raises(ConfigError, match="own_train"):
        await without.start_round(2, 1)
    again = await mqtt.fleet(steps=(OwnTrain,))
    await again.start_round(2, 1)
    answering = mqtt.answering([("d01", 1)])
    assert [answer.device_id async for answer in again.stream("s", {})] == ["d01"]
    await answering


async def test_a_step_between_two_streams_disturbs_nothing(mqtt: Devices) -> None:
    fleet, _, action, begin = await over_mqtt(mqtt)
    await begin(1)
    answering = mqtt.answering([("d00", 1)])
    async for _ in fleet.stream("s", {"d00": action, "d01": action}):
        break
    await answering
    answering = mqtt.answering([("d01", 1)])  # while the step is under way

    async def fail() -> None:
        order = await mqtt.devices["d02"].order("t")
        await answering
        await mqtt.devices["d02"].report(order, Failed(why=Why.ERROR))

    failing = asyncio.create_task(fail())
    assert (await fleet.run("t", {"d02": action}))["d02"].result == Failed(why=Why.ERROR)
    await failing
    assert [answer.device_id async for answer in fleet.stream("u", {})] == ["d01"]


async def test_a_device_has_a_day_and_gets_its_order_when_it_wakes(
    mqtt: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the deadline of a round; while it sleeps nothing is sent. Then the stream ends, also without it."""
    monkeypatch.setattr("coordinator.fleet.mqtt.fleet.MAX_LEFT_S", 5.0)
    fleet = await mqtt.fleet(deadline_s=0.1)
    await fleet.start_round(1, len(DEVICES))
    sleeper = mqtt.devices["d01"]
    await sleeper.appear(presence=Presence.SLEEPING)
    await until(lambda: fleet.registry.is_away("d01"))

    async def answer() -> None:
        for i in ("d02", "d01"):
            device = mqtt.devices[i]
            if i == "d01":
                assert not device.orders
                await device.appear()
            await until(lambda device=device: bool(device.orders))
            assert device.orders[0].left_s > 1
            await device.report(device.orders[0], device.trained(1.0))
            await device.ack(device.orders[0].id)

    answering = asyncio.create_task(answer())
    heard = [(a.device_id, a.result is None) async for a in fleet.stream("s", dict.fromkeys(DEVICES, train(fleet)))]
    await answering
    assert heard == [("d02", False), ("d01", False), ("d00", True)]


async def test_at_the_end_of_the_run_open_orders_expire(mqtt: Devices) -> None:
    fleet, _, action, begin = await over_mqtt(mqtt)
    await begin(1)
    answering = mqtt.answering([("d00", 1)])
    async for _ in fleet.stream("s", dict.fromkeys(DEVICES, action)):
        break
    await answering
    fleet.expire_streams()
    assert fleet.get_busy_devices() == frozenset()
    found = {entry.order.device_id: (entry.status, entry.reason) for entry in mqtt.store.get_entries(1)}
    late = (OrderStatus.EXPIRED, "the run ended before the report came")
    assert found == {"d00": (OrderStatus.ACCEPTED, ""), "d01": late, "d02": late}


def test_who_does_not_know_the_recipe_is_not_asked_and_it_is_said_what_to_do() -> None:
    ref = BlobRef(digest="0" * 64, size_bytes=1)
    plain, adam = (Train(starts=(Start(model=ref),), sgd=sgd) for sgd in (Sgd(), Sgd(optimizer="adam", nesterov=True)))
    steps = {"train": Train.VERSION}
    old, new = Device("a", 1, steps=steps), Device("b", 1, steps=steps | {"recipe": 1})
    assert old.prepare_action(plain) == new.prepare_action(plain) == plain
    reason = "its fedge does not know nesterov, optimizer of the recipe: update fedge there"
    assert old.prepare_action(adam) == Unsupported(reason=reason)
    assert new.prepare_action(adam) == adam
    sent, refused = prepare_actions({"a": old, "b": new}, {"a": adam, "b": adam}, TASK)
    assert (sent, refused) == ({"b": adam}, {"a": Unsupported(reason=reason)})


async def test_who_does_not_know_the_step_answers_first_and_is_not_asked(mqtt: Devices) -> None:
    fleet, _, action, begin = await over_mqtt(mqtt)
    await mqtt.devices["d01"].appear(capabilities=Capabilities(trains=True, steps={"profile": 1}))
    await until(lambda: any(device.steps for device in fleet.registry.list_online()))
    await begin(1)
    answering = mqtt.answering([("d00", 1)])
    heard = [answer async for answer in fleet.stream("s", {"d00": action, "d01": action})]
    await answering
    assert [answer.device_id for answer in heard] == ["d01", "d00"]
    assert isinstance(heard[0].result, Unsupported)
    assert not mqtt.devices["d01"].orders
