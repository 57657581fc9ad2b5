"""What a device remembers of masked sums."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge_agent.device.device import FailedError
from edge_agent.device.worker import Worker
from edge_agent.privacy.masking import Confirmed, Keys, Masked, Session
from fedge.errors import StoreError
from fedge.privacy.masked_sums import Sums
from fedge.steps.masked.mask_keys import MaskKeys
from tests.support.orders import Blobs, order, worker


def session(own: Worker, number: int = 1, name: str = "train", run: str = "r") -> Session:
    return Session(own.make_device(order(MaskKeys(session=name), number, run=run), Blobs()), name)


def test_keys_are_made_once_for_each_sum(tmp_path: Path) -> None:
    own = worker(tmp_path)
    first = session(own).start()
    assert session(own).start() == first == session(worker(tmp_path)).load(Keys)
    assert len({first.encryption, first.masking, first.signing}) == 3
    assert session(own, name="other").start() != first
    assert session(own, number=2).start() != first


def test_with_the_next_round_the_means_to_open_the_last_one_go(tmp_path: Path) -> None:
    own = worker(tmp_path)
    session(own).start()
    session(own).save(Masked("action", b"statement", {}, b"result", b"vector"))
    session(own, name="other").start()
    assert session(own).load(Keys) is not None
    session(own, number=2).start()
    assert session(own).load(Keys) is session(own).load(Masked) is session(own, name="other").load(Keys) is None


@pytest.mark.parametrize("later", [{"number": 2}, {"run": "next"}], ids=["round", "run"])
def test_a_session_of_which_kill_9_leaves_a_part_signs_nothing(tmp_path: Path, monkeypatch, later) -> None:
    """It might have lost which sum it has confirmed."""
    own = worker(tmp_path)
    session(own).start()
    session(own).save(Confirmed(b"statement", (0, 1)))

    def killed(folder: Path, **_: object) -> None:
        for file in folder.rglob("confirmed"):
            file.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            session(own, **later).start()
    assert session(own).load(Confirmed) is None
    with pytest.raises(FailedError, match="the masked sum never began"):
        _ = session(own).signing
    session(own, **later).start()
    assert not (tmp_path / "masking" / "r" / "1.train").exists(), "the repeated order deletes the rest"


def test_sums_are_remembered_for_a_run_and_no_longer(tmp_path: Path) -> None:
    own = worker(tmp_path)
    session(own).start()
    session(own).record_sum(["a", "b"])
    session(own, number=2).start()
    session(own, number=2).record_sum(["b", "c"])
    session(own, number=2).record_sum(["a", "b"])
    assert session(worker(tmp_path), number=3).load_sums() == Sums().with_sum("ab").with_sum("bc")
    session(own, run="next").start()
    assert session(own).load_sums() == Sums()


def test_a_damaged_file_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    own = worker(tmp_path)
    session(own).start()
    session(own).record_sum(["a", "b"])
    for file in (tmp_path / "masking").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xc1")
    with pytest.raises(StoreError, match="cannot be read"):
        session(own).load_sums()
    with pytest.raises(StoreError, match="cannot be read"):
        session(own).start()
