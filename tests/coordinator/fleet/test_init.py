"""Orders have an identity and a seed of their own, the same after a restart."""

import msgspec
import pytest

from coordinator.fleet import order_for, require_sendable
from coordinator.methods import MethodSettings
from coordinator.methods.fedavg import FedAvg
from fedge.errors import ConfigError
from fedge.messages import BlobRef, Order, decode, encode
from fedge.sgd import Sgd
from fedge.step import Action
from fedge.steps.fit_mixture import FitMixture
from fedge.steps.install import Install
from fedge.steps.train import Start, Train
from fedge.task import TaskSpec
from tests.support.simulation import digits

TASK = TaskSpec(name="toy", classes=("a", "b"), input_shape=(2,), model="mlp")
ACTION = Install(model=BlobRef(digest="0" * 64, size_bytes=8), method="fedavg")


def order(*, run: str = "r", seed: int = 0, number: int = 1, label: str = "train", device: str = "d") -> Order:
    return order_for(run, seed, number, label, device, TASK.fingerprint(), ACTION, deadline=5.0)


def test_the_same_work_has_the_same_id_and_seed() -> None:
    assert order() == order()
    assert decode(encode(order()), Order) == order()


def test_other_work_has_another_id_and_seed() -> None:
    all_orders = [order(), order(number=2), order(label="trial"), order(device="e")]
    assert len({o.id for o in all_orders}) == 4
    assert len({o.seed for o in all_orders}) == 4


def test_the_seed_depends_on_the_federations_and_not_on_the_run() -> None:
    assert order(seed=1).seed != order().seed
    assert order(run="other").seed == order().seed
    assert order(run="other").id != order().id


def test_the_longest_names_fit() -> None:
    longest = order_for("f" * 63, 0, 10**6, "s" * 30, "d" * 63, TASK.fingerprint(), ACTION, deadline=5.0)
    assert decode(encode(longest), Order) == longest


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
    with pytest.raises(ConfigError, match=r"no order can say this: .*ints"):
        require_sendable([msgspec.structs.replace(TRAIN, sgd=Sgd(steps=10**20))])


async def test_an_option_beyond_what_a_message_can_hold_ends_a_run_and_says_so(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    method = FedAvg(MethodSettings(sgd=Sgd(learning_rate=1000.0)))
    with pytest.raises(ConfigError, match="learning_rate"):
        await method.round(method.init(layout, first), fleet)
    assert fleet.bytes_down == 0
