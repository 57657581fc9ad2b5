"""A fleet that trains under masks: a method sees the mean of each of its groups, and no single update.

Orders of `train` become five steps (`fedge.privacy.masked_sums` has the protocol): keys, shares, masked training,
confirmation of the sum, unmasking. The results look like answers to `train`: each device in a sum has the group's mean
as its update. A weighted mean of equal updates is that update, so a method whose server needs only sums works
unchanged. A group consists of the devices whose orders start from one cluster.

Effect of a device that drops out at each step:

    keys        the device is not in the roster
    shares      nobody masks with it
    training    its pairs' masks are removed with shares of its key
    confirming  more than two thirds of the cohort, and of the devices in the sum, must have confirmed the sum
    unmasking   its shares are missing: more than half of the neighbours of each device must answer

A sum covers at least `min_cohort` devices. It differs from each earlier sum of the run by at least as many devices, or
by none. If the devices that answered violate this, some are left out of the sum. If none remain, or too many have
dropped out, the group learns nothing in this round, and the log says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet
from coordinator.fleet.masked_group import Group, LostError
from fedge.errors import ConfigError, raise_as
from fedge.privacy.masked_sums import (
    Sums,
    add_pair_mask,
    expand_seed,
    make_member,
    read_roster,
    write_positions,
    write_roster,
    write_signatures,
)
from fedge.steps.contract import Action, Declined, Refusal, Result
from fedge.steps.masked.confirm_sum import ConfirmSum, SumConfirmed
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MaskShares, SharesMade
from fedge.steps.masked.train_masked import TrainedMasked, TrainMasked, compute_common_digest
from fedge.steps.masked.unmask import Unmask, Unmasked
from fedge.steps.training.train import Train, Trained
from fedge.tensors import fixed_point
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef, Why

log = logging.getLogger("fedge.coordinator")

R = TypeVar("R")
Weights = Literal["samples", "equal"]
"""A device's weight in sums: its samples; or "equal": 1 in a cluster, and its samples without clusters."""


@dataclass(frozen=True, slots=True)
class Update:
    """The mean of a device's group, and what the device reported besides its masked update."""

    mean: BlobRef
    result: TrainedMasked


