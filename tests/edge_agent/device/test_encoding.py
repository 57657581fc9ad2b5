"""Updates that become bytes, and those that stay arrays: whoever reads them sees the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.device import Device, UnpackedModel
from edge_agent.device.encoding import send_update, share_memory
from edge_agent.device.room import UpdateStore
from edge_agent.device.worker import Worker
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.models import build
from fedge.steps.contract import Action
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.masked.mask_keys import MaskKeys
from fedge.system.files import compute_digest
from fedge.tensors import codecs
from fedge.tensors.layout import BASE, HEAD, Codec, Layout, Model, Selector
from fedge.wire.messages import BlobRef
from tests.support.orders import Blobs, device_data, order

TASK = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(6,), model="tests.support.networks:normed")
LAYOUT, _ = build.make_initial_model(TASK, 0)


def update() -> Model:
    rng = np.random.default_rng(0)
    return Model(
        rng.normal(size=LAYOUT.n_params).astype(np.float32), rng.normal(size=16).astype(np.float32), np.array([7])
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def device(number: int = 1) -> Device:
    own = Worker("d", TASK, device_data(), Path("home"))
    return own.make_device(order(DescribeLabels(), number, task=TASK), Blobs())


def there(what: Model, part: Layout, codec_: Codec = Codec.FLOAT32) -> tuple[BlobRef, bytes]:
    """As it leaves a device."""
    own = device()
    ref = send_update(own, what, part, codec_)
    assert own.unpacked == {}
    (data,) = own.blobs.values()
    assert own.blobs == {ref.digest: data}
    return ref, data


def here(what: Model, part: Layout = LAYOUT, number: int = 1) -> tuple[BlobRef, UnpackedModel]:
    """As it stays in the process."""
    own = device(number)
    with share_memory(UpdateStore()):
        ref = send_update(own, what, part, Codec.FLOAT32)
    assert own.blobs == {}
    return ref, own.unpacked[ref.digest]


@pytest.mark.parametrize("personal", [(), HEAD, BASE, ("norm",)])
def test_what_stays_is_what_the_bytes_hold_and_counts_as_many(personal: Selector) -> None:
    part = LAYOUT.without(personal)
    ref, data = there(update(), part)
    assert (ref.digest, ref.size_bytes) == (compute_digest(data), len(data))
    kept, unpacked = here(update(), part)
    assert kept.size_bytes == ref.size_bytes
    expected = codecs.decode(data, Codec.FLOAT32, part)
    assert unpacked.layout == part
    assert unpacked.norms == pytest.approx(codecs.compute_norms(expected))
    for name in ("params", "buffers", "counters"):
        np.testing.assert_array_equal(getattr(unpacked.model, name), getattr(expected, name))
        assert not getattr(unpacked.model, name).flags.writeable


@pytest.mark.parametrize("codec_", [c for c in Codec if c is not Codec.FLOAT32])
def test_codecs_that_round_or_pack_are_carried_out(codec_: Codec) -> None:
    with share_memory(UpdateStore()):
        found = there(update(), LAYOUT, codec_)
    assert found == there(update(), LAYOUT, codec_)
    assert found[0].codec is codec_


def test_it_is_named_by_its_order() -> None:
    assert here(update())[0] == here(update())[0]
    assert here(update(), number=2)[0].digest != here(update())[0].digest


def scaled(by: float) -> Model:
    own = update()
    return Model(np.float32(by) * own.params, own.buffers, own.counters)


def test_two_updates_of_one_order_are_two() -> None:
    """As those of SCAFFOLD: the change of the model and that of the control variate."""
    own = device()
    with share_memory(UpdateStore()):
        refs = [send_update(own, scaled(by), LAYOUT, Codec.FLOAT32) for by in (1, -3)]
    kept = [own.unpacked[ref.digest].model.params for ref in refs]
    np.testing.assert_array_equal(kept[1], -3 * kept[0])


def test_an_update_that_was_taken_back_gives_its_name_to_no_other() -> None:
    own = device()
    with share_memory(UpdateStore()):
        first, second = (send_update(own, scaled(by), LAYOUT, Codec.FLOAT32) for by in (1, 2))
        own.take_update(first)
        third = send_update(own, scaled(3), LAYOUT, Codec.FLOAT32)
    np.testing.assert_array_equal(own.unpacked[second.digest].model.params, scaled(2).params)
    np.testing.assert_array_equal(own.unpacked[third.digest].model.params, scaled(3).params)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_goes_nowhere(bad: float) -> None:
    for vector in ("params", "buffers"):
        broken = update()
        getattr(broken, vector)[1] = bad
        for way in (lambda what: here(what), lambda what: there(what, LAYOUT)):
            with pytest.raises(ProtocolError, match="not-finite"):
                way(broken)


def sent(
    home: Path, number: int, what: Model, label: str = "step", action: Action | None = None
) -> tuple[bytes, np.ndarray]:
    """The bytes of an update in a round, and its numbers as the server reads them."""
    own = Worker("d", TASK, device_data(), home).make_device(
        order(action or DescribeLabels(), number, task=TASK, label=label), Blobs()
    )
    send_update(own, what, LAYOUT, Codec.TOP)
    (data,) = own.blobs.values()
    return data, codecs.decode(data, Codec.TOP, LAYOUT).params


def test_what_is_left_out_comes_later(tmp_path: Path) -> None:
    one = update()
    total = np.zeros(LAYOUT.n_params)
    for number in range(1, 200):
        total += sent(tmp_path, number, one)[1]
    np.testing.assert_allclose(total / 199, one.params, atol=0.2)  # each has been sent
    assert np.count_nonzero(sent(tmp_path / "new", 1, one)[1]) < LAYOUT.n_params / 10


def test_an_order_done_again_gives_the_same_bytes(tmp_path: Path) -> None:
    for number in (1, 2, 5):
        first = sent(tmp_path, number, update())[0]
        assert sent(tmp_path, number, update())[0] == first, "killed after its file was written"
    assert sent(tmp_path, 6, update())[0] != sent(tmp_path / "new", 6, update())[0]


def test_another_step_or_network_begins_with_nothing(tmp_path: Path) -> None:
    sent(tmp_path, 1, update())
    other = MaskKeys(session="s")
    assert sent(tmp_path, 2, update(), action=other)[0] == sent(tmp_path / "new", 2, update(), action=other)[0]


def test_orders_of_one_round_go_on_from_each_other(tmp_path: Path) -> None:
    """As those of asynchronous rounds, each of which has a label of its own."""
    in_one_round = [sent(tmp_path / "a", 1, update(), f"train-{k}")[0] for k in range(5)]
    assert in_one_round == [sent(tmp_path / "b", number, update())[0] for number in range(1, 6)]
    assert sent(tmp_path / "a", 1, update(), "train-4")[0] == in_one_round[-1], "done again"
    (folder,) = (tmp_path / "a").rglob("waits-*")
    assert len(list(folder.iterdir())) == 1


def test_two_updates_of_one_order_leave_out_for_themselves(tmp_path: Path) -> None:
    def both(number: int) -> list[bytes]:
        own = Worker("d", TASK, device_data(), tmp_path / "both").make_device(
            order(DescribeLabels(), number, task=TASK, label="step"), Blobs()
        )
        return [own.blobs[send_update(own, scaled(by), LAYOUT, Codec.TOP).digest] for by in (1, -3)]

    for number in range(1, 6):
        alone = [sent(tmp_path / f"{by}", number, scaled(by))[0] for by in (1, -3)]
        assert both(number) == alone
        assert both(number) == alone, "done again"


def test_an_update_in_top_that_diverged_is_not_sent(tmp_path: Path) -> None:
    broken = Model(np.full(LAYOUT.n_params, np.nan, np.float32), update().buffers, update().counters)
    with pytest.raises(ProtocolError, match="training diverged"):
        sent(tmp_path, 1, broken)
