"""What a device keeps for itself between rounds: heads, bases, personal models, offsets (pm_moe.md section 4, Ditto).

    HOME/personal/{run}/{round}     what was kept at the end of that round's training: a `Kept`

It is written before the report is handed out. An order of round r reads the newest file of a round before r and writes
its own; the one that it read stays until a later round, so an order that is done again after a kill -9 finds what it
found before and gives the same bytes. Runs are never mixed: the first file of a new run ends the older ones.

Nothing of this leaves the device but by `SharePrivate`, which only an operator who wants PM-MoE turns on.

What learns from which samples. What is uploaded learns from D_L alone, and so does everything that shapes an upload:
a private head, a private base and an offset pass gradients on to what is shared, hence they learn from D_L, too.
Ditto's personal model and FedRoD's second head have no way into an upload; they learn from all training samples.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import Struct

from edge_agent import dbe, ditto, rod, split
from edge_agent.outcome import FailedError, Fetch, Outcome, Stop
from fedge import codec
from fedge.errors import StoreError
from fedge.files import write_atomically
from fedge.messages import (
    BlobRef,
    Declined,
    FeaturesMeasured,
    FitPool,
    Install,
    Keep,
    KeepHead,
    KeepModel,
    KeepOffset,
    KeepPart,
    MeanFeatures,
    Order,
    Part,
    Result,
    Train,
)
from fedge.models.training import mean_loss
from fedge.tensors import Layout, Model, Tensors, flatten, from_bytes, overlaid, to_bytes, unflatten

if TYPE_CHECKING:
    from edge_agent.worker import Worker


_OTHER: Final = {Part.ALL: None, Part.BASE: Part.HEAD, Part.HEAD: Part.BASE}


class Kept(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of the store. `tensors`: safetensors of `Layout.kept(keep)`."""

    keep: Keep
    tensors: bytes


# --------------------------------------------------------------------------------------------------------- training


def train(worker: Worker, action: Train, fetch: Fetch, order: Order, stop: Stop) -> Outcome:
    """A round of training in which something stays here; D_L is not empty."""
    keep = action.keep
    if keep is None or _OTHER[action.part] is not (keep.private if isinstance(keep, KeepPart) else None):
        raise FailedError("a part of the model travels exactly where the other part is kept")
    found = newest(folder_of(worker.home, order), order.round - 1)
    mine = None if found is None else _tensors(found, keep, worker.network.layout)
    wholes = [
        whole(worker, start.model, action.part, mine, action.initial, fetch) for start in action.starts
    ]  # each start with the other part as it is here
    start, chosen = worker.best_of(wholes, action.starts, action.choose)
    before = worker.look(_over(start, keep, mine, worker.network.layout), measure=action.measure)
    shared, mine = _learn(worker, start, keep, mine, action, fetch, order, stop)
    loss_after = None
    if action.measure:
        worker.network.load(_over(shared, keep, mine, worker.network.layout))
        loss_after = mean_loss(worker.network, *worker.data.shared)
    update = Model(shared.params - start.params, shared.buffers, shared.counters)
    outcome = worker.trained(order, action, chosen, before, loss_after, update)
    _write(worker.home, order, Kept(keep=keep, tensors=to_bytes(mine)))
    return outcome


def _learn(
    worker: Worker,
    start: Model,
    keep: Keep,
    mine: Tensors | None,
    action: Train,
    fetch: Fetch,
    order: Order,
    stop: Stop,
) -> tuple[Model, Tensors]:
    """What is shared, in whole, and what is kept."""
    network, data = worker.network, worker.data
    # two streams: the shared model learns the same, whatever is kept beside it
    rngs = np.random.default_rng(order.seed), np.random.default_rng([order.seed, 1])
    everything = (data.x_train, data.y_train)
    match keep:
        case KeepPart():
            return split.learn(network, start, data.shared, keep, action.sgd, rngs[0], stop)
        case KeepModel():
            return ditto.learn(network, start, mine, data.shared, everything, keep, action.sgd, rngs, stop)
        case KeepHead():
            return rod.learn(network, start, mine, data.shared, everything, action.sgd, rngs, stop)
        case KeepOffset():
            goal = dbe.global_mean(fetch(keep.global_mean), network.layout)
            return dbe.learn(network, start, mine, data.shared, goal, keep, action.sgd, rngs[0], stop)


