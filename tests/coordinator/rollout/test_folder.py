import threading
import time

import msgspec
import pytest

from coordinator.rollout.decision import Plan, Progress
from coordinator.rollout.folder import DeviceLine, Folder, Record, Request
from fedge.errors import ConfigError, StoreError
from fedge.wire.messages import Phase, Quality

RECORD = Record(
    plan=Plan(id="r", target="2/manifest.json", release=2, digest="a" * 64),
    progress=Progress(began=1.5, reasons=("x",)),
    devices={
        "cam1": DeviceLine(
            phase=Phase.TRIAL, release=2, before=Quality(n=4, accuracy=0.5), now=Quality(n=4, accuracy=0.75)
        )
    },
)


def test_what_is_written_is_read(tmp_path):
    assert Folder(tmp_path).read() is None
    Folder(tmp_path).write(RECORD)
    assert Folder(tmp_path).read() == RECORD


def test_what_fedge_0_2_wrote_can_be_gone_on_with(tmp_path):
    Folder(tmp_path).write(RECORD)
    file = tmp_path / "rollout" / "state.json"
    old = msgspec.json.decode(file.read_bytes())
    del old["events"], old["earlier"]
    old["devices"]["cam1"] = {"phase": "trial", "release": 2, "accuracy": [0.5, 0.75], "drift": False}
    file.write_bytes(msgspec.json.encode(old))
    assert Folder(tmp_path).read().progress == RECORD.progress


def test_a_damaged_state_is_told(tmp_path):
    Folder(tmp_path).write(RECORD)
    (tmp_path / "rollout" / "state.json").write_text("{")
    with pytest.raises(StoreError, match=r"state\.json"):
        Folder(tmp_path).read()


def test_requests_wait_until_they_are_answered(tmp_path):
    folder = Folder(tmp_path)
    assert folder.take_request() is None
    folder.write_request(Request.PAUSE)
    folder.write_request(Request.ABORT)
    assert folder.take_request() is Request.ABORT
    folder.finish_request()
    assert folder.take_request() is None


def test_a_request_that_comes_while_another_is_carried_out_is_not_lost(tmp_path):
    folder = Folder(tmp_path)
    folder.write_request(Request.PAUSE)
    assert folder.take_request() is Request.PAUSE
    folder.write_request(Request.ABORT)
    assert Folder(tmp_path).take_request() is Request.PAUSE  # killed before it was carried out
    folder.finish_request()
    assert folder.take_request() is Request.ABORT
    folder.finish_request()
    assert folder.take_request() is None


def test_a_request_that_is_none_makes_room_for_the_next(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "request").write_bytes(b"\xffstop")
    assert folder.take_request() is None
    folder.write_request(Request.ABORT)
    assert folder.take_request() is Request.ABORT


def test_one_process_supervises(tmp_path):
    assert not Folder(tmp_path).is_supervised()
    with Folder(tmp_path).supervise():
        assert Folder(tmp_path).is_supervised()
        with pytest.raises(ConfigError, match="another process"), Folder(tmp_path).supervise():
            pass
    assert not Folder(tmp_path).is_supervised()


def test_a_supervisor_that_begins_while_somebody_looks_for_one_is_not_refused(tmp_path):
    folder, looking = Folder(tmp_path), threading.Event()

    def look():
        with folder._lock():
            looking.set()
            time.sleep(0.2)

    thread = threading.Thread(target=look)
    thread.start()
    assert looking.wait(10)
    with folder.supervise():
        assert folder.is_supervised()
    thread.join()
