"""Train as `train` does and send the masked change of the model, once per session."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edge_agent.device.device import Device, FailedError, failed
from edge_agent.privacy.masking import Masked, Session
from edge_agent.steps.training import train
from fedge.errors import FedgeError, StoreError
from fedge.privacy.masked_sums import Roster, add_pair_mask, prg
from fedge.steps.contract import Result, body_of
from fedge.steps.masked.train_masked import TrainedMasked, TrainMasked, alike
from fedge.steps.training.train import Train, Trained
from fedge.system.files import digest_of
from fedge.tensors import fixed_point
from fedge.tensors.layout import Codec, Model

THREADED = train.THREADED


def run(device: Device, action: TrainMasked) -> Result:
    """Repeat an earlier answer if there is one; else train, mask, keep, send."""
    session = Session(device, action.session)
    roster, own = session.roster(action.roster)
    known = session.read(Masked)
    if known is not None:
        if known.action != _digest(action):
            raise FailedError("another order was answered under this mask")
        device.send(known.vector)
        return msgspec.msgpack.decode(known.result, type=TrainedMasked)
    _require_pairs(session, roster, own, action)
    result = train.run(device, plain(action))
    return masked(device, action, result) if isinstance(result, Trained) else result


def many(devices: Sequence[Device], actions: Sequence[TrainMasked]) -> list[Result | None]:
    """Train side by side, as `train.many`; then mask each."""
    fresh = [Session(device, a.session).read(Masked) is None for device, a in zip(devices, actions, strict=True)]
    found: list[Result | None] = [None] * len(devices)
    numbers = [k for k, is_fresh in enumerate(fresh) if is_fresh]
    results = train.many([devices[k] for k in numbers], [plain(actions[k]) for k in numbers])
    for k, result in zip(numbers, results, strict=True):
        try:
            found[k] = masked(devices[k], actions[k], result) if isinstance(result, Trained) else result
        except StoreError:
            raise
        except (FedgeError, FailedError, ValueError) as error:
            found[k] = failed(error)
    return found


def plain(action: TrainMasked) -> Train:
    """The training in an exact codec, so that nothing is rounded twice."""
    return msgspec.structs.replace(action.train, codec=Codec.FLOAT32)


def masked(device: Device, action: TrainMasked, trained: Trained) -> Result:
    """Mask a training's update, keep it and send it."""
    session = Session(device, action.session)
    roster, own = session.roster(action.roster)
    _require_pairs(session, roster, own, action)
    layout = device.layout
    cohort, weight = len(roster.members), min(trained.n_samples, action.heaviest)
    change = _change(device, action, trained)
    total = fixed_point.summand(change, weight, cohort, action.heaviest)
    total.add(prg(session.shared(roster).seed, layout))
    training = alike(action.train, action.heaviest)
    for peer in action.shares:
        add_pair_mask(total, own, peer, roster.pair_seed(session.masking, own, peer, training), layout)
    vector, statement = total.to_bytes(), roster.masked_with(action.sharers)
    result = TrainedMasked(
        masked=device.send(vector),
        statement=session.signing.sign(statement),
        loss_before=trained.loss_before,
        loss_after=trained.loss_after,
        gradient_norm=trained.gradient_norm,
        val_accuracy=trained.val_accuracy,
    )
    session.keep(Masked(_digest(action), statement, action.shares, body_of(result), vector))
    return result


def _change(device: Device, action: TrainMasked, trained: Trained) -> Model:
    """The change in training; the update holds final buffers and counters, not differences."""
    update = device.take_back(trained.update)
    start = device.model(action.train.starts[0].model)
    return Model(update.params, update.buffers - start.buffers, update.counters - start.counters)


def _require_pairs(session: Session, roster: Roster, own: int, action: TrainMasked) -> None:
    """Refuse masks shared with too few devices, or with others than all neighbours that have shared their secrets."""
    if len(action.train.starts) != 1 or action.train.personal:
        raise FailedError("a masked training is of one whole model")
    sharers = session.positions(action.sharers, roster)
    if own not in sharers or set(action.shares) != set(roster.neighbours(own)).intersection(sharers):
        raise FailedError("shares of others than the neighbours that have shared their secrets")
    if len(action.shares) < roster.threshold:
        raise FailedError(f"masks with {len(action.shares)} devices, {roster.threshold} neighbours are the fewest")


def _digest(action: TrainMasked) -> str:
    return digest_of(body_of(action))
