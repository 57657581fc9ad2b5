"""Every decoder of bytes from elsewhere, as a function that takes any bytes.

Each either returns, having seen that what it read is sound, or raises a `FedgeError`. Anything else is a defect:
another exception, a failed assertion, a hang, a gigabyte of memory. `python -m tests.fuzz` searches for such bytes, and
`test_corpus.py` replays those that it found worth keeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import ssl
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
import zstandard
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from msgspec.structs import replace

from coordinator.rollout.folder import Folder
from coordinator.store import lease
from coordinator.store.store import LEASE, Store
from deploy.serving import protocol
from deploy.serving.endpoints import ServedModel
from deploy.serving.feedback import Feedback
from deploy.serving.server import Server
from deploy.updates import link
from deploy.updates.answering import ActiveBundle
from deploy.updates.coverage import read_level
from deploy.updates.drift import Alarm
from deploy.updates.examination import Limits
from deploy.updates.introduction import Introduction
from deploy.updates.slots import Slots, read_state
from deploy.updates.trust import Trust, install_root
from edge_agent.agent.outbox import Outbox
from edge_agent.agent.settings import AgentSettings
from edge_agent.learning import profile
from edge_agent.privacy.dp_ledger import Ledger
from edge_agent.samples import SampleStore, rules
from edge_agent.samples.database import save_fact
from edge_agent.steps.descriptions import describe_labels
from fedge.bundle import campaign, graph_reader
from fedge.bundle import manifest as bundle
from fedge.data.images import read_sensitive_flags, read_split_numbers
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import FedgeError, ProtocolError
from fedge.identity.certificates import make_key, read_request
from fedge.identity.names import Role
from fedge.membership.kit import Kit, seal_kit, unseal_kit
from fedge.membership.signed_messages import Envelope, Signed
from fedge.privacy.egress import FILE, PRIVACY_LEDGER, read_rules
from fedge.privacy.masked_sums import (
    Member,
    Roster,
    read_positions,
    read_roster,
    read_signatures,
    write_positions,
    write_roster,
    write_signatures,
)
from fedge.settings import resolve
from fedge.steps.contract import decode_action, decode_result, encode_body, load_installed_steps
from fedge.system.files import BlobFolder, find_highest_release, read_lasting
from fedge.tasks import load_task
from fedge.tasks.arrays import get_class_names, read_arrays
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, TensorInfo, from_bytes, to_bytes
from fedge.wire import messages
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import Announcement, BlobRef, Health, Order, Outcome, Report, Rollout, RolloutState
from fedge.wire.streams import open_connection
from fedge.wire.transfer.partial_blob import PartialBlob
from fedge.wire.transfer.receiving import Receiving
from fedge.wire.transfer.sending import Sending
from tests.deploy.bundles import GOLDEN, source
from tests.deploy.repository import Simulator
from tests.deploy.served import body, golden, served
from tests.support.identities import Authority

KINDS: Final = get_args(messages.Message)
LAYOUT: Final = Layout(
    tensors=(
        TensorInfo(name="w", shape=(3, 4), kind="param"),
        TensorInfo(name="none", shape=(0,), kind="param"),
        TensorInfo(name="mean", shape=(4,), kind="buffer"),
        TensorInfo(name="n", shape=(), kind="counter"),
    )
)
GREY: Final = TaskSpec(
    name="toy",
    classes=("a", "b"),
    input_shape=(1, 4, 4),
    model="mlp",
    preprocessing=Preprocessing(scale=255.0, mean=0.5, std=0.5, image_mode="L"),
)
ORDER: Final = Order(
    id="o", device_id="d", run="r", round=1, label="l", seed=1, task_fingerprint="t", left_s=1.0, step="s", body=b""
)
IMAGES: Final = ("a/1.png", "a/2.png", "b/1.png")


@cache
def folder() -> Path:
    """Of this process; where decoders of files find them. In memory, where there is such a place."""
    memory = Path("/dev/shm")
    _folders.append(tempfile.TemporaryDirectory(prefix="fedge-fuzz-", dir=memory if memory.is_dir() else None))
    return Path(_folders[0].name)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
_open_now = contextlib.ExitStack()  # as long as the process


def written(name: str, data: bytes) -> Path:
    """A file that holds these bytes."""
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def chosen(data: bytes, among: int) -> tuple[int, bytes]:
    """The first byte says which of several decoders gets the rest."""
    return (data[0] % among if data else 0), data[1:]


def all_of(*decoders: Callable[[], object]) -> None:
    """Call each, whatever the others refuse."""
    for decoder in decoders:
        with contextlib.suppress(FedgeError):
            decoder()


# ----------------------------------------------------------------------------------------------------------- wire


def message(data: bytes) -> None:
    """What was read can be sent, and is the same again."""
    number, payload = chosen(data, len(KINDS))
    kind: Any = KINDS[number]
    found = messages.decode_message(payload, kind)
    assert isinstance(found, kind)
    with contextlib.suppress(ValueError):  # it may be larger now: fields that had been left out
        assert messages.decode_message(messages.encode_message(found), kind) == found


def step(data: bytes) -> None:
    """The action and the result of each step."""
    known = load_installed_steps()
    number, payload = chosen(data, len(known))
    name = sorted(known)[number]
    kind: Any = known[name]
    order = msgspec.structs.replace(ORDER, step=name, version=kind.VERSION, body=payload)

    def action() -> None:
        found: Any = decode_action(order, known)
        assert decode_action(msgspec.structs.replace(order, body=encode_body(found)), known) == found

    def result() -> None:
        report = Report(order_id="o", device_id="d", seconds=0.0, outcome=Outcome.DONE, body=payload)
        found = decode_result(report, kind)
        assert decode_result(msgspec.structs.replace(report, body=encode_body(found)), kind) == found

    all_of(action, result)


def safetensors(data: bytes) -> None:
    """Tensors that were read are written as they were read."""
    found = from_bytes(data)
    again = from_bytes(to_bytes(found))
    assert all(array.tobytes() == again[name].tobytes() for name, array in found.items())


def blob(data: bytes) -> None:
    """A model of the layout, finite in each number; its norms are those of what was read."""
    number, payload = chosen(data, 2 * len(Codec))
    kind = list(Codec)[number % len(Codec)]
    if number >= len(Codec):  # so that the search need not find what zstd makes of safetensors
        payload = zstandard.ZstdCompressor().compress(payload)
    found = codecs.decode(payload, kind, LAYOUT)
    assert np.isfinite(found.params).all()
    assert np.isfinite(found.buffers).all()
    assert np.allclose(codecs.check_blob(payload, kind, LAYOUT), codecs.compute_norms(found), rtol=1e-4, atol=1e-18)


def difference(data: bytes) -> None:
    """What leads from one model to the next: tensors like those of the first."""
    number, payload = chosen(data, 2)
    base = {
        info.name: np.zeros(info.shape, np.int64 if info.kind == "counter" else np.float32) for info in LAYOUT.tensors
    }
    change = zstandard.ZstdCompressor().compress(payload) if number else payload
    found = from_bytes(b"".join(map(bytes, codecs.apply_differences(io.BytesIO(to_bytes(base)), [change]))))
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {n: (a.shape, a.dtype) for n, a in base.items()}


def cohort(data: bytes) -> None:
    """Who makes a masked sum: what was read is the same again, and each device is a neighbour of its neighbours."""
    found = read_roster(data)
    assert read_roster(write_roster(found.members)).members == found.members
    for k in range(len(found.members)):
        assert all(k in found.get_neighbours(peer) for peer in found.get_neighbours(k))


def agreement(data: bytes) -> None:
    """What a cohort agrees on: positions are read from one form alone; signatures are the same again, here nobody's."""
    with contextlib.suppress(ProtocolError):
        assert write_positions(read_positions(data, _six())) == data
    found = read_signatures(data)
    assert read_signatures(write_signatures(found)) == found
    assert not _six().find_signers(b"statement", found)


