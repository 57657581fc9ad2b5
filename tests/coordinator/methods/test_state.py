"""States as bytes, and the tensors that they name."""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.methods.papers.fedge_state import FedgeState, LastUpdate, TrialOutcome
from coordinator.methods.parts.server_optimizer import ServerModel
from coordinator.methods.state import decode_state, encode_state
from coordinator.selection import ccmab
from fedge.tensors.layout import Layout, TensorInfo
from fedge.wire.messages import BlobRef, iterate_blobs

LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))


def ref(letter: str) -> BlobRef:
    return BlobRef(digest=letter * 64, size_bytes=8)


def state() -> FedgeState:
    trial = TrialOutcome(
        ids=("a", "b"),
        clusters=(("a",), ("b",)),
        tau=0.5,
        separability=0.9,
        statistic=None,
        deltas={"a": 0.25},
        split=True,
        places=((0.5, 0.0), (-0.5, 0.0)),
    )
    return FedgeState(
        round=3,
        layout=LAYOUT,
        initial_model=ref("0"),
        shared=ServerModel(model=ref("1"), velocity=ref("2")),
        last={"a": LastUpdate(update=ref("3"), n_samples=4)},
        groups=(("a", "b"),),
        bandits=(ccmab.State(),),
        trial=trial,
        experts=(ServerModel(model=ref("4")), ServerModel(model=ref("5"))),
    )


def test_a_state_survives_the_way_to_bytes_and_back() -> None:
    before = state()
    after = decode_state(encode_state(before), FedgeState)
    assert after.shared == before.shared
    assert after.last == before.last
    assert after.bandits == before.bandits
    assert after.bandits[0].lowest == (math.inf,) * 5
    assert after.trial is not None
    assert before.trial is not None
    assert after.trial == before.trial
    assert encode_state(after) == encode_state(before)


class TrialWithSimilarities(TrialOutcome, frozen=True, kw_only=True):
    similarity: NDArray[np.float64]


def test_a_state_that_still_holds_all_similarities_is_read_without_them() -> None:
    now = state()
    assert now.trial is not None
    trial = TrialWithSimilarities(similarity=np.eye(2), **msgspec.structs.asdict(now.trial))
    assert decode_state(encode_state(msgspec.structs.replace(now, trial=trial)), FedgeState) == now


def test_every_stored_tensor_of_a_state_is_found() -> None:
    assert {ref.digest[0] for ref in iterate_blobs(state())} == set("012345")


def test_a_state_from_before_there_were_campaigns_is_read() -> None:
    plain, arrays = msgspec.msgpack.decode(encode_state(state()), type=tuple[bytes, bytes])
    fields = msgspec.msgpack.decode(plain)
    for new in ("campaign", "past", "lineage"):
        del fields[new]
    old = decode_state(msgspec.msgpack.encode((msgspec.msgpack.encode(fields), arrays)), FedgeState)
    assert (old.campaign, old.past, old.lineage) == (1, None, ())
    assert encode_state(old) == encode_state(state())
