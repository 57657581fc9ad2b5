"""The partial file: after kill -9, in any order, and closed."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.system.files import BlobFolder, compute_digest
from fedge.wire.messages import BlobRef
from fedge.wire.transfer.partial_blob import MAX_LINES, PartialBlob
from tests.deploy.power import in_a_process_cut_off_at


def a_ref(data: bytes) -> BlobRef:
    return BlobRef(digest=compute_digest(data), size_bytes=len(data))


@pytest.mark.parametrize("durable", [True, False])
def test_partial_file_goes_on_where_it_was(tmp_path, durable):
    data = os.urandom(1000)
    folder = BlobFolder(tmp_path)
    first = PartialBlob(folder, a_ref(data), durable=durable)
    first.write(0, data[:300], [(0, 300)])
    first.write(500, data[500:700], [(520, 600)])
    first.close()
    second = PartialBlob(folder, a_ref(data), durable=durable)
    assert list(second.have) == [(0, 300), (520, 600)]
    second.write(300, data[300:], [(300, 520), (600, 1000)])
    assert second.verify_and_keep()
    second.close()
    assert folder.get(compute_digest(data)) == data
    assert [p.name for p in tmp_path.iterdir()] == [compute_digest(data)]


@pytest.mark.parametrize(
    "torn", [b"0 3", b"0 300\n300 5", b"x y\n0 300\n", b"0 300\n200 1001\n", b"\n\n7\n0 300\n5 5\n"]
)
def test_torn_record_promises_nothing_that_is_not_there(tmp_path, torn):
    data = os.urandom(1000)
    folder = BlobFolder(tmp_path)
    first = PartialBlob(folder, a_ref(data), durable=True)
    first.write(0, data[:300], [(0, 300)])
    first.close()
    (tmp_path / f"{compute_digest(data)}.ranges").write_bytes(torn)
    second = PartialBlob(folder, a_ref(data), durable=True)
    assert list(second.have) in ([], [(0, 300)])
    second.close()


def in_small_chunks(part, data, order):
    """Every byte for itself, in some order."""
    for i in order:
        part.write(i, data[i : i + 1], [(i, i + 1)])


def test_the_record_of_very_small_chunks_stays_small_and_says_the_same(tmp_path):
    data, folder, sizes = os.urandom(3 * MAX_LINES), BlobFolder(tmp_path), []
    record = tmp_path / f"{compute_digest(data)}.ranges"
    for begin in range(0, len(data), MAX_LINES):  # by three receivers, the latter from what it finds
        end = begin + MAX_LINES
        part = PartialBlob(folder, a_ref(data), durable=False)
        assert list(part.have) == ([(0, begin)] if begin else [])
        for i in range(begin, end, 2048):
            in_small_chunks(part, data, [*range(i, i + 2048, 2), *range(i + 1, i + 2048, 2)])
            sizes.append(record.read_bytes().count(b"\n"))
        if end < len(data):
            part.close()
    assert max(sizes) <= MAX_LINES + 1
    assert part.verify_and_keep()
    part.close()
    assert [path.name for path in tmp_path.iterdir()] == [compute_digest(data)]


def test_cut_off_wherever_it_is_while_the_record_is_written_anew_nothing_is_promised_that_is_not_there(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("fedge.wire.transfer.partial_blob.MAX_LINES", 4)
    data = bytes(range(1, 17))

    def receive(folder):
        in_small_chunks(PartialBlob(folder, a_ref(data), durable=True), data, [*range(0, 16, 3), *range(1, 16, 3)])

    for change in itertools.count():
        folder = BlobFolder(tmp_path / str(change))
        cut_off = in_a_process_cut_off_at(change, functools.partial(receive, folder))
        part = PartialBlob(folder, a_ref(data), durable=True)
        found = (tmp_path / str(change) / f"{compute_digest(data)}.part").read_bytes()
        assert all(found[start:end] == data[start:end] for start, end in part.have)
        missing = set(range(16)) - {i for start, end in part.have for i in range(start, end)}
        in_small_chunks(part, data, missing)
        assert part.verify_and_keep()
        part.close()
        if not cut_off:
            assert change > 5
            break


def test_record_without_its_data_is_not_believed(tmp_path):
    data = os.urandom(1000)
    (tmp_path / f"{compute_digest(data)}.ranges").write_bytes(b"0 1000\n")
    part = PartialBlob(BlobFolder(tmp_path), a_ref(data), durable=True)
    assert not part.have
    part.close()
    assert (tmp_path / f"{compute_digest(data)}.ranges").read_bytes() == b""


def test_what_was_written_for_a_larger_size_is_no_part_of_the_blob(tmp_path):
    data = os.urandom(1000)
    folder = BlobFolder(tmp_path)
    first = PartialBlob(folder, BlobRef(digest=compute_digest(data), size_bytes=5000), durable=True)
    first.write(4000, bytes(1000), [(4000, 5000)])
    first.close()
    second = PartialBlob(folder, a_ref(data), durable=True)
    second.write(0, data, [(0, 1000)])
    assert second.verify_and_keep()
    second.close()
    assert folder.get(compute_digest(data)) == data


def test_a_partial_file_that_cannot_be_opened_leaves_no_handle(tmp_path):
    data = os.urandom(1000)
    (tmp_path / f"{compute_digest(data)}.ranges").mkdir()
    before = psutil.Process().num_fds()
    with pytest.raises(IsADirectoryError):
        PartialBlob(BlobFolder(tmp_path), a_ref(data), durable=True)
    assert psutil.Process().num_fds() == before


def test_closed_partial_file_is_left_alone(tmp_path):
    data = os.urandom(1000)
    part = PartialBlob(BlobFolder(tmp_path), a_ref(data), durable=True)
    part.close()
    part.close()
    part.write(0, data, [(0, 1000)])
    assert not part.verify_and_keep()
    assert compute_digest(data) not in BlobFolder(tmp_path)


@given(st.permutations(range(10)), st.integers(0, 10))
def test_any_order_is_hashed_right(order, n_first):
    """Also over a restart in between; and what has no gap before it is hashed before the end."""
    data = os.urandom(1000)
    with tempfile.TemporaryDirectory() as home:
        folder = BlobFolder(Path(home))
        for some in (order[:n_first], order[n_first:]):
            part = PartialBlob(folder, a_ref(data), durable=False)
            for i in some:
                part.write(100 * i, data[100 * i : 100 * i + 100], [(100 * i, 100 * i + 100)])
            gap = next((i for i in range(10) if not part.have.find_overlap(100 * i, 100 * i + 1)), 10)
            assert part._hashed == 100 * gap or not some
            part.close()
        last = PartialBlob(folder, a_ref(data), durable=False)
        assert last.verify_and_keep()
        last.close()
        assert folder.get(compute_digest(data)) == data