@cache
def _six() -> Roster:
    keys = iter(range(18))
    members = [
        Member(id=f"d{k}", **{name: next(keys).to_bytes(32) for name in ("encryption", "masking", "signing")})
        for k in range(6)
    ]
    return read_roster(write_roster(members))


def transfer(data: bytes) -> None:
    """Chunks and Wants in any order: what is missing here and what has arrived there are the whole."""
    size = 1 << 16
    receiving, sending, have = Receiving(size), Sending(), np.zeros(size, np.bool_)
    for at in range(0, len(data) - 4, 5):
        what, low, high = data[at], *(int.from_bytes(data[at + k : at + k + 2], "little") for k in (1, 3))
        match what % 6:
            case 0:
                with contextlib.suppress(ProtocolError):
                    for start, end in receiving.record_arrived(low, high):
                        assert not have[start:end].any()
                        have[start:end] = True
                        receiving.record_stored(start, end)
            case 1:
                assert all(not have[start:end].any() for start, end in receiving.request_ranges(high))
            case 2:
                receiving.record_stalled()
            case 3:
                sending.add_want(("d", "c"), [(low, max(low + 1, high))], ("device", what % 3) if what & 64 else None)
            case 4:
                chunk = sending.take_next(high + 1)
                assert chunk is None or 0 < chunk[2] - chunk[1] <= high + 1
            case _:
                sending.release(("d", "c"))
    assert size - sum(end - start for start, end in receiving.missing) == int(have.sum())


