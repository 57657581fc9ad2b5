"""Updates that become bytes, and those that stay arrays: whoever reads them sees the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent.device import Unpacked
from edge_agent.encoding import in_one_process, sent
from fedge import codec
from fedge.errors import ProtocolError
from fedge.messages import Codec, Order, Part
from fedge.steps.describe_labels import DescribeLabels
from fedge.tensors import Layout, Model, TensorInfo, digest_of

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="base.weight", shape=(4, 3)),
        TensorInfo(name="norm.mean", shape=(3,), kind="buffer"),
        TensorInfo(name="norm.n", shape=(), kind="counter"),
        TensorInfo(name="head.weight", shape=(2, 4)),
        TensorInfo(name="head.bias", shape=(2,)),
    )
)


def update() -> Model:
    rng = np.random.default_rng(0)
    return Model(rng.normal(size=22).astype(np.float32), rng.normal(size=3).astype(np.float32), np.array([7]))


def order(number: int = 1) -> Order:
    return Order(
        id=f"r.{number}.train.d0",
        device_id="d0",
        round=number,
        step="train",
        seed=5,
        task_fingerprint="f" * 64,
        deadline=0.0,
        action=DescribeLabels(),
    )


def here(update: Model, part: Part = Part.ALL, codec_: Codec = Codec.FLOAT32, number: int = 1):
    with in_one_process():
        return sent(update, LAYOUT, LAYOUT.part(part), codec_, order(number))


@pytest.mark.parametrize("part", list(Part))
def test_what_stays_is_what_the_bytes_hold_and_counts_as_many(part):
    ref, data = sent(update(), LAYOUT, LAYOUT.part(part), Codec.FLOAT32, order())
    assert isinstance(data, bytes)
    assert (ref.digest, ref.size_bytes) == (digest_of(data), len(data))
    kept, unpacked = here(update(), part)
    assert isinstance(unpacked, Unpacked)
    assert kept.size_bytes == ref.size_bytes
    expected = codec.decode(data, Codec.FLOAT32, LAYOUT.part(part))
    assert unpacked.layout == LAYOUT.part(part)
    for name in ("params", "buffers", "counters"):
        np.testing.assert_array_equal(getattr(unpacked.model, name), getattr(expected, name))
        assert not getattr(unpacked.model, name).flags.writeable


@pytest.mark.parametrize("codec_", [c for c in Codec if c is not Codec.FLOAT32])
def test_codecs_that_round_or_pack_are_carried_out(codec_):
    assert here(update(), codec_=codec_) == sent(update(), LAYOUT, LAYOUT, codec_, order())


def test_it_is_named_by_its_order():
    assert here(update())[0] == here(update())[0]
    assert here(update(), number=2)[0].digest != here(update())[0].digest


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_goes_nowhere(bad):
    for vector in ("params", "buffers"):
        broken = update()
        getattr(broken, vector)[1] = bad
        with pytest.raises(ProtocolError, match="not-finite"):
            here(broken)
        with pytest.raises(ProtocolError, match="not-finite"):
            sent(broken, LAYOUT, LAYOUT, Codec.FLOAT32, order())
