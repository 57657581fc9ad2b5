from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.store.blobs import Blobs, open_blobs
from fedge.errors import ConfigError, StoreError
from fedge.system.files import BlobFolder

DATA = b"tensors"


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Where blobs are: in a folder, or in a bucket."""
    return str(request.getfixturevalue("bucket")) if request.param == "bucket" else None


def of_dispatcher(home: Path, url: str | None) -> Blobs:
    return open_blobs(home, url, dispatcher=True)


def of_intake(home: Path, url: str | None) -> Blobs:
    """On another machine, if there is a bucket."""
    return open_blobs(home if url is None else home / "elsewhere", url, dispatcher=False)


def test_what_an_intake_takes_the_dispatcher_has(tmp_path: Path, url: str | None) -> None:
    received = BlobFolder(tmp_path / "received")
    digest = received.put(DATA)
    of_intake(tmp_path, url).take(received.get_path(digest))
    dispatcher = of_dispatcher(tmp_path, url)
    assert dispatcher.get(digest) == DATA
    assert digest in dispatcher, "from now on it is at hand"


def test_what_the_dispatcher_receives_others_have(tmp_path: Path, url: str | None) -> None:
    dispatcher = of_dispatcher(tmp_path, url)
    digest = dispatcher.get_received().put(DATA)
    dispatcher.take(dispatcher.get_received().get_path(digest))
    assert digest in dispatcher
    assert of_intake(tmp_path, url).get(digest) == DATA


def test_a_server_of_models_brings_what_there_is_and_lets_it_go(tmp_path: Path, url: str | None) -> None:
    digest = of_dispatcher(tmp_path, url).put(DATA)
    server = of_intake(tmp_path, url)
    path = server.fetch(digest)
    assert path is not None
    assert path.read_bytes() == DATA
    assert server.fetch("0" * 64) is None
    server.drop_copies([])
    assert (digest in server) == (url is None)
    assert server.get(digest) == DATA


def test_what_is_not_there_to_be_taken_is_told(tmp_path: Path, url: str | None) -> None:
    with pytest.raises(FileNotFoundError):
        of_intake(tmp_path, url).take(tmp_path / ("0" * 64))


def test_only_what_is_named_is_kept_and_what_is_young_if_wanted(tmp_path: Path, url: str | None) -> None:
    dispatcher = of_dispatcher(tmp_path, url)
    kept, other = dispatcher.put(DATA), dispatcher.put(b"other")
    part = dispatcher.get_received().get_path(other).with_suffix(".part")
    part.write_bytes(b"oth")
    dispatcher.remove_others({kept}, spare_s=60.0)
    assert of_intake(tmp_path, url).get(other) == b"other"
    dispatcher.remove_others({kept})
    assert not part.exists()
    assert list(dispatcher) == [kept]
    assert of_intake(tmp_path, url).get(kept) == DATA
    with pytest.raises(StoreError):
        of_intake(tmp_path, url).get(other)


def test_a_bucket_that_is_not_there_or_holds_other_bytes_is_told(tmp_path: Path, bucket: str) -> None:
    import obstore
    from obstore.store import S3Store

    digest = of_dispatcher(tmp_path, bucket).put(DATA)
    obstore.put(S3Store.from_url(bucket), digest, b"others")
    with pytest.raises(StoreError, match="holds other bytes"):
        of_intake(tmp_path, bucket).get(digest)
    with pytest.raises(StoreError, match="s3://nobody/has cannot be read or written"):
        of_dispatcher(tmp_path, "s3://nobody/has").put(b"another")


def test_an_address_must_be_one_of_a_bucket(tmp_path: Path) -> None:
    for wrong in ("tensors", "s3://", "gs://tensors/shop"):
        with pytest.raises(ConfigError, match="must be s3://BUCKET/FOLDER"):
            of_dispatcher(tmp_path, wrong)