def record(data: bytes) -> None:
    """What an earlier receiver left of a blob: the list of its ranges."""
    ref = BlobRef(digest="0" * 64, size_bytes=100)
    place = folder() / "parts"
    store = BlobFolder(place)
    (place / f"{ref.digest}.part").write_bytes(b"x" * 100)
    (place / f"{ref.digest}.ranges").write_bytes(data)
    part = PartialBlob(store, ref, durable=False)
    try:
        assert all(0 <= start < end <= 100 for start, end in part.have)
        Receiving(100, part.have)
        part.verify_and_keep()
    finally:
        part.close()


# ---------------------------------------------------------------------------------------------------------- files


def npz(data: bytes) -> None:
    """A device's samples: as a file, and as one member of an archive, whose checksum no search would find."""
    number, payload = chosen(data, 1 + len(NAMES))
    file = written("data.npz", payload)
    if number:
        whole = {name: np.zeros((4, 2)) if name == "x" else np.zeros(4, np.int64) for name in ("x", "y")}
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in whole.items():
                if name != NAMES[number - 1]:
                    np.lib.format.write_array(made := io.BytesIO(), array)
                    archive.writestr(f"{name}.npy", made.getvalue())
            archive.writestr(f"{NAMES[number - 1]}.npy", payload)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read_arrays(file)
        assert found["x"].ndim >= 2
        assert found["y"].min() >= 0
        assert all(name.isprintable() for name in get_class_names(found, file))


NAMES: Final = ("x", "y", "split", "sensitive", "user", "classes")


def config(data: bytes) -> None:
    """A configuration file."""
    resolve(AgentSettings, "agent", written("fedge.toml", data), {})


def manifest(data: bytes) -> None:
    """The manifest of a bundle; what was read is the same when it is written and read again."""
    found = bundle.decode_manifest(data)
    assert bundle.decode_manifest(bundle.encode_manifest(found)) == found


def graph(data: bytes) -> None:
    """A graph in ONNX's format."""
    with contextlib.suppress(ValueError):
        graph_reader.explain_unbounded(memoryview(data))
        graph_reader.find_largest_int8(memoryview(data))


def metadata(data: bytes) -> None:
    """One file of a signed repository, a root of trust, or what the device has kept of them, is something else."""
    simulator = _repository()
    number, payload = chosen(data, len(SENT) + len(KEPT) + 1)
    home = folder() / "device"
    if number == len(SENT) + len(KEPT):
        install_root(home, payload)
    install_root(home, simulator.files["1.root.json"])
    files = dict(simulator.files)
    if number < len(SENT):
        files[SENT[number]] = payload
    else:
        written(f"device/trust/{KEPT[number - len(SENT)]}", payload)
    all_of(
        lambda: Trust(home).verify_manifest(files, "5/manifest.json"),
        lambda: Trust(home).verify_rollout(_announced(), "f"),
    )


SENT: Final = ("2.root.json", "timestamp.json", "1.snapshot.json", "1.targets.json")
KEPT: Final = (
    "root.json",
    "timestamp.json",
    "snapshot.json",
    "targets.json",
    "announced.json",
    "root_history/1.root.json",
)


@cache
def _announced() -> Announcement:
    rollout = Rollout(id="r", state=RolloutState.RUNNING, target="5/manifest.json", release=5, share=1.0, metadata={})
    return _repository().announce(rollout, "f")


@cache
def _repository() -> Simulator:
    return Simulator()


