"""The running coordinator: the durable loop around a method.

Each round is run and its state committed; then whatever no state needs is deleted. After a crash, the last committed
state is loaded and the interrupted round is run again; the fleet returns the answers already accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from coordinator.aggregation import protection
from coordinator.fleet import problems
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.roles import BlobServer, Intake, begun, own_folder
from coordinator.fleet.relayed import STEPS, RelayFleet
from coordinator.methods import settings as methods
from coordinator.methods.catalogue import make, method_class
from coordinator.methods.installation import require_learned
from coordinator.methods.method import Method, Server
from coordinator.methods.settings import DEFAULT, MethodSettings, Option, settings_of
from coordinator.methods.state import State, dump, load
from coordinator.service.checks import first_model, without_profile
from coordinator.service.proof import PROVEN, reloaded
from coordinator.store.requests import Wishes, at_round, wishes_in
from coordinator.store.store import ISSUE, RECALLED_ROUNDS, Event, Store, reading
from coordinator.watch import runs
from coordinator.watch.state import read_summary, without_bundle_because
from coordinator.watch.tracking import MLflow, TensorBoard
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, FruitlessError, StoreError
from fedge.membership.credentials import Broker, Credentials, FederationName
from fedge.models import weights
from fedge.models.weights import Adapt, Allow, ModelName, TaskName, Weights, needed_on_devices
from fedge.settings import Duration, Secret
from fedge.system.files import write_atomically
from fedge.system.hardware import Processor
from fedge.system.logs import bind
from fedge.system.malloc import tune_malloc
from fedge.system.systemd import ready
from fedge.system.text import Heading
from fedge.tasks import labelled, write_task
from fedge.tensors.codecs import encode
from fedge.tensors.layout import Codec, Layout, unflatten
from fedge.wire.messages import BlobRef, blobs_of

log = logging.getLogger("fedge.coordinator")

Observer = Callable[[str, dict[str, Any]], None]

WARN_S: Final = 24 * 3600.0
"""Between two warnings of a certificate that will expire."""
TELL_S: Final = 1.0
"""Shortest time between two summaries."""
NOTE_S: Final = 0.2
"""Shortest time between two writes of events to the store."""
SPARE_S: Final = 60.0
"""While streamed orders are open, an intake may hold an update of theirs that the store does not know yet."""
RARELY: Final = 50
"""Or this many times as long as writing one takes."""
LOOK_S: Final = 0.5
"""Between two checks whether a paused run may continue."""
NOT_ANEW: Final = "the method has no clusters that it could remake now"
IDENTITY: Final = ("federation", "method", "task", "seed", "rounds", "options")
"""Settings that identify a federation; `rounds`: those that it began with."""
NO_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({})


class CoordinatorSettings(Credentials, frozen=True, kw_only=True):
    """Section [coordinator] of the configuration."""

    broker: Broker
    federation: FederationName
    home: Annotated[Path, Heading.FOLDERS, "This folder holds the durable state of one coordinator."]
    store: Annotated[
        Secret | None,
        Heading.FOLDERS,
        "This database, postgresql://USER:PASSWORD@HOST/DATABASE, holds all but tensors; by default it is "
        "HOME/store.db.",
    ] = None
    blobs: Annotated[
        str | None,
        Heading.FOLDERS,
        "This bucket, s3://BUCKET/FOLDER, holds the tensors, for several machines; by default they are in HOME/blobs.",
    ] = None
    task: TaskName
    data: Annotated[
        Path | None, Heading.TASK, "These samples of all classes describe an image-folder or arrays task."
    ] = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    allow: Allow = ""
    role: Annotated[
        Literal["all", "intake", "blobs"],
        Heading.RUNS,
        "With intake or blobs this is one more process beside a coordinator, with the same settings.",
    ] = "all"
    method: methods.MethodName = "fedge"
    server_data: Annotated[
        Path | None,
        Heading.TASK,
        "These are labelled samples of the server, for fedcoe and fedepc: an .npz or a folder of images.",
    ] = None
    late_joiners: Annotated[
        bool,
        Heading.DEVICES,
        "The coordinator stays after the last round and gives new devices a bundle (fedge, fedcoe), until Ctrl-C.",
    ] = False
    rounds: methods.Rounds = DEFAULT.rounds
    devices: Annotated[int, Meta(ge=1), Heading.DEVICES, "Round 1 waits for this many devices."] = 1
    participation: methods.Participation = DEFAULT.participation
    deadline_s: Annotated[
        Duration,
        Heading.RUNS,
        "One step of a round has at least this time. A device known to need longer gets longer, and one of unknown "
        "speed five times as long for a bundle.",
    ] = 60.0
    min_reports: methods.MinReports = DEFAULT.min_reports
    keep_rounds: Annotated[
        int,
        Meta(ge=RECALLED_ROUNDS),
        Heading.FOLDERS,
        "The store keeps the devices, orders and reports of this many rounds, for audits.",
    ] = RECALLED_ROUNDS
    seed: Annotated[int, Meta(ge=0), Heading.RUNS, "This seed decides all random numbers."] = 0
    local_steps: methods.LocalSteps = DEFAULT.sgd.steps
    local_epochs: methods.LocalEpochs = None
    batch_size: methods.BatchSize = DEFAULT.sgd.batch_size
    learning_rate: methods.LearningRate = DEFAULT.sgd.learning_rate
    momentum: methods.Momentum = DEFAULT.sgd.momentum
    weight_decay: methods.WeightDecay = DEFAULT.sgd.weight_decay
    codec: methods.Encoding = DEFAULT.codec
    down: methods.Down = DEFAULT.down
    readmit: Annotated[
        str,
        Heading.DEVICES,
        "These devices, comma-separated, leave quarantine now, and their evidence is forgotten.",
    ] = ""
    average: protection.AverageRule = DEFAULT.protection.average
    hostile: protection.HostileShare = DEFAULT.protection.hostile
    dp_epsilon: protection.DpEpsilon = DEFAULT.protection.dp_epsilon
    dp_noise: protection.DpNoise = DEFAULT.protection.dp_noise
    dp_delta: protection.DpDelta = DEFAULT.protection.dp_delta
    dp_clip: protection.DpClip = DEFAULT.protection.dp_clip
    masking: protection.Masking = DEFAULT.protection.masking
    min_cohort: protection.MinCohort = DEFAULT.protection.min_cohort
    ui: Annotated[
        str | None, Heading.SERVER, "A page at HOST:PORT shows the federation in a browser, as `fedge ui` does."
    ] = None
    tensorboard: TensorBoard = None
    mlflow: MLflow = None
    train_on: Annotated[
        Processor, Heading.RUNS, "Networks of the server's own (fedcoe) are trained and asked on this processor."
    ] = Processor.CPU

    def for_method(self, options: Mapping[str, Option] = NO_OPTIONS, last: int | None = None) -> MethodSettings:
        """The settings for the method; `options` are its own, `last` as in `MethodSettings`."""
        return msgspec.structs.replace(settings_of(self, self.seed, options), last=last)


def start(
    settings: CoordinatorSettings, task: TaskSpec, store: Store, options: Mapping[str, Option] = NO_OPTIONS
) -> tuple[Layout, BlobRef]:
    """Create layout and initial model, once per federation; HOME/task.json is for the devices.

    Raises:
        ConfigError: the folder belongs to a federation with other settings.
    """
    values = [settings.federation, settings.method, task.fingerprint(), settings.seed, settings.rounds, dict(options)]
    identity = json.dumps(values, sort_keys=True)
    if (kept := store.remember("identity", identity)) != identity:
        before = zip(IDENTITY, json.loads(kept), json.loads(identity), strict=True)
        told = "; ".join(f"{name} was {old}, is {new}" for name, old, new in before if old != new)
        raise ConfigError(f"{settings.home} holds another federation ({told}): use another --home")
    if store.recall("start") is None:
        store.remember("blobs", settings.blobs or "")
    store.require_blobs(settings.blobs)
    write_task(task, settings.home / "task.json")
    if (frozen := needed_on_devices(task)) is not None:
        if frozen.digest in store.blobs:
            weights.keep(store.blobs.get(frozen.digest))
        else:
            store.blobs.put(weights.read(frozen.digest))
    known = store.recall("start")
    if known is None:
        lacking = without_profile(settings.method, options)
        layout, model = first_model(task, settings.seed, lacking, settings.task, settings.data)
        data = encode(unflatten(model, layout), Codec.FLOAT32)
        ref = BlobRef(digest=store.blobs.put(data), size_bytes=len(data))
        known = store.remember("start", msgspec.json.encode((layout, ref)).decode())
    return msgspec.json.decode(known, type=tuple[Layout, BlobRef])


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a run that was continued after its end.

    total: the last value of --rounds. last: the number of the last training round, which counts earlier ends, too.
    """

    total: int
    last: int


