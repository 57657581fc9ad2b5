"""Receivers and senders over real brokers, and after kill -9."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fedge.errors import ProtocolError, StoreError
from fedge.system.files import BlobFolder, compute_digest
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.connection.packet_limits import LARGE_CHUNK
from fedge.wire.connection.window import Publish, Window
from fedge.wire.messages import BlobRef, Want, decode_message
from fedge.wire.topics import Topics
from fedge.wire.transfer.partial_blob import PartialBlob
from fedge.wire.transfer.receiver import PART_KEPT_S, Receiver
from fedge.wire.transfer.receiving import ASK_BYTES
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import Transport
from tests.chaos.network import Network
from tests.deploy.faults import no_room
from tests.fedge.wire.transfer.test_partial_blob import a_ref
from tests.support.broker import local_broker, open_broker, transport
from tests.support.waiting import until

TOPICS = Topics("test")
WAIT_S = 300.0


async def test_a_cancelled_fetch_leaves_the_loop_free_while_its_bytes_reach_the_disk(tmp_path, forced):
    data = os.urandom(1000)
    folder = BlobFolder(tmp_path)
    part = PartialBlob(folder, a_ref(data), durable=True)
    part.write(0, data, [(0, 1000)])
    part.close()
    begun, reached, in_time = threading.Event(), threading.Event(), []

    def slowly():
        begun.set()
        in_time.append(reached.wait(5))

    forced.before = slowly
    receiver = Receiver(Transport(BrokerSettings("localhost"), "agent"), folder)
    fetching = asyncio.create_task(receiver.fetch(a_ref(data), chunks="blobs/+", wants="wants", device_id="agent"))
    assert await asyncio.to_thread(begun.wait, 30)
    fetching.cancel()
    asyncio.get_running_loop().call_later(0.05, reached.set)
    await asyncio.gather(fetching, return_exceptions=True)
    assert in_time[0]
    assert fetching.cancelled()


@pytest.mark.parametrize("durable", [True, False])
async def test_only_what_must_survive_a_power_cut_is_synced(broker, tmp_path, forced, durable):
    data = os.urandom(100_000)
    up, down = BlobFolder(tmp_path / "up"), BlobFolder(tmp_path / "down")
    up.put(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, down, durable=durable)
    synced: list[bool] = []
    forced.before = lambda: synced.append(compute_digest(data) in down)
    async with serving(broker, up), link:
        await fetch(receiver, a_ref(data))
    assert synced == ([False, True] if durable else [])  # the bytes before the rename, the folder after it


async def test_damage_of_a_power_cut_is_found_when_a_receiver_starts(broker, tmp_path, caplog):
    folder = BlobFolder(tmp_path)
    good, bad = folder.put(b"good"), folder.put(b"bad")
    folder.get_path(bad).write_bytes(b"bax")
    Receiver(transport(broker, "agent"), folder, durable=False)
    assert list(folder) == [good]
    assert f"event=damaged_blob digest={bad}" in caplog.text


async def test_old_partial_files_are_removed(broker, tmp_path):
    old, young = tmp_path / f"{'0' * 64}.part", tmp_path / f"{'1' * 64}.part"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (0, old.stat().st_mtime - PART_KEPT_S - 60))
    Receiver(transport(broker, "agent"), BlobFolder(tmp_path))
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == [young.name]


@asynccontextmanager
async def serving(broker, folder, *, name="sender", damage=None, lose=()) -> AsyncIterator[list[tuple[int, int]]]:
    """A sender of `folder`; yields the list of wanted ranges. `lose`: indexes of Wants that it overhears."""
    wanted: list[tuple[int, int]] = []
    n_wants = 0
    link = transport(broker, name)
    async with link, Sender(link, damage or folder.get_path) as sender:

        async def on_want(message: Inbound) -> None:
            nonlocal n_wants
            n_wants += 1
            want = decode_message(message.payload, Want)
            if n_wants - 1 in lose:
                return
            wanted.extend(want.ranges)
            sender.add_want(want.digest, want.ranges, chunks=TOPICS.make_model_topic(want.digest))

        await link.subscribe(TOPICS.make_agent_topic("+", "wants"), on_want)
        yield wanted


async def fetch(receiver: Receiver, ref: BlobRef, name: str = "agent"):
    async with asyncio.timeout(WAIT_S):
        return await receiver.fetch(
            ref,
            chunks=TOPICS.make_model_topic(ref.digest),
            wants=TOPICS.make_agent_topic(name, "wants"),
            device_id=name,
        )


@pytest.mark.parametrize("size", [1, 64 * 1024, 3_000_000])
async def test_fetch(broker, tmp_path, size):
    data = os.urandom(size)
    up, down = BlobFolder(tmp_path / "up"), BlobFolder(tmp_path / "down")
    up.put(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, down)
    async with serving(broker, up), link:
        path = await fetch(receiver, a_ref(data))
        assert path.read_bytes() == data
        assert await fetch(receiver, a_ref(data)) == path  # there already: nobody is asked
    assert [p.name for p in (tmp_path / "down").iterdir()] == [compute_digest(data)]


@pytest.fixture
def packets_of(monkeypatch, mosquitto_program):
    """Called with the largest packet of the brokers that are started."""
    return lambda size_bytes: monkeypatch.setattr("fedge.membership.broker_configuration.MAX_PACKET_BYTES", size_bytes)


async def test_a_broker_of_small_packets_is_asked_for_fewer_ranges(tmp_path, packets_of):
    packets_of(4096)
    data = os.urandom(40_000)
    up, down = BlobFolder(tmp_path / "up"), BlobFolder(tmp_path / "down")
    ref = a_ref(data)
    up.put(data)
    part = PartialBlob(down, ref, durable=False)  # what came so far has 200 gaps
    for i in range(0, len(data), 200):
        part.write(i, data[i : i + 190], [(i, i + 190)])
    part.close()
    async with local_broker("mosquitto", tmp_path) as broker:
        link = transport(broker, "agent")
        receiver = Receiver(link, down)
        async with serving(broker, up), link:
            assert (await fetch(receiver, ref)).read_bytes() == data


@pytest.mark.parametrize("limit", ["max_packet_size 4200", "message_size_limit 4200"])
async def test_small_chunks_on_a_slow_link_are_no_stall(mosquitto_program, tmp_path, caplog, limit):
    """In 3 s come 45,000 bytes. A fetch would otherwise ask again for, and be sent again, what is on its way to it."""
    caplog.set_level(logging.INFO)
    up, data = BlobFolder(tmp_path / "up"), os.urandom(100_000)
    ref = BlobRef(digest=up.put(data), size_bytes=len(data))
    async with open_broker(tmp_path, limit) as broker, Network(broker.host, broker.port) as network:
        network.bytes_per_s = 15_000.0
        link = Transport(BrokerSettings(network.host, network.port), "agent")
        receiver = Receiver(link, BlobFolder(tmp_path / "down"))
        async with serving(broker, up) as wanted, link:
            assert (await fetch(receiver, ref)).read_bytes() == data
    assert wanted == [(0, len(data))]
    assert "event=stalled" not in caplog.text


async def test_one_chunk_at_a_time_finds_out_what_a_broker_takes(mosquitto_program, tmp_path, monkeypatch):
    """On a slow link a window full of chunks that are all refused takes minutes."""
    sizes: list[int] = []

    class Noting(Window):
        def record_sent(self, packet_id: int, publish: Publish) -> None:
            super().record_sent(packet_id, publish)
            sizes.extend([len(publish.payload)] if publish.chunk else [])

    monkeypatch.setattr("fedge.wire.transport.Window", Noting)
    up, data = BlobFolder(tmp_path / "up"), os.urandom(600_000)
    ref = BlobRef(digest=up.put(data), size_bytes=len(data))
    async with open_broker(tmp_path, "message_size_limit 10000") as broker:
        link = transport(broker, "agent")
        receiver = Receiver(link, BlobFolder(tmp_path / "down"))
        async with serving(broker, up), link:
            assert (await fetch(receiver, ref)).read_bytes() == data
    assert sizes[:4] == [64 * 1024, 32 * 1024, 16 * 1024, 8 * 1024]
    assert max(sizes[4:]) == 8 * 1024


async def test_chunks_become_as_small_as_a_broker_takes_that_announces_no_limit(mosquitto_program, tmp_path, caplog):
    """Mosquitto announces max_packet_size alone: of this one nobody knows until a chunk was too large."""
    up, data = BlobFolder(tmp_path / "up"), os.urandom(300_000)
    ref = BlobRef(digest=up.put(data), size_bytes=len(data))
    async with open_broker(tmp_path, "message_size_limit 10000") as broker:
        link = transport(broker, "agent")
        receiver = Receiver(link, BlobFolder(tmp_path / "down"))
        async with serving(broker, up), link:
            assert (await fetch(receiver, ref)).read_bytes() == data
    assert "event=smaller_chunks" in caplog.text
    limits = re.findall(r"event=smaller_chunks \S+ bytes=(\d+) reason='Packet too large \(0x95\): raise", caplog.text)
    assert int(limits[-1]) < 10_000
    assert "event=disconnected" not in caplog.text


async def test_several_receivers_share_the_chunks(mosquitto, tmp_path):
    data = os.urandom(2_000_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    names = [f"agent{i}" for i in range(8)]
    links = [transport(mosquitto, name) for name in names]
    receivers = [Receiver(link, BlobFolder(tmp_path / name)) for link, name in zip(links, names, strict=True)]
    async with serving(mosquitto, up):
        for link in links:
            await link.__aenter__()
        paths = await asyncio.gather(
            *(fetch(receiver, a_ref(data), name) for receiver, name in zip(receivers, names, strict=True))
        )
        assert all(path.read_bytes() == data for path in paths)
        # 8 copies for each without merging; one, and one or two more for the late, with it.
        assert sum(link.bytes_received for link in links) < 4 * len(links) * len(data)
        for link in links:
            await link.__aexit__(None, None, None)


async def test_chunks_leave_in_order(broker, tmp_path):
    """So that a receiver can hash them as they come."""
    data = os.urandom(6_000_000)
    folder = BlobFolder(tmp_path)
    digest = folder.put(data)
    offsets_seen: list[int] = []
    complete = asyncio.Event()

    async def on_chunk(message: Inbound) -> None:
        offsets_seen.append(int(message.topic.rpartition("/")[2]))
        if sum(len(data[o : o + link.chunk_bytes]) for o in offsets_seen) == len(data):
            complete.set()

    async with transport(broker, "one") as link, Sender(link, folder.get_path) as sender:
        await link.subscribe("c/+", on_chunk)
        sender.add_want(digest, [(0, len(data))], chunks="c/+")
        async with asyncio.timeout(WAIT_S):
            await complete.wait()
    assert offsets_seen == list(range(0, len(data), link.chunk_bytes))


async def test_two_fetches_of_one_blob_share_the_work(broker, tmp_path):
    data = os.urandom(500_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    async with serving(broker, up) as wanted, link:
        await asyncio.gather(fetch(receiver, a_ref(data)), fetch(receiver, a_ref(data)))
        assert wanted == [(0, len(data))]


@pytest.fixture
def stalls_soon(monkeypatch):
    """A fetch asks again, and gives up, sooner than in service."""
    monkeypatch.setattr("fedge.wire.transfer.receiving.STALL_S", 0.5)


@pytest.mark.usefixtures("stalls_soon")
async def test_lost_want_is_asked_again(broker, tmp_path):
    data = os.urandom(100_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    async with serving(broker, up, lose={0, 1}), link:
        assert (await fetch(receiver, a_ref(data))).read_bytes() == data


@pytest.mark.usefixtures("stalls_soon")
async def test_lost_bytes_are_asked_for_again_while_a_stranger_sends_a_few(broker, tmp_path):
    data = os.urandom(300_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    link, stranger = transport(broker, "agent"), transport(broker, "stranger")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))

    async def trickle() -> None:
        for offset in range(1, len(data), 2):
            await stranger.publish(TOPICS.make_model_topic(compute_digest(data), offset), data[offset : offset + 1])
            await asyncio.sleep(0.05)

    async with serving(broker, up, lose={0, 1}), link, stranger:
        sending = asyncio.create_task(trickle())
        assert (await fetch(receiver, a_ref(data))).read_bytes() == data
        sending.cancel()


async def test_a_blob_of_one_chunk_comes_whoever_sends_wrong_ones(mosquitto, tmp_path):
    data = os.urandom(100_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    link, stranger = transport(mosquitto, "agent"), transport(mosquitto, "stranger")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    topic, wrong = TOPICS.make_model_topic(compute_digest(data), 0), asyncio.Event()

    async def flood() -> None:
        await stranger.publish(topic, bytes(100_000), retain=True)
        while True:
            await stranger.publish(topic, os.urandom(100_000))
            wrong.set()

    async with link, stranger:
        sending = asyncio.create_task(flood())
        async with asyncio.timeout(WAIT_S):
            await wrong.wait()
        async with serving(mosquitto, up):
            assert (await fetch(receiver, a_ref(data))).read_bytes() == data
        sending.cancel()


@pytest.mark.parametrize("n_bytes", [1, 50_000], ids=["a byte", "halves"])
async def test_a_blob_of_one_chunk_comes_whoever_sends_wrong_pieces_of_it(mosquitto, tmp_path, n_bytes):
    """Always faster than the sender, who is not heard before 200 of them: pieces that are soon together, and not."""
    data = os.urandom(100_000)
    link, stranger, sender_link = (transport(mosquitto, name) for name in ("agent", "stranger", "sender"))
    receiver, n_sent = Receiver(link, BlobFolder(tmp_path / "down")), 0

    async def flood() -> None:
        nonlocal n_sent
        for offset in itertools.cycle((0, 50_000)):
            await stranger.publish(TOPICS.make_model_topic(compute_digest(data), offset), bytes(n_bytes))
            n_sent += 1

    async with stranger, sender_link, Sender(sender_link, lambda _: data) as sender:

        async def on_want(message: Inbound) -> None:
            before = n_sent
            await until(lambda: n_sent >= before + 200)
            sender.handle_want("agent", message.payload, TOPICS)

        await sender_link.subscribe(TOPICS.make_agent_topic("+", "wants"), on_want)
        sending = asyncio.create_task(flood())
        async with link:
            assert (await fetch(receiver, a_ref(data))).read_bytes() == data
        sending.cancel()


@pytest.mark.usefixtures("stalls_soon")
async def test_pieces_are_taken_where_a_sender_can_send_no_whole(mosquitto_program, tmp_path, caplog):
    """After wrong ones, too: its chunks may be smaller than the receiver knows."""
    data = os.urandom(20_000)

    def source(digest: str) -> bytes:
        return data if "event=digest_mismatch" in caplog.text else bytes(20_000)

    async with open_broker(tmp_path, "message_size_limit 10000") as broker:
        link = transport(broker, "agent")
        receiver = Receiver(link, BlobFolder(tmp_path / "down"))
        async with serving(broker, None, damage=source), link:
            assert (await fetch(receiver, a_ref(data))).read_bytes() == data


async def test_what_a_stranger_has_the_broker_retain_is_no_chunk(mosquitto, tmp_path):
    data = os.urandom(600_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    link, stranger = transport(mosquitto, "agent"), transport(mosquitto, "stranger")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    async with serving(mosquitto, up), link, stranger:
        await stranger.publish(TOPICS.make_model_topic(compute_digest(data), 0), bytes(1000), retain=True)
        await stranger.publish(TOPICS.make_model_topic(compute_digest(data), 599_000), bytes(1000), retain=True)
        assert (await fetch(receiver, a_ref(data))).read_bytes() == data


@pytest.mark.usefixtures("stalls_soon")
async def test_a_stalled_fetch_says_that_it_lacks_what_was_sent(mosquitto, tmp_path):
    """Its Wants bear one number until nothing comes any more, and another one then."""
    data = os.urandom(ASK_BYTES + 1_000_000)
    ref = a_ref(data)
    link, other = transport(mosquitto, "agent"), transport(mosquitto, "sender")
    receiver = Receiver(link, BlobFolder(tmp_path))
    numbers: list[int] = []
    stalled = asyncio.Event()

    async def on_want(message: Inbound) -> None:
        want = decode_message(message.payload, Want)
        numbers.append(want.listening)
        for start, end in want.ranges if len(numbers) == 1 else ():
            for offset in range(start, end, LARGE_CHUNK):
                chunk = data[offset : min(offset + LARGE_CHUNK, end)]
                sending.create_task(other.publish(TOPICS.make_model_topic(ref.digest, offset), chunk))
        if len(set(numbers)) == 2:
            stalled.set()

    async with asyncio.TaskGroup() as sending, link, other:
        await other.subscribe(TOPICS.make_agent_topic("+", "wants"), on_want)
        fetching = asyncio.create_task(fetch(receiver, ref))
        async with asyncio.timeout(WAIT_S):
            await stalled.wait()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
    assert len(numbers) >= 3
    assert len(set(numbers[:-1])) == 1
    assert 0 not in numbers


@pytest.mark.usefixtures("stalls_soon")
async def test_sender_that_comes_late(broker, tmp_path):
    data = os.urandom(100_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    async with link:
        waiting = asyncio.create_task(fetch(receiver, a_ref(data)))
        async with serving(broker, up):
            assert (await waiting).read_bytes() == data


@pytest.mark.usefixtures("stalls_soon")
async def test_cancelled_fetch_is_resumed_not_begun_again(broker, tmp_path):
    """The first sender has only the first megabyte; the second is asked for the rest alone."""
    data = os.urandom(2_000_000)
    up, down = BlobFolder(tmp_path / "up"), BlobFolder(tmp_path / "down")
    up.put(data)
    half = 1_000_000
    link = transport(broker, "agent")
    receiver = Receiver(link, down)
    async with link:
        first = asyncio.create_task(fetch(receiver, a_ref(data)))
        record = tmp_path / "down" / f"{compute_digest(data)}.ranges"
        await until(lambda: record.exists())
        await asyncio.sleep(0.05)
        for start in range(0, half, 50_000):
            await link.publish(TOPICS.make_model_topic(compute_digest(data), start), data[start : start + 50_000])
        async with asyncio.timeout(WAIT_S):
            while f"{half - 50_000} {half}" not in record.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        async with serving(broker, up) as wanted:
            assert (await fetch(receiver, a_ref(data))).read_bytes() == data
            assert min(start for start, _ in wanted) == half


@pytest.mark.usefixtures("stalls_soon")
async def test_wrong_bytes_are_thrown_away_and_fetched_again(broker, tmp_path, caplog):
    data = os.urandom(100_000)
    lies = iter([bytes(100_000)] * 2)

    def source(digest: str) -> bytes:  # asked twice for each chunk: when it is wanted and when it is read
        return next(lies, data)

    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    async with serving(broker, None, damage=source), link:
        assert (await fetch(receiver, a_ref(data))).read_bytes() == data
    assert caplog.text.count("event=digest_mismatch") == 1


@pytest.mark.usefixtures("stalls_soon")
async def test_always_wrong_bytes_are_given_up_by_name(broker, tmp_path):
    ref = a_ref(os.urandom(100_000))
    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    async with serving(broker, None, damage=lambda digest: bytes(100_000)), link:
        with pytest.raises(ProtocolError) as caught:
            await fetch(receiver, ref)
    assert caught.value.name == "digest"
    assert list((tmp_path / "down").iterdir()) == []


async def test_oversized_blob_is_not_even_asked_for(broker, tmp_path):
    receiver = Receiver(transport(broker, "agent"), BlobFolder(tmp_path), max_bytes=99)
    with pytest.raises(ProtocolError) as caught:
        await fetch(receiver, a_ref(bytes(100)))
    assert caught.value.name == "oversized"


@pytest.mark.usefixtures("stalls_soon")
async def test_bad_chunks_change_nothing(broker, tmp_path, caplog):
    data = os.urandom(1000)
    digest = compute_digest(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path))
    async with link:
        running = asyncio.create_task(fetch(receiver, a_ref(data)))
        record = tmp_path / f"{digest}.ranges"
        await until(lambda: record.exists())
        await asyncio.sleep(0.1)
        for offset, payload in (("x", b"1"), ("-1", b"1"), ("1000", b"1"), ("999", b"12"), ("0", b""), ("²", b"1")):
            await link.publish(TOPICS.make_model_topic(digest, offset), payload)
        await link.publish(TOPICS.make_model_topic(digest, 0), data)
        assert (await running).read_bytes() == data
    assert caplog.text.count("event=refused name=malformed") == 3
    assert caplog.text.count("event=refused name=out-of-range") == 3


async def test_full_disk_ends_the_transport(broker, tmp_path):
    link = transport(broker, "agent")
    receiver = Receiver(link, BlobFolder(tmp_path / "down"))
    up = BlobFolder(tmp_path / "up")
    up.put(b"x" * 1000)
    with pytest.raises(StoreError, match="File too large"):  # noqa: PT012
        async with serving(broker, up), link:
            with no_room():
                await fetch(receiver, a_ref(b"x" * 1000))


async def test_sender_refuses_what_it_does_not_have(broker, tmp_path):
    folder = BlobFolder(tmp_path)
    digest = folder.put(bytes(100))
    async with (
        transport(broker, "one") as link,
        Sender(link, lambda d: folder.get_path(d) if d in folder else None) as s,
    ):
        for wrong, ranges, name in (
            ("0" * 64, [(0, 1)], "unknown-blob"),
            (digest, [(0, 101)], "out-of-range"),
            (digest, [(5, 5)], "out-of-range"),
            (digest, [(7, 5)], "out-of-range"),
        ):
            with pytest.raises(ProtocolError) as caught:
                s.add_want(wrong, ranges, chunks="c/+")
            assert caught.value.name == name


async def test_blob_that_vanishes_while_wanted_ends_nothing(broker, tmp_path, caplog):
    folder = BlobFolder(tmp_path)
    gone, kept = folder.put(b"gone"), folder.put(b"kept")
    inbox: asyncio.Queue[Inbound] = asyncio.Queue()
    async with transport(broker, "one") as link, Sender(link, folder.get_path) as sender:
        await link.subscribe("c/#", inbox.put)
        sender.add_want(gone, [(0, 4)], chunks="c/gone/+")
        folder.remove(gone)
        sender.add_want(kept, [(0, 4)], chunks="c/kept/+")
        async with asyncio.timeout(WAIT_S):
            assert (await inbox.get()).payload == b"kept"
    assert "event=chunk_failed" in caplog.text


@pytest.mark.usefixtures("stalls_soon")
async def test_broker_killed_in_mid_transfer(broker, tmp_path):
    data = os.urandom(6_000_000)
    up, down = BlobFolder(tmp_path / "up"), BlobFolder(tmp_path / "down")
    up.put(data)
    link = transport(broker, "agent")
    receiver = Receiver(link, down)
    async with serving(broker, up), link:
        running = asyncio.create_task(fetch(receiver, a_ref(data)))
        record = tmp_path / "down" / f"{compute_digest(data)}.ranges"
        await until(lambda: record.exists() and record.stat().st_size, every_s=0.001)
        await broker.kill()
        await broker.start()
        assert (await running).read_bytes() == data


RECEIVER = """
import asyncio, sys
from pathlib import Path
from fedge.system.files import BlobFolder
from fedge.wire.messages import BlobRef
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transport import BrokerSettings, Transport