def credentials(data: bytes) -> None:
    """A start-up kit, also with any certificate in it, and a request for a certificate."""
    number, payload = chosen(data, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of serial numbers that will be refused one day
        match number:
            case 0:
                unseal_kit(payload)
            case 1:
                text = ssl.DER_cert_to_PEM_cert(payload)
                inner = Kit(
                    federation="f", id="cam0", broker="server:8883", ca=text[:10_000], certificate=text[:10_000]
                )
                unseal_kit(seal_kit(inner, _key()))
            case 2:
                read_request(payload)
            case _:
                read_request(ssl.DER_cert_to_PEM_cert(payload).replace(" CERTIFICATE", " CERTIFICATE REQUEST").encode())


@cache
def _key() -> EllipticCurvePrivateKey:
    return make_key()


def sealed(data: bytes) -> None:
    """What comes in where messages are signed: an envelope, any in which only one part is wrong, a list of revoked."""
    number, payload = chosen(data, 5)
    device, ours = _speakers()
    genuine = msgspec.msgpack.decode(device.seal("t", b"said"), type=Envelope)
    match number:
        case 0:
            ours.open("t", payload, Role.DEVICE)
        case 1:
            ours.open("t", msgspec.msgpack.encode(replace(genuine, certificate=payload)), Role.DEVICE)
        case 2:
            changed = replace(genuine, signature=payload)
            ours.open("t", msgspec.msgpack.encode(changed), Role.DEVICE)
            raise AssertionError("a signature that nobody made")
        case 3:
            assert ours.open("t", device.seal("t", payload), Role.DEVICE) == payload
        case _:
            ours.authority.accept_revocations(payload)


@cache
def _speakers() -> tuple[Signed, Signed]:
    authority = Authority(folder() / "authority", "test")
    files = authority.issue("cam1"), authority.issue("coordinator", Role.COORDINATOR)
    return Signed(BrokerSettings("x", **files[0]), None), Signed(BrokerSettings("x", **files[1]), None)


def state(data: bytes) -> None:
    """Files that a device or a coordinator wrote itself, on a disk that has changed them."""
    home = folder() / "state"
    outbox = ("outbox/acked", "outbox/orders/o")
    of_device = ("slots.json", "outcome.json", "drift.json", "coverage.json", "introduced.json", "noise.json")
    for name in (*of_device, "bundles/2/campaign.json", "rollout/state.json", PRIVACY_LEDGER, *outbox):
        written(f"state/{name}", data)
    written("state/outbox/version", b"2")
    written("state/outbox/reports/o", data)
    all_of(
        lambda: read_state(home),
        lambda: Slots(home),
        lambda: find_highest_release(home),
        lambda: link._read_json(home / "outcome.json", link.Outcome),
        lambda: link._read_json(home / link.DRIFT, Alarm),
        lambda: read_level(home),
        lambda: Introduction(home, "cam1", waits=True).list_held(1),
        lambda: Folder(home).read(),
        lambda: read_lasting(home / "noise.json", msgspec.json.Decoder(profile.Noise).decode),
        lambda: read_lasting(home / "noise.json", msgspec.json.Decoder(describe_labels.StoredAnswer).decode),
        lambda: Ledger(home),
        lambda: Outbox(home / "outbox").close(),
    )


def lasting(data: bytes) -> None:
    """Texts in the tables of a coordinator and of a device's samples, on a disk that has changed them."""
    text, (tables, samples) = data.decode(errors="replace"), _tables()
    tables.put_value(LEASE, text)
    with samples.database.write() as db:
        save_fact(db, "task", text)
    all_of(
        lambda: lease.renew_lease(tables, lease.make_lease(folder())),
        lambda: lease.take_lease(tables, lease.Lease(incarnation="i", machine="m", where="w", since=0.0)),
        lambda: samples._settle_task(None),
    )


@cache
def _tables() -> tuple[Store, SampleStore]:
    lease.LAPSED_S = lease.LOOK_S = 0.0  # type: ignore[misc]
    opened = Store(folder() / "coordinator"), SampleStore(folder() / "kept")
    for each in opened:
        _open_now.callback(each.close)
    return opened


def owner(data: bytes) -> None:
    """Files that a person brings: a task, a split, marks of images, what may leave, which samples are kept."""
    for name in ("task.json", "split.json", "sensitive.txt", FILE, rules.FILE):
        written(f"owner/{name}", data)
    home = folder() / "owner"
    all_of(
        lambda: load_task(str(home / "task.json")),
        lambda: read_split_numbers(home, IMAGES),
        lambda: read_sensitive_flags(home, IMAGES),
        lambda: read_rules(home, None, None),
        lambda: _read_samples_rules(home),
    )


def _read_samples_rules(home: Path) -> None:
    found = rules.read_rules(home)
    rules.require_classes(found, GREY.classes)
    assert found.max_bytes >= 0
    if found.predicate is None:  # a name in the file is looked up, never called
        found.is_sensitive(np.zeros(1), ["a"], "folder:porch/1.png")


def introduction(data: bytes) -> None:
    """What a coordinator announces, after what the device kept of an announcement before; then what the device says."""
    number, payload = chosen(data, 3)
    home, mark = folder() / "introduced", campaign.make_campaign_files(1)[campaign.FILE]
    written("introduced/introduced.json", payload if number == 0 else b"{}")
    written("introduced/bundles/2/campaign.json", payload if number == 1 else mark)
    found = Introduction(home, "cam1", waits=True)
    if number == 2:
        found.announced = messages.decode_message(payload, Rollout)
    assert found.list_held(1) <= {home / "bundles" / "2"}
    found.adopt_running(2, "0" * 64)
    health = found.make_health(1, "0" * 64, "worse", on_trial=False, at=0.0)
    assert messages.decode_message(messages.encode_message(health), Health) == health


# ---------------------------------------------------------------------------------------------------------- server


def request(data: bytes) -> None:
    """An inference request: the length of its JSON object, and itself."""
    length, payload = int.from_bytes(data[:2], "little"), data[2:]
    found = protocol.decode(payload, length or None, ("class", "probabilities"))
    if isinstance(found.x, tuple):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(protocol.load_images(GREY, found.x)) == len(found.x)
    else:
        assert np.isfinite(found.x).all()


def feedback(data: bytes) -> None:
    """Labels over HTTP or MQTT, of samples or of a request before: the length of their JSON object, and themselves."""
    length, payload = int.from_bytes(data[:2], "little"), data[2:]
    loop, model = _learning()
    answer = loop.run_until_complete(model.learn(payload, length or None))
    assert 0 <= msgspec.json.decode(answer.body)["stored"] <= msgspec.json.decode(answer.body)["labels"]


@cache
def _learning() -> tuple[asyncio.AbstractEventLoop, ServedModel]:
    """A device that remembers the request `known`."""
    loop, home = asyncio.new_event_loop(), folder() / "learning"
    slots = Slots(home)
    slots.stage(*source(GOLDEN))
    slots.switch()
    slots.confirm()

    async def start() -> ServedModel:
        answering = ActiveBundle(Slots(home), Limits(probation_predictions=10**9))
        stack = contextlib.AsyncExitStack()
        store = stack.enter_context(SampleStore(home, answering.runtime.task))
        model: ServedModel = await stack.enter_async_context(served(answering))
        model.feedback = Feedback(answering, store)
        await model.infer(body(golden()["x"][:1], id="known"))
        _open.append(stack)
        return model

    return loop, loop.run_until_complete(start())


def http(data: bytes) -> None:
    """Anything at all on the port of `fedge serve`: it answers or hangs up, and answers the next one."""
    loop, url = _serving()
    loop.run_until_complete(_ask(url, data))


async def _ask(address: tuple[str, int], data: bytes) -> None:
    async with open_connection(*address) as (reader, writer):
        writer.write(data)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):  # or it waits for more
                answer = await reader.read(MAX_ANSWER)
                assert not answer or answer.startswith(b"HTTP/"), answer[:100]
                assert b" 500 " not in answer[:13], answer[:300]
    async with open_connection(*address) as (reader, writer):
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")


PATIENCE_S: Final = 0.02
MAX_ANSWER: Final = 1 << 16


@cache
def _serving() -> tuple[asyncio.AbstractEventLoop, tuple[str, int]]:
    loop = asyncio.new_event_loop()

    async def start() -> tuple[str, int]:
        stack = contextlib.AsyncExitStack()
        model = await stack.enter_async_context(served())
        server = await stack.enter_async_context(Server([model], port=0))
        _open.append(stack)
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    return loop, loop.run_until_complete(start())


_open: list[contextlib.AsyncExitStack] = []

ALL: Final = (
    *(message, step, safetensors, blob, difference, cohort, agreement, transfer, record),
    *(npz, config, manifest, graph, metadata, credentials, sealed, state, lasting, owner),
    *(introduction, request, feedback, http),
)
DECODERS: Final[Mapping[str, Callable[[bytes], None]]] = {function.__name__: function for function in ALL}