def length_of(settings: CoordinatorSettings, store: Store) -> tuple[CoordinatorSettings, Length]:
    """The settings with the original number of rounds, and the run's present length.

    Raises:
        ConfigError: the run is longer than the settings say.
    """
    kept, identity = store.recall("length"), store.recall("identity")
    first = settings.rounds if identity is None else int(json.loads(identity)[IDENTITY.index("rounds")])
    length = Length(total=first, last=first) if kept is None else msgspec.json.decode(kept, type=Length)
    if settings.rounds < length.total:
        raise ConfigError(
            f"{settings.home} holds another federation (rounds was {length.total}, is {settings.rounds}): a run can get"
            " more rounds, not fewer; use another --home"
        )
    return msgspec.structs.replace(settings, rounds=first), length


def prolonged(settings: CoordinatorSettings, length: Length, method: Method[Any], state: State, store: Store) -> Length:
    """The length after --rounds was raised. Schedules that the method derived from the rounds stay unchanged.

    Raises:
        ConfigError: the method, or its guarantee, is fixed to the original rounds; or the end is in progress.
    """
    if settings.rounds == length.total:
        return length
    if state.round >= length.last and store.snapshot(state.round + 1) is not None:
        raise ConfigError(f"devices are being given bundles: let that end with --rounds {length.total}, then go on")
    if settings.dp_epsilon is not None:
        raise ConfigError("--dp-epsilon is what all rounds may spend together: more of them need another --home")
    if method.done(state) and state.round <= length.last:
        raise ConfigError(f"{method.name} has no rounds that it could go on with: use another --home")
    return Length(total=settings.rounds, last=max(state.round, length.last) + settings.rounds - length.total)


