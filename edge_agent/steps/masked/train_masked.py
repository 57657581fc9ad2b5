"""Train as `train` does and send the masked change of the model, once per session."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edge_agent.device.device import Device, FailedError, make_failure
from edge_agent.privacy.masking import Masked, Session
from edge_agent.steps.training import train
from fedge.errors import FedgeError, StoreError
from fedge.privacy.masked_sums import Roster, add_pair_mask, expand_seed
from fedge.steps.contract import Result, encode_body
from fedge.steps.masked.train_masked import TrainedMasked, TrainMasked, compute_common_digest
from fedge.steps.training.train import Train, Trained
from fedge.system.files import compute_digest
from fedge.tensors import fixed_point
from fedge.tensors.layout import Codec, Model

THREADED = train.THREADED


def run(device: Device, action: TrainMasked) -> Result:
    """Repeat the earlier answer if there is one; otherwise train, mask the update, keep it and send it."""
    session = Session(device, action.session)
    roster, own = session.fetch_roster(action.roster)
    known = session.load(Masked)
    if known is not None:
        if known.action != _compute_digest(action):
            raise FailedError("another order was answered under this mask")
        device.send(known.vector)
        return msgspec.msgpack.decode(known.result, type=TrainedMasked)
    _require_pairs(session, roster, own, action)
    result = train.run(device, with_exact_codec(action))
    return mask_update(device, action, result) if isinstance(result, Trained) else result


def many(devices: Sequence[Device], actions: Sequence[TrainMasked]) -> list[Result | None]:
    """Train side by side, as `train.many` does; then mask each update."""
    fresh = [Session(device, a.session).load(Masked) is None for device, a in zip(devices, actions, strict=True)]
    found: list[Result | None] = [None] * len(devices)
    numbers = [k for k, is_fresh in enumerate(fresh) if is_fresh]
    results = train.many([devices[k] for k in numbers], [with_exact_codec(actions[k]) for k in numbers])
    for k, result in zip(numbers, results, strict=True):
        try:
            found[k] = mask_update(devices[k], actions[k], result) if isinstance(result, Trained) else result
        except StoreError:
            raise
        except (FedgeError, FailedError, ValueError) as error:
            found[k] = make_failure(error)
    return found


def with_exact_codec(action: TrainMasked) -> Train:
    """Return the training in an exact codec, so that nothing is rounded twice."""
    return msgspec.structs.replace(action.train, codec=Codec.FLOAT32)


def mask_update(device: Device, action: TrainMasked, trained: Trained) -> Result:
    """Mask the update of a training, keep it and send it."""
    session = Session(device, action.session)
    roster, own = session.fetch_roster(action.roster)
    _require_pairs(session, roster, own, action)
    layout = device.layout
    cohort, weight = len(roster.members), min(trained.n_samples, action.heaviest)
    change = _compute_change(device, action, trained)
    total = fixed_point.make_summand(change, weight, cohort, action.heaviest)
    total.add(expand_seed(session.load_shared(roster).seed, layout))
    training = compute_common_digest(action.train, action.heaviest)
    for peer in action.shares:
        add_pair_mask(total, own, peer, roster.derive_pair_seed(session.masking, own, peer, training), layout)
    vector, statement = total.to_bytes(), roster.make_mask_statement(action.sharers)
    result = TrainedMasked(
        masked=device.send(vector),
        statement=session.signing.sign(statement),
        loss_before=trained.loss_before,
        loss_after=trained.loss_after,
        gradient_norm=trained.gradient_norm,
        val_score=trained.val_score,
    )
    session.save(Masked(_compute_digest(action), statement, action.shares, encode_body(result), vector))
    return result


def _compute_change(device: Device, action: TrainMasked, trained: Trained) -> Model:
    """Return the change of the whole model, since an update has final buffers and counters, not differences."""
    update = device.take_update(trained.update)
    start = device.fetch_model(action.train.starts[0].model)
    return Model(update.params, update.buffers - start.buffers, update.counters - start.counters)


def _require_pairs(session: Session, roster: Roster, own: int, action: TrainMasked) -> None:
    """Refuse masks with too few neighbours, or not with exactly the neighbours that have shared their secrets."""
    if len(action.train.starts) != 1 or action.train.personal:
        raise FailedError("masked training needs one start, without personal layers")
    sharers = session.fetch_positions(action.sharers, roster)
    if own not in sharers or set(action.shares) != set(roster.get_neighbours(own)).intersection(sharers):
        raise FailedError("the order's shares are not those of the neighbours that have shared their secrets")
    if len(action.shares) < roster.threshold:
        raise FailedError(f"only {len(action.shares)} neighbours for masks; at least {roster.threshold} are needed")


def _compute_digest(action: TrainMasked) -> str:
    return compute_digest(encode_body(action))
