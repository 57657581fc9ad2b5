"""Workers that make a masked sum without a coordinator: each step by hand."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from edge_agent.device.worker import FinishedOrder, Worker
from fedge.privacy.masked_sums import (
    Member,
    Roster,
    make_member,
    read_roster,
    write_positions,
    write_roster,
    write_signatures,
)
from fedge.steps.contract import Action, Result
from fedge.steps.masked.confirm_sum import ConfirmSum, SumConfirmed
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MaskShares, SharesMade
from fedge.steps.masked.train_masked import TrainedMasked, TrainMasked
from fedge.steps.masked.unmask import Unmask
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tasks import DeviceData
from fedge.tensors.layout import Codec
from fedge.wire.messages import BlobRef
from tests.support.orders import TASK, Blobs, device_data, order

SESSION = "train"


class Cohort:
    """Devices d0, d1, ... with the same samples.

    `made`, `trained`, `vectors`, `signed`: by position, what each has shared, its answer to the masked training, its
    masked update, its confirmation; after `share`, `train` and `confirm`.
    """

    def __init__(self, home: Path, n: int = 6, *, min_cohort: int = 5, run: str = "r") -> None:
        self.blobs, self.run = Blobs(), run
        self.min_cohort = min_cohort
        self.home = home
        self.workers = [self.started(k) for k in range(n)]
        self.made: dict[int, SharesMade] = {}
        self.trained: dict[int, TrainedMasked] = {}
        self.vectors: dict[int, bytes] = {}
        self.signed: dict[int, bytes] = {}
        self.ref: BlobRef
        self.roster: Roster

    def started(self, k: int, data: DeviceData | None = None) -> Worker:
        """The worker of a device, as after a kill -9: nothing but its files is left."""
        return Worker(f"d{k}", TASK, data or device_data(), self.home / f"d{k}", min_cohort=self.min_cohort)

    def does(self, k: int, action: Action, number: int = 1) -> FinishedOrder:
        ordered = order(action, number, run=self.run, label=f"{SESSION}-{action.STEP}", seed=7)
        ordered = msgspec.structs.replace(ordered, id=f"{ordered.id}{k}", device_id=f"d{k}")
        return self.workers[k].execute(ordered, self.blobs)

    def result(self, k: int, action: Action, number: int = 1) -> Result:
        return self.does(k, action, number).result

    def advertise(self, who: range | None = None, number: int = 1) -> None:
        """Keys, and the roster of some devices."""
        keys = {k: self.result(k, MaskKeys(session=SESSION), number) for k in who or range(len(self.workers))}
        self.enrol([make_member(f"d{k}", own) for k, own in keys.items() if isinstance(own, KeysMade)])

    def enrol(self, members: list[Member]) -> None:
        file = write_roster(members)
        self.ref, self.roster = self.blobs.file(file), read_roster(file)

    def share(self, number: int = 1) -> None:
        for k, one in enumerate(self.roster.members):
            shared = self.result(int(one.id[1:]), self.sharing(), number)
            assert isinstance(shared, SharesMade), shared
            self.made[k] = shared

    def sharing(self) -> MaskShares:
        return MaskShares(session=SESSION, roster=self.ref)

    def positions(self, positions: Collection[int] | None) -> BlobRef:
        """As a file; None: all that have shared."""
        return self.blobs.file(write_positions(self.made if positions is None else positions))

    def training(self, k: int, seed: int = 0, among: Collection[int] | None = None) -> TrainMasked:
        """For the device at position k of the roster; `seed`: of the model; `among`: who has shared, None: all."""
        train = Train(starts=(Start(model=self.blobs.model(seed)),), sgd=Sgd(steps=2), codec=Codec.INT8)
        there = self.made if among is None else among
        shares = {j: self.made[j].sealed[k] for j in self.roster.get_neighbours(k) if j in there}
        return TrainMasked(
            session=SESSION,
            roster=self.ref,
            train=train,
            heaviest=100,
            sharers=self.positions(among),
            shares=shares,
        )

    def train(self, k: int, number: int = 1, among: Collection[int] | None = None) -> None:
        self.take(k, self.training(k, among=among), number)

    def take(self, k: int, action: TrainMasked, number: int = 1) -> None:
        """What the device at position k answers to this training."""
        finished = self.does(k, action, number)
        assert isinstance(finished.result, TrainedMasked), finished.result
        self.trained[k] = finished.result
        self.vectors[k] = finished.blobs[finished.result.masked.digest]

    def confirming(self, k: int, *summed: int, among: Collection[int] | None = None) -> ConfirmSum:
        """For the device at position k; `among`: who has shared, None: all."""
        near = set(self.roster.get_neighbours(k)) & set(summed) & self.trained.keys()
        return ConfirmSum(
            session=SESSION,
            roster=self.ref,
            sharers=self.positions(among),
            summed=self.positions(summed),
            statements={j: self.trained[j].statement for j in near},
        )

    def confirm(self, *summed: int, who: Collection[int] | None = None, number: int = 1) -> None:
        """The sum of some, by some or all."""
        for k in self.made if who is None else who:
            confirmed = self.result(k, self.confirming(k, *summed), number)
            assert isinstance(confirmed, SumConfirmed), confirmed
            self.signed[k] = confirmed.confirmation

    def opening(self) -> Unmask:
        """With the confirmations that there are."""
        return Unmask(session=SESSION, roster=self.ref, confirmations=self.blobs.file(write_signatures(self.signed)))

    def masked(self, number: int = 1) -> None:
        """The first three steps."""
        self.advertise(number=number)
        self.share(number)
        for k in self.made:
            self.train(k, number)