def resumed(
    wanted: CoordinatorSettings, task: TaskSpec, store: Store, options: Mapping[str, Option]
) -> tuple[Method[Any], Layout, BlobRef, State]:
    """The method, the layout of its initial model, that model, and the last committed state.

    Raises:
        ConfigError: the folder belongs to another federation, or the run cannot have more rounds.
        StoreError: what the store holds cannot be read.
    """
    with reading(store):
        settings, length = length_of(wanted, store)
    method = method_of(settings, task, options, length.last)
    with reading(store):
        layout, model = start(settings, task, store, options)
    saved = store.state()
    first = method.begin(layout, model)
    with reading(store):
        state = first if saved is None else load(saved, type(first))
    if (longer := prolonged(wanted, length, method, state, store)) != length:
        store.keep("length", msgspec.json.encode(longer).decode())
        method = method_of(settings, task, options, longer.last)
    return method, layout, model, state


def method_of(
    settings: CoordinatorSettings,
    task: TaskSpec,
    options: Mapping[str, Option] = NO_OPTIONS,
    last: int | None = None,
) -> Method[Any]:
    """The method named in the settings, with the server data if any; `last` as in `MethodSettings`.

    Raises:
        ConfigError: no such method, or it lacks something.
    """
    if settings.train_on is not Processor.CPU and "" not in method_class(settings.method).SERVER_DATA:
        raise ConfigError(
            f"{settings.method} trains no network on the server: --train-on is for fedcoe, and for agents"
        )
    server_data = None if settings.server_data is None else labelled(task, settings.server_data)
    method = make(settings.method, settings.for_method(options, last), Server(task, server_data))
    if settings.late_joiners and not method.SERVES_LATE_JOINERS:
        raise ConfigError(f"{settings.method} has nothing for devices that come after the end; fedge and fedcoe have")
    return method