class MaskedFleet(Fleet):
    """The `Fleet` of a round whose training is masked.

    `sums`: the sums of the run, with those of this round.

    Args:
        fleet: the devices.
        layout: the layout of the model.
        weights: how the method weights its means.
        min_cohort: fewest devices in a sum.
        sums: the sums of earlier rounds.
        seed: seed of this round, for choosing devices to leave out.
    """

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        *,
        weights: Weights,
        min_cohort: int,
        sums: Sums,
        seed: tuple[int, int],
    ) -> None:
        super().__init__(fleet)
        self.sums = sums
        self._layout = layout
        self._weights = weights
        self._min_cohort = min_cohort
        self._seed = seed

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Run the actions as any fleet does, with training under masks.

        Raises:
            ConfigError: the method trains by another step than `train`, which masks would not hide, or trains the
                devices of a cluster differently.
        """
        training = {i: action for i, action in sorted(actions.items()) if isinstance(action, Train)}
        if any(type(action) is not Train for action in training.values()):
            raise ConfigError("the method trains by another step than `train`, which masking does not hide")
        asked = {(action.starts[0].cluster, compute_common_digest(action, 1)) for action in training.values()}
        if len(asked) > len({cluster for cluster, _ in asked}):
            raise ConfigError("a cluster's devices train differently: masks cancel only if they train alike")
        others = {i: action for i, action in actions.items() if i not in training}
        answers = await self._fleet.run(label, others) if others else {}
        if training:
            answers |= await self._train(label, training)
        return dict(sorted(answers.items()))

    async def _train(self, label: str, actions: Mapping[str, Train]) -> dict[str, Answer]:
        """Run the five steps, each for all groups at once. Training keeps its label, and so its random numbers."""
        seconds = dict.fromkeys(actions, 0.0)

        async def run_step(step: str, asked: Mapping[str, Action]) -> dict[str, Answer]:
            found = await self._fleet.run(step, asked) if asked else {}
            for i, answer in found.items():
                seconds[i] += answer.seconds
            return found

        answers = await run_step(f"{label}-keys", {i: MaskKeys(session=label) for i in actions})
        groups = self._make_groups(actions, select_results(answers, KeysMade))
        found = await run_step(
            f"{label}-shares",
            {i: MaskShares(session=label, roster=g.ref) for g in groups for i in g.roster.get_ids(g.positions)},
        )
        for i, shares in select_results(found, SharesMade).items():
            group, k = find_member(groups, i)
            if set(shares.sealed) == set(group.roster.get_neighbours(k)):
                group.shares[k] = shares
        answers |= found
        for group in groups:
            group.sharers = self._fleet.put_bytes(write_positions(group.shares))
        found = await run_step(label, {i: order for g in groups for i, order in make_orders(label, g, actions).items()})
        for i, masked in select_results(found, TrainedMasked).items():
            group, k = find_member(groups, i)
            group.add_update(k, masked)
        answers |= found
        for number, group in enumerate(groups):
            self._choose(group, number)
        found = await run_step(
            f"{label}-confirm",
            {
                i: order
                for g in groups
                for i, order in make_confirmations(label, g).items()
                if answers[i].result is not None
            },
        )
        for i, confirmed in select_results(found, SumConfirmed).items():
            group, k = find_member(groups, i)
            group.add_confirmation(k, confirmed.confirmation)
        found = await run_step(
            f"{label}-unmask", {i: order for g in groups for i, order in self._make_unmasks(label, g).items()}
        )
        for i, shown in select_results(found, Unmasked).items():
            group, k = find_member(groups, i)
            group.shown[k] = shown
        updates = await self._open_sums(groups)
        n_samples = {device.id: device.n_samples for device in self._fleet.get_devices()}
        seen = {
            i: make_result(answers[i].result, updates.get(i), n_samples[i], action) for i, action in actions.items()
        }
        return {i: replace(answers[i], result=result, seconds=seconds[i]) for i, result in seen.items()}

    def _make_groups(self, actions: Mapping[str, Train], keys: Mapping[str, KeysMade]) -> list[Group]:
        """Make cohorts of the devices that advertised keys, as far as they may be summed."""
        groups = []
        n_samples = {device.id: device.n_samples for device in self._fleet.get_devices()}
        often = Counter(key for i, made in keys.items() for key in make_member(i, made).keys)
        for number, cluster in enumerate(sorted({action.starts[0].cluster for action in actions.values()})):
            asked = [i for i, action in actions.items() if action.starts[0].cluster == cluster]
            there = [i for i in asked if i in keys and all(often[key] == 1 for key in make_member(i, keys[i]).keys)]
            cohort = select_summable(there, self.sums, self._min_cohort, self._make_rng(number, 0))
            if not cohort:
                why = self.sums.explain_too_close(there, self._min_cohort)
                log_lost(asked, f"of {len(asked)} devices {len(there)} take part, which may not be summed: {why}")
                continue
            members = [make_member(i, keys[i]) for i in cohort]
            file = write_roster(members)
            alike = self._weights == "equal" and cluster >= 0
            heaviest = 1 if alike else max(1, *(n_samples[i] for i in cohort))  # 0 where owners withhold it
            groups.append(
                Group(
                    roster=read_roster(file),
                    ref=self._fleet.put_bytes(file),
                    train=actions[cohort[0]],
                    heaviest=min(heaviest, fixed_point.compute_heaviest(len(cohort))),
                )
            )
        return groups

    def _choose(self, group: Group, number: int) -> None:
        """Choose devices to sum among those with masked updates. From now on this counts as a sum, even if it fails."""
        there = group.roster.get_ids(sorted(group.masked))
        cohort = select_summable(there, self.sums, self._min_cohort, self._make_rng(number, 1))
        positions = tuple(k for k, member in enumerate(group.roster.members) if member.id in set(cohort))
        if not cohort or not group.roster.are_joined(positions):
            why = self.sums.explain_too_close(there, self._min_cohort) or "too few masks join them"
            log_lost(
                group.roster.get_ids(group.positions),
                f"{len(there)} masked updates came, which may not be summed: {why}",
            )
            return
        group.summed, group.to_sum = positions, self._fleet.put_bytes(write_positions(positions))
        self.sums = self.sums.with_sum(cohort)

    def _make_unmasks(self, label: str, group: Group) -> dict[str, Unmask]:
        """Ask devices that can help to open a sum, if enough have confirmed it."""
        if group.summed and (reason := group.roster.explain_dispute(group.summed, group.confirmed)):
            log_lost(group.roster.get_ids(group.summed), reason)
            group.summed = ()
        if not group.summed:
            return {}
        file = self._fleet.put_bytes(write_signatures(group.confirmed))
        helpers = group.roster.get_ids(sorted(group.masked.keys() & group.confirmed.keys()))
        return dict.fromkeys(helpers, Unmask(session=label, roster=group.ref, confirmations=file))

    def _make_rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((*self._seed, *stream))

    async def _open_sums(self, groups: Sequence[Group]) -> dict[str, Update]:
        """Return for each device in a sum its group's mean as an update, and what the device reported."""
        updates: dict[str, Update] = {}
        for group in groups:
            if not group.summed:
                continue
            try:
                mean = await asyncio.to_thread(self._compute_mean, group)
            except LostError as error:
                log_lost(group.roster.get_ids(group.summed), str(error))
                continue
            ref = self._fleet.put_model(mean, self._layout)
            updates |= {group.roster.members[k].id: Update(ref, group.masked[k]) for k in group.summed}
        return updates

    def _compute_mean(self, group: Group) -> Model:
        """Divide the unmasked sum into the group's mean, an update with buffers and counters as after training."""
        roster, layout = group.roster, self._layout
        total = fixed_point.make_zero(layout)
        seeds = {k: group.recover_seed(k) for k in group.summed}
        keys = {k: group.recover_key(k) for k in sorted(group.shares.keys() - seeds.keys())}
        training = compute_common_digest(group.train, group.heaviest)
        for k, seed in seeds.items():
            total.add(fixed_point.from_bytes(self._fleet.get_bytes(group.masked[k].masked), layout))
            total.subtract(expand_seed(seed, layout))
        for k, key in keys.items():
            for peer in set(roster.get_neighbours(k)) & seeds.keys():
                add_pair_mask(total, k, peer, roster.derive_pair_seed(key, k, peer, training), layout)
        with raise_as(LostError, "a device has masked something else", on=ValueError):
            mean = fixed_point.compute_mean_change(total, layout, len(roster.members), group.heaviest)
        start = self._fleet.get(group.train.starts[0].model, layout)
        return Model(mean.params, start.buffers + mean.buffers, start.counters + mean.counters)

    def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream without training, since a sum waits for its cohort.

        Raises:
            ConfigError: the method streams training.
        """
        if any(isinstance(action, Train) for action in actions.values()):
            raise ConfigError("the method takes updates as they come, but a masked sum waits for its cohort")
        return self._fleet.stream(label, actions, seen)


def select_results(answers: Mapping[str, Answer], kind: type[R]) -> dict[str, R]:
    """Return the results of one kind, by ascending device id."""
    return {i: a.result for i, a in sorted(answers.items()) if isinstance(a.result, kind)}


def find_member(groups: Sequence[Group], device_id: str) -> tuple[Group, int]:
    """Find a device's group, and its position in the group."""
    return next((g, k) for g in groups if (k := g.roster.find_position(device_id)) is not None)


