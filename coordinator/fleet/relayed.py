"""Devices behind relays: the steps of a relay, and the fleet that hides it from methods.

A relay (`coordinator.relay`) represents the devices of its site. All that a step asks of them travels as one order,
each model once, and their answers return in one report. Their updates stay on the site. They are summed there, with the
weights that the averaging rule gives each update by its norm, and the sum travels as float32.

Methods still get a reference for each update. It names a small file in the update's place, which gives the update's
site and norms.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.clustering import geometry
from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet, prepare_actions, read_valid_result, require_sendable
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from fedge.errors import MALFORMED, ConfigError, ProtocolError
from fedge.steps.contract import Action, Refusal, Result, Reveals, encode_body, require
from fedge.steps.training.train import Train, Trained
from fedge.tensors import codecs
from fedge.tensors.codecs import Norms
from fedge.tensors.layout import Layout, Model, from_bytes
from fedge.wire.messages import BlobRef, Count, Digest, Id, NonNegative, Outcome, Report, Why, iterate_blobs

log = logging.getLogger("fedge.coordinator")

T = TypeVar("T")

MAX_MODELS: Final = 256
"""Most models that an order to a relay may name, because more references do not fit into a message."""
MAX_SUMS: Final = 256
"""Most sums in one request to a relay: one for each cluster of a method, and one for all devices."""
ROUNDED: Final = 1.001
"""Tolerated ratio of a mean's norm to the norm that its updates allow, since both are rounded to float32."""
NOTHING: Final = 1e-12
"""Tolerated excess of a mean's norm. It moves no model, and squares of such small numbers are inexact in float32."""
HEAD: Final = b"fedge: an update that lies on a site\n"
"""Start of a file that stands in for an update; no file of tensors begins with it."""
MAX_STAND_IN_BYTES: Final = 1024


# ------------------------------------------------------------------------------------------------------- contracts


class SiteRequest(Struct, frozen=True):
    """An action for devices of a site, encoded as in an order."""

    step: Id
    version: Count
    body: bytes


class SiteOrders(Struct, frozen=True, kw_only=True):
    """The requests to a site's devices in one step.

    `seed`, `layout`: of the federation; the site's devices draw the same random numbers as without a relay. `keep`:
    updates of earlier rounds that may still be averaged. `devices`: by name, the position of its request in `asked`.
    """

    seed: Count
    layout: Layout
    keep: tuple[Digest, ...]
    asked: tuple[SiteRequest, ...]
    devices: dict[Id, Count]


class SiteAnswer(Struct, frozen=True, kw_only=True):
    """The answer of a device on a site. `norms`: the norms of its update, if it sent one.

    `further`: those of the updates that it sent beside, in their order, which relays of 0.2 leave out.
    """

    seconds: NonNegative
    outcome: Outcome
    why: Why | None = None
    body: bytes = b""
    norms: tuple[NonNegative, NonNegative] | None = None
    further: tuple[tuple[NonNegative, NonNegative], ...] = ()


class Relayed(Result, frozen=True, kw_only=True):
    """The answers of a site. `answers`: a file with a `SiteAnswer` by name; a missing device did not answer."""

    REVEALS: ClassVar = {"answers": Reveals.PROFILE}  # what the devices' owners let out
    answers: BlobRef