# ------------------------------------------------------------------------------------------------------------ using


def over(worker: Worker, model: Model) -> Model:
    """The model that the device would use now: what it kept last, put over the shared one."""
    runs = sorted((worker.home / "personal").glob("*/"), key=lambda run: run.stat().st_mtime_ns)
    found = newest(runs[-1]) if runs else None
    if found is None:
        return model
    layout = worker.network.layout
    return _over(model, found.keep, _tensors(found, found.keep, layout), layout)


def served(worker: Worker, action: Install | FitPool, fetch: Fetch, order: Order) -> Model:
    """The model of an order that ends a method, with what was kept put over it."""
    mine = None if action.keep is None else kept(worker, action.keep, order)
    model = whole(worker, action.global_model, action.part, mine, action.initial, fetch)
    return model if action.keep is None else _over(model, action.keep, mine, worker.network.layout)


def kept(worker: Worker, keep: Keep, order: Order) -> Tensors | None:
    """What the run's last training kept here, as `Layout.kept(keep)` says; None if there was none.

    Raises:
        FailedError: something else was kept.
    """
    found = newest(folder_of(worker.home, order), order.round)
    return None if found is None else _tensors(found, keep, worker.network.layout)


def mean_features(worker: Worker, action: MeanFeatures, fetch: Fetch) -> Result:
    """DBE: mean features (D,) of D_L."""
    x, _ = worker.data.shared
    if not len(x):
        return Declined(reason="no shareable samples")
    mean = worker.network.features(worker.model(action.model, fetch), x).mean(axis=0)
    return FeaturesMeasured(mean=tuple(mean.tolist()), n_samples=len(x))


def whole(
    worker: Worker, ref: BlobRef, part: Part, mine: Tensors | None, initial: BlobRef | None, fetch: Fetch
) -> Model:
    """All tensors of a model of which a part was sent: the others from what was kept, at first from `initial`."""
    if part is Part.ALL:
        return worker.model(ref, fetch)
    layout = worker.network.layout
    sent = unflatten(codec.decode(fetch(ref), ref.codec, layout.part(part)), layout.part(part))
    if mine is not None:
        return flatten(mine | sent, layout)
    if initial is None:
        raise FailedError("nothing is kept here, and the order names no initial model")
    return overlaid(worker.model(initial, fetch), sent, layout)


def _over(model: Model, keep: Keep, mine: Tensors | None, layout: Layout) -> Model:
    """One network that predicts what `model` and what was kept predict together."""
    if mine is None:
        return model
    match keep:
        case KeepPart() | KeepModel():
            return overlaid(model, mine, layout)
        case KeepHead():
            return rod.folded(model, mine, layout)
        case KeepOffset():
            return dbe.folded(model, mine, layout)


# ------------------------------------------------------------------------------------------------------------ store


def newest(folder: Path, up_to: int | None = None) -> Kept | None:
    """What was kept last in a run, or last up to a round; None if nothing was.

    Raises:
        StoreError: the file cannot be read.
    """
    rounds = [number for number in _rounds(folder) if up_to is None or number <= up_to]
    if not rounds:
        return None
    path = folder / str(max(rounds))
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _write(home: Path, order: Order, what: Kept) -> None:
    """Make it durable; then what no order will read any more goes."""
    folder = folder_of(home, order)
    write_atomically(folder / str(order.round), msgspec.msgpack.encode(what))
    for torn in folder.glob(".tmp-*"):  # of a write that kill -9 cut off
        torn.unlink(missing_ok=True)
    earlier = sorted(number for number in _rounds(folder) if number < order.round)
    for number in earlier[:-1]:
        (folder / str(number)).unlink(missing_ok=True)
    for run in set(folder.parent.glob("*/")) - {folder}:
        shutil.rmtree(run, ignore_errors=True)


def folder_of(home: Path, order: Order) -> Path:
    """Where the order's run keeps its files."""
    run = order.id.removesuffix(f".{order.round}.{order.step}.{order.device_id}")
    return home / "personal" / run


def _rounds(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def _tensors(found: Kept, keep: Keep, layout: Layout) -> Tensors:
    if type(found.keep) is not type(keep):
        raise FailedError(f"{type(found.keep).__name__} was kept here, the order speaks of {type(keep).__name__}")
    tensors = from_bytes(found.tensors)
    flatten(tensors, layout.kept(keep))  # refused where it is something else
    return tensors