class Slowly:
    """Runs a task immediately on request, then at most once per interval."""

    def __init__(self, act: Callable[[], object], every_s: float) -> None:
        self._act = act
        self._every_s = every_s
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Run it now, or as soon as permitted."""
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next:
            self._do()
        else:
            self._timer = loop.call_at(self._next, self._do)

    def _do(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._act()
        self._next = loop.time() + max(self._every_s, RARELY * (loop.time() - began))

    async def aclose(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()


async def serve(
    settings: CoordinatorSettings,
    task: TaskSpec,
    store: Store,
    observe: Observer,
    options: Mapping[str, Option] = NO_OPTIONS,
) -> dict[str, Any]:
    """Run a federation to its end from its present state; returns its summary, also in HOME/summary.json.

    Raises:
        ConfigError: the folder belongs to another federation.
        StoreError: durable state cannot be written; nothing accepted is lost.
        TransportError: the broker refused us for good.
        FruitlessError: the run came to its end, and nothing was learned or no device has a bundle.
    """
    tune_malloc(large=True)
    raise_open_files()
    began = time.monotonic()
    if store.recall("start") is None:
        observe("beginning", {})
    method, layout, first, state = resumed(settings, task, store, options)
    if (ended := finished(settings, method, state)) is not None:
        observe("finished", {"rounds": ended["rounds"], "bundles": len(ended["installed"])})
        require_bundles(ended)
        return ended
    slowly = Slowly(lambda: write_summary(settings, method, state, store, fleet), TELL_S)
    news: list[Event] = []

    def note() -> None:
        if news:
            store.note(*news)
            news.clear()

    noting = Slowly(note, NOTE_S)

    def told(event: str, fields: dict[str, Any]) -> None:
        """Pass an event to the caller and the store, and soon update HOME/summary.json."""
        observe(event, fields)
        number = state.round if event == "round_done" else state.round + 1
        news.append(happened(event, fields, number))
        noting.ask()
        slowly.ask()

    fleet = MqttFleet(
        settings.at(settings.broker),
        store,
        federation=settings.federation,
        run=store.remember("run", uuid.uuid4().hex[:12]),
        issue=store.recall(ISSUE) or "",
        task=task,
        layout=layout,
        seed=settings.seed,
        deadline_s=settings.deadline_s,
        steps=(*method.steps, *STEPS),
        no_relays=method.no_relays(),
        observe=told,
    )
    under_way = set() if method.done(state) else fleet.accepted(state.round + 1)
    store.require({ref.digest for ref in blobs_of(state)} | under_way)
    runs.note(settings.home, "coordinator", settings, options)
    write_summary(settings, method, state, store, fleet)
    fleet.readmit([i.strip() for i in settings.readmit.split(",") if i.strip()])
    async with contextlib.aclosing(slowly), contextlib.aclosing(noting), fleet, warning_daily(settings):
        ready()
        while not method.done(state):
            bind(round=(number := state.round + 1))
            fail_if_fruitless(settings, method, state, first, store, fleet)
            wishes = await permitted(number, store, fleet, told)
            if wishes.recluster == number:
                state = anew(method, state, told)
            await fleet.begin(number, settings.devices if number == 1 else 1)
            state = await method.advance(state, beyond_relays(settings, state, fleet))
            await commit(store, fleet, number, state, time.monotonic() - began, settings.keep_rounds)
            began = time.monotonic()
            told("round_done", write_summary(settings, method, state, store, fleet))
        fleet.end_streams()
        if settings.late_joiners:
            async for state in serve_late_joiners(settings, method, state, store, fleet, told):  # noqa: B020 - it is the next one
                told("round_done", write_summary(settings, method, state, store, fleet))
    note()
    store.count(fleet.take_counts())
    summary = write_summary(settings, method, state, store, fleet, ended=True)
    require_bundles(summary)
    return summary


def fail_if_fruitless(
    settings: CoordinatorSettings, method: Method[Any], state: State, first: BlobRef, store: Store, fleet: MqttFleet
) -> None:
    """End a run before its devices get bundles if the rounds of training are over and nothing was learned.

    Raises:
        FruitlessError: so it is; HOME/summary.json says it, too.
    """
    if state.round != method.last:
        return
    try:
        require_learned(method, state, first, fleet.problems)
    except FruitlessError as error:
        write_summary(settings, method, state, store, fleet, failed=str(error))
        raise


def require_bundles(summary: Mapping[str, Any]) -> None:
    """Log which devices have no bundle at the end of a run, and why.

    Raises:
        FruitlessError: none has one.
    """
    why = without_bundle_because(summary)
    if why:
        log.error("event=without_bundle devices=%s reason=%r", list(why), problems.told(why))
    if not summary["installed"]:
        raise FruitlessError("no device has a bundle" + (f": {problems.told(why)}" if why else ""))


def finished(settings: CoordinatorSettings, method: Method[Any], state: State) -> dict[str, Any] | None:
    """The summary of a run that an earlier process finished; None: there is work left.

    Raises:
        FruitlessError: nothing was learned, and the run has no more rounds than then.
    """
    with contextlib.suppress(ConfigError, StoreError):
        summary = read_summary(settings.home)
        if summary["rounds"] == method.last:
            if summary.get("failed") and state.round == method.last:
                go_on = f"to go on with this federation, start it with more rounds than {method.last} (--rounds)"
                raise FruitlessError(f"{summary['failed']}; {go_on}")
            if summary.get("ended") and method.done(state) and not (settings.late_joiners or settings.readmit):
                return summary
    return None


def happened(event: str, fields: Mapping[str, Any], number: int) -> Event:
    """An event as stored; `number`: of the round, if the event does not give it."""
    if event == "round_done":
        last = fields["history"][-1] if fields["history"] else {"accuracy": None}
        fields = {"accuracy": last["accuracy"], **{n: fields[n] for n in ("bytes_up", "bytes_down", "wall_s")}}
    rest = {name: value for name, value in fields.items() if name not in {"round", "device"}}
    return Event(
        at=time.time(), round=fields.get("round", number), name=event, device=fields.get("device", ""), fields=rest
    )


async def permitted(number: int, store: Store, fleet: MqttFleet, observe: Observer) -> Wishes:
    """Wait until round `number` may begin (`coordinator.store.requests`); a round begun before a restart always may."""
    if store.snapshot(number) is not None:
        wishes = wishes_in(store)
    else:
        waits = False
        while (wishes := wishes_in(store)).paused and not wishes.steps:
            if not waits:
                observe("paused", {"round": number})
            waits = True
            await fleet.rest(LOOK_S)
        if waits:
            observe("resumed", {"round": number})
        wishes = at_round(store, number)
    fleet.retired = frozenset(wishes.retired)
    return wishes


def anew(method: Method[Any], state: State, observe: Observer) -> State:
    """The state with clustering restarted, if the method can do that now."""
    found = method.recluster(state)
    observe("recluster" if found else "recluster_refused", {"reason": "" if found else NOT_ANEW})
    return found or state


async def help_out(settings: CoordinatorSettings, task: TaskSpec, store: Store) -> None:
    """Serve as an intake or a model server until stopped.

    Raises:
        ConfigError: no such federation yet.
        StoreError: the store cannot be read or written.
        TransportError: the broker refused us for good.
    """
    tune_malloc(large=True)
    raise_open_files()
    broker, federation = settings.at(settings.broker), settings.federation
    layout = begun(store, settings.home, task, settings.blobs)
    with own_folder(settings.home) as folder:
        helper: Intake | BlobServer
        if settings.role == "blobs":
            helper = BlobServer(broker, store, folder, federation=federation)
        else:
            steps = method_class(settings.method).steps
            helper = Intake(broker, store, folder, federation=federation, task=task, layout=layout, steps=steps)
        await helper.serve()


def raise_open_files() -> None:
    """Raise the limit of open files as far as permitted: each update being fetched takes two."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve_late_joiners(
    settings: CoordinatorSettings, method: Method[Any], state: Any, store: Store, fleet: MqttFleet, observe: Observer
) -> AsyncIterator[Any]:
    """After the last round, run one more whenever devices without a bundle appear; yields the states, endlessly.

    A device that declined or failed is asked again after a restart of its agent or of this coordinator.
    """
    tried: dict[str, str] = {}
    while True:
        began = time.monotonic()
        number = state.round + 1
        await fleet.admit(number, tried, state.installed)
        observe("round_begun", {"round": number, "devices": len(fleet.devices()) + len(fleet.inference_only())})
        state = await method.serve_late_joiners(state, beyond_relays(settings, state, fleet))
        state = msgspec.structs.replace(state, round=number)
        await commit(store, fleet, number, state, time.monotonic() - began, settings.keep_rounds)
        yield state
        tried |= {device.id: device.incarnation for device in (*fleet.devices(), *fleet.inference_only())}