async def main(port, folder, digest, size):
    link = Transport(BrokerSettings("127.0.0.1", int(port)), "agent")
    receiver = Receiver(link, BlobFolder(Path(folder)))
    topics = Topics("test")
    async with link:
        await receiver.fetch(BlobRef(digest=digest, size_bytes=int(size)), chunks=topics.make_model_topic(digest),
                             wants=topics.make_agent_topic("agent", "wants"), device_id="agent")

asyncio.run(main(*sys.argv[1:]))
"""


async def test_receiver_killed_with_9_goes_on_where_it_was(mosquitto, tmp_path):
    """The sender stops after four chunks; the receiver is killed; its successor asks for the rest only."""
    data = os.urandom(6_000_000)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    digest = compute_digest(data)
    record = tmp_path / "down" / f"{digest}.ranges"
    command = [sys.executable, "-c", RECEIVER, str(mosquitto.port), str(tmp_path / "down"), digest, str(len(data))]
    async with transport(mosquitto, "sender") as link:
        asked = asyncio.Event()

        async def on_want(message: Inbound) -> None:
            asked.set()

        await link.subscribe(TOPICS.make_agent_topic("+", "wants"), on_want)
        first = await asyncio.create_subprocess_exec(*command)
        async with asyncio.timeout(WAIT_S):
            await asked.wait()
            for start in range(0, 4 * LARGE_CHUNK, LARGE_CHUNK):
                await link.publish(TOPICS.make_model_topic(digest, start), data[start : start + LARGE_CHUNK])
            while record.read_text().count("\n") < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.send_signal(signal.SIGKILL)
        await first.wait()
    async with serving(mosquitto, up, name="sender2") as wanted:
        second = await asyncio.create_subprocess_exec(*command)
        async with asyncio.timeout(WAIT_S):
            assert await second.wait() == 0
        assert wanted == [(4 * LARGE_CHUNK, len(data))]
    assert (tmp_path / "down" / digest).read_bytes() == data
