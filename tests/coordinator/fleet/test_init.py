"""Orders have an identity and a seed of their own, the same after a restart."""

from coordinator.fleet import order_for
from fedge.messages import BlobRef, Install, Order, decode, encode
from fedge.task import TaskSpec

TASK = TaskSpec(name="toy", classes=("a", "b"), input_shape=(2,), model="mlp")
ACTION = Install(global_model=BlobRef(digest="0" * 64, size_bytes=8), release=1, method="fedavg")


def order(*, run: str = "r", seed: int = 0, number: int = 1, step: str = "train", device: str = "d") -> Order:
    return order_for(run, seed, number, step, device, TASK, ACTION, deadline=5.0)


def test_the_same_work_has_the_same_id_and_seed() -> None:
    assert order() == order()
    assert decode(encode(order()), Order) == order()


def test_other_work_has_another_id_and_seed() -> None:
    all_orders = [order(), order(number=2), order(step="trial"), order(device="e")]
    assert len({o.id for o in all_orders}) == 4
    assert len({o.seed for o in all_orders}) == 4


def test_the_seed_depends_on_the_federations_and_not_on_the_run() -> None:
    assert order(seed=1).seed != order().seed
    assert order(run="other").seed == order().seed
    assert order(run="other").id != order().id


def test_the_longest_names_fit() -> None:
    longest = order_for("f" * 63, 0, 10**6, "s" * 30, "d" * 63, TASK, ACTION, deadline=5.0)
    assert decode(encode(longest), Order) == longest