class Relay(Action, frozen=True, kw_only=True):
    """An order to a relay to ask the devices of its site.

    `orders`: a file with `SiteOrders`. `work`: of the largest request, in forward passes. `bundles`: whether any device
    writes a bundle.
    """

    STEP: ClassVar = "relay"
    RESULT: ClassVar = Relayed
    DEVICE: ClassVar = "coordinator.relay.site"
    TRAINS: ClassVar = False

    orders: BlobRef
    models: Annotated[tuple[BlobRef, ...], Meta(max_length=MAX_MODELS)]
    work: NonNegative
    bundles: bool = False

    @property
    def exports(self) -> bool:
        """Whether any device on the site writes a bundle."""
        return self.bundles

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Return the work of the largest order, in forward passes, since devices work side by side."""
        del n_shared, n_train, n_val
        return self.work

    def uploads(self, result: Relayed, layout: Layout) -> Mapping[BlobRef, Layout | None]:
        """Return the file of the answers, which is checked when it is read."""
        del layout
        return {result.answers: None}


class Summed(Result, frozen=True, kw_only=True):
    """The means of a site. `means`: one for each sum, float32; None without updates.

    `missing`: devices whose updates are lost. `directions`: float32, by device (`geometry.compute_direction`).
    """

    REVEALS: ClassVar = {"means": Reveals.UPDATE, "missing": Reveals.NOTHING, "directions": Reveals.UPDATE}
    means: Annotated[tuple[BlobRef | None, ...], Meta(max_length=MAX_SUMS)]
    missing: Annotated[tuple[Id, ...], Meta(max_length=256)] = ()
    directions: BlobRef | None = None


class Sum(Action, frozen=True, kw_only=True):
    """An order to average updates that lie on the site. `wanted`: a file with `SiteSums`."""

    STEP: ClassVar = "relay_sum"
    RESULT: ClassVar = Summed
    DEVICE: ClassVar = "coordinator.relay.site"
    TRAINS: ClassVar = False

    wanted: BlobRef

    def uploads(self, result: Summed, layout: Layout) -> Mapping[BlobRef, Layout | None]:
        """Return the files of the means, which are checked when they are read."""
        del layout
        return dict.fromkeys(iterate_blobs(result))


def list_updates(action: Train, result: Trained, layout: Layout) -> dict[BlobRef, Layout]:
    """List the updates that a device on a site sent, with their layouts, `result.update` first; they stay there."""
    return {ref: part for ref, part in action.uploads(result, layout).items() if part is not None}


STEPS: Final[tuple[type[Action], ...]] = (Relay, Sum)
"""The steps that a relay can be asked to do."""


# -------------------------------------------------------------------------------------------------------- the fleet


class StandIn(Struct, frozen=True, kw_only=True):
    """The file to which a method's reference points if the update is on a site."""

    via: Id
    update: BlobRef
    norms: tuple[float, float]


