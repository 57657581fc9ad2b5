"""One coordinator at a time works on a store; who comes second is told who is first, and who lost it ends."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from msgspec.structs import replace

from coordinator.store import database, lease
from coordinator.store.lease import make_lease, release_lease, renew_lease, take_lease
from coordinator.store.store import LEASE, Store
from fedge.errors import ConfigError, StoreError
from tests.support.postgres import program


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path / "server", store_url, federation="f")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LAPSED_S", 0.5)
    monkeypatch.setattr(lease, "LOOK_S", 0.02)


def test_a_second_coordinator_elsewhere_is_refused_while_the_first_renews(store: Store, tmp_path: Path) -> None:
    first = make_lease(tmp_path / "first")
    take_lease(store, first)
    ended = Event()

    def renew() -> None:
        held = first
        while not ended.wait(0.05):
            held = renew_lease(store, held)

    thread = Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"another coordinator \(.*first, which began at .* works on the same"):
            take_lease(store, replace(make_lease(tmp_path), machine="another"))
    finally:
        ended.set()
        thread.join()


def test_a_lease_of_a_dead_one_elsewhere_is_taken_after_a_while_and_one_of_this_machine_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = make_lease(tmp_path)
    take_lease(store, dead)
    other = replace(make_lease(tmp_path), machine="another")
    began = time.monotonic()
    take_lease(store, other)
    assert time.monotonic() - began >= 0.5
    monkeypatch.setattr(lease, "LAPSED_S", 300.0)
    take_lease(store, replace(other, incarnation="next"))  # the lock has told that the one before is dead
    release_lease(store, replace(other, incarnation="next"))
    take_lease(store, dead)  # released


def test_who_lost_the_store_ends_and_says_to_whom(store: Store, tmp_path: Path) -> None:
    own = make_lease(tmp_path / "own")
    take_lease(store, own)
    own = renew_lease(store, own)
    store.put_value(LEASE, "")
    with pytest.raises(ConfigError, match="its store was replaced, as by a restore"):
        renew_lease(store, own)
    take_lease(store, make_lease(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"ends, since another coordinator \(.*other, which began at"):
        renew_lease(store, own)
    kept = store.find_value(LEASE)
    release_lease(store, own)  # not ours any more
    assert store.find_value(LEASE) == kept


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_on_a_server_a_second_coordinator_of_the_federation_is_refused_and_another_federation_is_not(
    store: Store, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 1)
    take_lease(store, make_lease(tmp_path / "server"))
    with pytest.raises(ConfigError, match="another coordinator works for federation f on this server: stop it"):
        Store(tmp_path / "second", store_url, federation="f")
    with contextlib.closing(Store(tmp_path / "other", store_url, federation="g")) as other:
        take_lease(other, make_lease(tmp_path / "other"))


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_after_a_failover_the_server_forgets_locks_and_the_lease_says_who_goes_on(
    store: Store, store_url: str, tmp_path: Path
) -> None:
    """Its sessions, and with them its locks, end beneath a coordinator that lives, as when a standby takes over."""
    first = make_lease(tmp_path / "server")
    take_lease(store, first)
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'fedge f'"
    subprocess.run([program("psql"), "-q", "-c", end, store_url], check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(StoreError):  # so it ends, and does not go on without its lock
        renew_lease(store, first)
    with contextlib.closing(Store(tmp_path / "second", store_url, federation="f")) as standby:
        second = replace(make_lease(tmp_path / "second"), machine="another")
        began = time.monotonic()
        take_lease(standby, second)
        assert time.monotonic() - began >= 0.5  # until the first one's lease has run out
        with pytest.raises(ConfigError, match=r"ends, since another coordinator \(.*second, which began at"):
            renew_lease(standby, first)
        assert renew_lease(standby, second).renewed == 1


@pytest.mark.parametrize("kept", ["{", '{"incarnation":"i","machine":"m","where":"w","since":1e300}'])
def test_a_lease_that_cannot_be_read_is_refused_in_words(store: Store, tmp_path: Path, kept: str) -> None:
    own = make_lease(tmp_path)
    store.put_value(LEASE, kept)
    with pytest.raises(StoreError, match="cannot be read; restore another backup"):
        take_lease(store, own)
    with pytest.raises(StoreError, match="cannot be read; restore another backup"):
        renew_lease(store, own)
    release_lease(store, own)
    assert store.find_value(LEASE) == kept