def make_orders(label: str, group: Group, actions: Mapping[str, Train]) -> dict[str, TrainMasked]:
    """Make the masked training of devices that shared their secrets, if enough of their neighbours did."""
    found = {}
    for k in sorted(group.shares):
        received = {
            peer: group.shares[peer].sealed[k] for peer in group.roster.get_neighbours(k) if peer in group.shares
        }
        if len(received) >= group.roster.threshold:
            i = group.roster.members[k].id
            found[i] = TrainMasked(
                session=label,
                roster=group.ref,
                train=actions[i],
                heaviest=group.heaviest,
                sharers=group.sharers,
                shares=received,
            )
    return found


def make_confirmations(label: str, group: Group) -> dict[str, ConfirmSum]:
    """Make the requests to confirm a sum, if there is a sum, with what a device's neighbours in it have signed."""
    found, signed = {}, {k: group.masked[k].statement for k in group.summed}
    for k in sorted(group.shares) if group.summed else ():
        statements = {peer: signed[peer] for peer in group.roster.get_neighbours(k) if peer in signed}
        found[group.roster.members[k].id] = ConfirmSum(
            session=label, roster=group.ref, sharers=group.sharers, summed=group.to_sum, statements=statements
        )
    return found


def make_result(result: Result | None, update: Update | None, n_samples: int, action: Train) -> Result | None:
    """Make a method's view of a device's result, with the group's mean as if it were the device's update."""
    if update is None:
        refused = result is None or isinstance(result, Refusal)
        return result if refused else Declined(why=Why.TOO_FEW, reason="its update is in no sum")
    return Trained(
        update=update.mean,
        n_samples=max(n_samples, 1),
        cluster=action.starts[0].cluster,
        loss_before=update.result.loss_before,
        loss_after=update.result.loss_after,
        gradient_norm=update.result.gradient_norm,
        val_score=update.result.val_score,
    )


def select_summable(devices: Iterable[str], earlier: Sums, fewest: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Select as many of the devices as may be summed, ascending; empty if none may.

    The result is an earlier sum again, or all devices except some, so that the sum differs enough from earlier sums.
    """
    left, others = set(devices), [set(other) for other in earlier]
    candidates = [tuple(sorted(other)) for other in others if left.issuperset(other)]
    while close := next((other for other in others if 0 < len(left ^ other) < fewest), None):
        common = sorted(left & close)
        missing = fewest - len(left ^ close)
        left -= {common[k] for k in rng.permutation(len(common))[:missing]}
    candidates.append(tuple(sorted(left)))
    return max((c for c in candidates if not earlier.explain_too_close(c, fewest)), key=len, default=())


def log_lost(devices: Collection[str], reason: str) -> None:
    """Log that a group learns nothing in this round."""
    log.warning("event=sum_lost devices=%d reason=%r", len(devices), reason)