class RelayFleet(Fleet):
    """The `Fleet` of one round, in which devices behind relays look like any others.

    Args:
        fleet: the relays, and the devices without one.
        layout: the layout of the model.
        seed: the seed of the federation.
        named: references in the method's state; updates among them are kept on their sites.
    """

    def __init__(self, fleet: Fleet, *, layout: Layout, seed: int, named: Iterable[BlobRef] = ()) -> None:
        super().__init__(fleet)
        self._layout = layout
        self._seed = seed
        self._n_sums = 0
        self._via = {d.id: d.via for d in (*self.get_devices(), *self.get_inference_devices()) if d.via}
        self._keep: defaultdict[str, set[str]] = defaultdict(set)
        for ref in named if self._via else ():
            if held := self._find_stand_in(ref):
                self._keep[held.via].add(held.update.digest)

    @property
    def sites(self) -> RelayFleet:
        """This fleet itself, which knows on which site each update is."""
        return self

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Run the actions as any fleet does; requests to devices behind one relay become one order."""
        direct = {i: action for i, action in actions.items() if i not in self._via}
        devices = {d.id: d for d in (*self.get_devices(), *self.get_inference_devices())}
        require_sendable(action for i, action in actions.items() if i in self._via)
        own, refused = prepare_actions(
            devices, {i: action for i, action in actions.items() if i in self._via}, self.task
        )
        sites: defaultdict[str, dict[str, Action]] = defaultdict(dict)
        work: dict[str, float] = {}
        for i, action in sorted(own.items()):
            via, n = self._via[i], devices[i].n_samples
            sites[via][self._get_name(i)] = action
            work[via] = max(work.get(via, 0.0), action.passes(n, n, n))
        orders = {via: self._make_relay(via, of_site, work[via]) for via, of_site in sites.items()}
        answers = await self._fleet.run(label, direct | orders)
        for via, of_site in sites.items():
            answers |= self._read_answers(via, answers.pop(via), of_site)
        return dict(sorted((answers | {i: Answer(i, refusal) for i, refusal in refused.items()}).items()))

    def _make_relay(self, via: str, actions: Mapping[str, Action], work: float) -> Action:
        """Combine the actions of a site's devices, by their names on the site, into one action."""
        kinds = {id(action): action for action in actions.values()}  # usually one action shared by all
        models = dict.fromkeys(ref for action in kinds.values() for ref in iterate_blobs(action))
        if len(models) > MAX_MODELS:
            raise ConfigError(f"a step names {len(models)} models, but an order to a relay holds at most {MAX_MODELS}")
        numbers = {key: n for n, key in enumerate(kinds)}
        orders = SiteOrders(
            seed=self._seed,
            layout=self._layout,
            keep=tuple(sorted(self._keep[via])),
            asked=tuple(SiteRequest(a.STEP, a.order_version, encode_body(a)) for a in kinds.values()),
            devices={i: numbers[id(action)] for i, action in actions.items()},
        )
        return Relay(
            orders=self.put_bytes(msgspec.msgpack.encode(orders)),
            models=tuple(models),
            work=work,
            bundles=any(action.exports for action in kinds.values()),
        )

    def _get_name(self, device_id: str) -> str:
        """Return the device's name on its site."""
        return device_id.removeprefix(f"{self._via[device_id]}.")

    def _read_answers(self, via: str, answer: Answer, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Return the answers of a site's devices; answers that do not fit their order are dropped."""
        site_answers: dict[str, SiteAnswer] = {}
        if isinstance(answer.result, Relayed):
            site_answers = self._read(via, answer.result.answers, dict[str, SiteAnswer]) or {}
        refusal = answer.result if isinstance(answer.result, Refusal) else None
        found = {}
        for name, action in actions.items():
            i = f"{via}.{name}"
            found[i] = Answer(i, refusal, round=answer.round)
            if name in site_answers:
                result = self._make_result(via, i, site_answers[name], action)
                found[i] = replace(found[i], result=result, seconds=site_answers[name].seconds)
        if unresponsive := [i for i, each in found.items() if each.result is None]:
            log.warning("event=site_silent relay=%s devices=%s", via, ",".join(unresponsive))
        return found

    def _make_result(self, via: str, device_id: str, answer: SiteAnswer, action: Action) -> Result | None:
        report = Report(order_id=via, device_id=device_id, outcome=answer.outcome, why=answer.why, body=answer.body)
        try:
            result = read_valid_result(action, report, self.task)
            stand_ins: dict[BlobRef, BlobRef] = {}
            if isinstance(result, Trained) and isinstance(action, Train):  # the relay has the same condition
                told = (answer.norms or (math.nan, math.nan), *answer.further)
                refs = list_updates(action, result, self._layout)
                require(len(told) == len(refs), f"{len(told)} updates have norms, and {len(refs)} were sent")
                for ref, norms in zip(refs, told, strict=True):
                    require(all(map(math.isfinite, norms)), "an update has no finite norms")
                    held = StandIn(via=via, update=ref, norms=norms)
                    stand_ins[ref] = self.put_bytes(HEAD + msgspec.msgpack.encode(held))
        except ProtocolError as error:
            self._fleet.accuse(via, ProtocolError(error.name, f"{device_id}: {error}"))
            return None
        if not stand_ins.keys() >= set(iterate_blobs(result)):  # the method's fault
            log.warning("event=not_handed_on relay=%s device=%s step=%s", via, device_id, action.STEP)
            return None
        fields = {name: getattr(result, name) for name in result.__struct_fields__}
        own = {name: stand_ins[ref] for name, ref in fields.items() if isinstance(ref, BlobRef)}
        return msgspec.structs.replace(result, **own) if own else result

    def _read(self, via: str, ref: BlobRef, kind: type[T]) -> T | None:
        """Read a relay's file; None if it is invalid."""
        try:
            return msgspec.msgpack.decode(self._fleet.get_bytes(ref), type=kind)
        except MALFORMED as error:
            self._fleet.accuse(via, ProtocolError("malformed", str(error)))
            return None

    def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream from devices without a relay only, since a site answers when all its devices have."""
        if not self._via.keys().isdisjoint(actions):
            raise ConfigError("the method takes answers one by one, and a relay gives those of its site together")
        return self._fleet.stream(label, actions, seen)

    # ------------------------------------------------------------------------------------------------------- updates

    def _find_stand_in(self, ref: BlobRef) -> StandIn | None:
        """Return the stand-in of an update on a site; None if the update is stored here, or `ref` is no update."""
        if ref.size_bytes > MAX_STAND_IN_BYTES:
            return None
        data = self._fleet.get_bytes(ref)
        return msgspec.msgpack.decode(data[len(HEAD) :], type=StandIn) if data.startswith(HEAD) else None

    def find_remote(self, updates: Mapping[str, BlobRef]) -> set[str]:
        """Return the devices whose updates are on sites."""
        return {i for i, ref in updates.items() if self._find_stand_in(ref)}

    def get_norms(self, ref: BlobRef, layout: Layout) -> Norms:
        """Return the norms that the relay reported, for an update on its site."""
        held = self._find_stand_in(ref)
        return held.norms if held else self._fleet.get_norms(ref, layout)

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """Return a model stored here.

        Raises:
            ConfigError: `ref` is an update on a site.
        """
        if held := self._find_stand_in(ref):
            raise ConfigError(f"the method needs single updates, but those of {held.via} stay on its site")
        return self._fleet.get(ref, layout)

    async def compute_means(self, wanted: SiteSums, note: Note) -> list[SiteMean]:
        """Have the sites average their updates, and return the means (`coordinator.fleet.sites.Sites`)."""
        of_site: defaultdict[str, dict[str, StandIn]] = defaultdict(dict)
        for i, ref in sorted(wanted.updates.items()):
            if held := self._find_stand_in(ref):
                of_site[held.via][i] = held
        updates = {via: {i: held.update for i, held in own.items()} for via, own in of_site.items()}
        asked_for = {via: wanted.narrow_to(own, prefix=f"{via}.") for via, own in updates.items()}
        self._n_sums += 1
        actions = {via: Sum(wanted=self.put_bytes(msgspec.msgpack.encode(w))) for via, w in asked_for.items()}
        answers = await self._fleet.run(f"sum-{self._n_sums}", actions)
        found: list[SiteMean] = []
        for via, answer in sorted(answers.items()):
            if not isinstance(answer.result, Summed):
                log.warning("event=no_sum relay=%s devices=%d result=%s", via, len(of_site[via]), answer.result)
                continue
            try:
                norms = {self._get_name(i): held.norms for i, held in of_site[via].items()}
                found += self._read_means(via, asked_for[via], norms, answer.result, note)
            except ProtocolError as error:
                self._fleet.accuse(via, error)
        return found

    def _read_means(
        self, via: str, wanted: SiteSums, norms: Mapping[str, Norms], result: Summed, note: Note
    ) -> list[SiteMean]:
        """Return a site's means, unless one is longer than its updates' norms allow (triangle inequality)."""
        require(len(result.means) == len(wanted.sums), f"{len(result.means)} means for {len(wanted.sums)} sums")
        if result.missing:
            log.warning("event=updates_lost relay=%s devices=%s", via, ",".join(result.missing))
        found = []
        for k, (ref, own) in enumerate(zip(result.means, wanted.sums, strict=True)):
            of = {i: wanted.weights[i] for i in own if i not in result.missing}
            if ref is not None and (weight := sum(of.values())):
                longest = [sum(w * own[i][part] * norms[i][part] for i, w in of.items()) / weight for part in range(2)]
                lengths = codecs.check_blob(self.get_bytes(ref), ref.codec, wanted.layout)
                fits = all(length <= ROUNDED * most + NOTHING for length, most in zip(lengths, longest, strict=True))
                require(fits, f"a mean has norms {lengths}, but its updates allow at most {longest}")
                found.append(SiteMean(k, self._fleet.get(ref, wanted.layout), tuple(f"{via}.{i}" for i in of)))
        if result.directions is not None:
            d = wanted.layout.n_params
            shape = (d if d <= geometry.LARGE else geometry.PROJECTED,)
            for name, direction in sorted(from_bytes(self.get_bytes(result.directions)).items()):
                if name in wanted.directions and direction.shape == shape and bool(np.isfinite(direction).all()):
                    note(f"{via}.{name}", direction)
        return found