def beyond_relays(settings: CoordinatorSettings, state: State, fleet: MqttFleet) -> RelayFleet:
    """The fleet as a method sees it in the next round."""
    return RelayFleet(fleet, layout=state.layout, seed=settings.seed, named=blobs_of(state))


async def commit(store: Store, fleet: MqttFleet, number: int, state: State, seconds: float, keep: int) -> None:
    """End the round: commit state, traffic and time in one transaction, then delete what is no longer needed.

    Raises:
        ConfigError: the state cannot be stored, or in the first rounds, not be read again.
    """
    if number <= PROVEN:
        reloaded(state)
    counted = {**fleet.take_counts(), "milliseconds": round(1000 * seconds)}
    await asyncio.to_thread(store.commit_round, number, dump(state), time.time(), counted, keep=keep)
    await fleet.look()
    spare_s = SPARE_S if fleet.busy() else 0.0
    needed = {ref.digest for ref in blobs_of(state)} | fleet.needed()
    await asyncio.to_thread(store.keep_only, needed, spare_s=spare_s)


def write_summary(
    settings: CoordinatorSettings,
    method: Method[Any],
    state: State,
    store: Store,
    fleet: MqttFleet,
    *,
    ended: bool = False,
    failed: str = "",
) -> dict[str, Any]:
    """Write HOME/summary.json: the method's summary, and the counters of transport and store.

    `ended`: the coordinator is about to end. `failed`: why the run ends before its devices get bundles.
    """
    counters, wishes = store.counters(), wishes_in(store)
    summary = {
        "federation": settings.federation,
        "seed": settings.seed,
        "privacy": method.settings.protection.promise(),
        **method.summary(state),
        "bytes_up": counters.get("bytes_up", 0),
        "bytes_down": counters.get("bytes_down", 0),
        "wall_s": counters.get("milliseconds", 0) / 1000,
        "round_s": [round(seconds, 3) for seconds in store.round_seconds().values()],
        "devices": dict(sorted((fleet.registry.presence() | fleet.registry.behind_relays()).items())),
        "without_bundle": without_bundle(method, state, store),
        "clocks": fleet.registry.wrong_clocks(),
        "expiring": expiring(settings),
        "quarantined": msgspec.to_builtins(fleet.quarantined),
        "at": time.time(),
        "fleet": fleet.registry.described(),
        "waiting": fleet.waiting,
        "paused": wishes.paused and not wishes.steps,
        "retired": wishes.retired,
        "problems": msgspec.to_builtins(dict(sorted(fleet.problems.items()))),
        "refused": {name.removeprefix("refused."): n for name, n in counters.items() if name.startswith("refused.")},
        "last_refused": fleet.last_refused,
        "second": fleet.second,
        "ended": ended,
        "failed": failed,
    }
    write_atomically(settings.home / "summary.json", json.dumps(summary, indent=1).encode())
    return summary


def expiring(settings: CoordinatorSettings) -> list[str]:
    """Warnings of certificates that must be renewed in the coming months."""
    named = settings.by_files()
    if named.ca_file is None or named.cert_file is None:
        return []
    from fedge.identity.certificates import now, warnings_of

    try:
        return warnings_of(Path(named.ca_file), Path(named.cert_file), now())
    except ConfigError as error:  # it was valid at the start, and the connection stands
        return [str(error)]


@contextlib.asynccontextmanager
async def warning_daily(settings: CoordinatorSettings) -> AsyncIterator[None]:
    """Log once a day which certificates are about to expire."""

    async def warn() -> None:
        while True:
            for text in expiring(settings):
                log.warning("event=expires detail=%r", text)
            await asyncio.sleep(WARN_S)

    running = asyncio.create_task(warn())
    try:
        yield
    finally:
        running.cancel()


def without_bundle(method: Method[Any], state: State, store: Store) -> list[str]:
    """After the end: devices that trained or were in the last round and have no bundle, by ascending id."""
    if not method.done(state):
        return []
    there = {device.id for device in store.snapshot(state.round) or ()}
    return sorted((there | state.participations.keys()) - state.installed.keys())
