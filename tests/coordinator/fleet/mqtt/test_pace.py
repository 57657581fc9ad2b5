"""How long a device may take."""

from coordinator.fleet.mqtt.pace import EXPORT, ROOM, SLOWEST, Paces, compute_work
from fedge.steps.contract import load_installed_steps
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.wire.messages import BlobRef

REF = BlobRef(digest="0" * 64, size_bytes=1)


def test_who_is_unknown_has_the_least_until_somebody_is_known() -> None:
    paces = Paces()
    assert paces.compute_allowed_s({"a": 1e9}, least_s=60) == {"a": 60}
    for device, seconds in (("slow", 300.0), ("b", 20.0), ("c", 10.0)):
        paces.record(device, 100, seconds)
    assert paces.compute_allowed_s({"a": 100, "slow": 100}, least_s=60) == {"a": ROOM * 20, "slow": ROOM * 300}


def test_a_device_of_unknown_speed_has_more_time_for_a_bundle() -> None:
    paces = Paces()
    paces.record("a", 100, 1.0)
    allowed = paces.compute_allowed_s({"a": 100, "b": 100, "c": 100}, least_s=60, exporting=("a", "b"))
    assert allowed == {"a": 60, "b": EXPORT * 60, "c": 60}
    exporting = {name for name, step in load_installed_steps().items() if step.EXPORTS}
    assert exporting == {"install", "fit_gate", "fit_mixture", "fit_pool"}


def test_a_longer_order_gets_more_time_and_a_short_one_the_least() -> None:
    paces = Paces()
    paces.record("a", 100, 50.0)
    assert paces.compute_allowed_s({"a": 1000}, least_s=60) == {"a": ROOM * 500}
    assert paces.compute_allowed_s({"a": 1}, least_s=60) == {"a": 60}


def test_a_device_that_delays_each_answer_does_not_get_ever_more_time() -> None:
    paces = Paces()
    for honest in ("a", "b", "c"):
        paces.record(honest, 100, 10.0)
    given = [paces.compute_allowed_s({"late": 100}, least_s=60)["late"]]
    for _ in range(8):
        paces.record("late", 100, given[-1])
        given.append(paces.compute_allowed_s({"late": 100}, least_s=60)["late"])
    assert given[-1] == given[-2] == ROOM * SLOWEST * 10 < given[0] * ROOM**3


def test_the_last_of_the_most_laborious_orders_says_how_fast_a_device_is() -> None:
    paces = Paces()
    for work, seconds in ((100, 50.0), (1, 30.0), (0, 30.0), (100, 40.0)):
        paces.record("a", work, seconds)
    assert paces.compute_allowed_s({"a": 100}, least_s=1) == {"a": ROOM * 40}


def test_the_work_of_an_order_is_that_of_the_simulated_clock() -> None:
    order = Train(starts=(Start(model=REF),), sgd=Sgd(steps=7))
    assert compute_work(order, 20) == order.passes(n_shared=20, n_train=20, n_val=20) > 0
    assert compute_work(order, 0) > 0, "a device that shares no sample may train alone"
