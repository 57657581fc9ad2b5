"""What a rollout's course keeps, and what requests change; at work: tests/integration/test_rollout.py."""

import pytest
from msgspec.structs import replace

from coordinator.rollout.course import Course, apply_request, start_rollout
from coordinator.rollout.decision import Plan, Progress
from coordinator.rollout.folder import Folder, Record, Request, RolloutEvent
from fedge.errors import ConfigError
from fedge.membership.signed_messages import Plain
from fedge.wire.messages import RolloutState

RUNNING, PAUSED, ABORTED, DONE = RolloutState
PLAN = Plan(id="r", target="2/manifest.json", release=2, digest="a" * 64)


@pytest.mark.parametrize(
    ("state", "request_", "after"),
    [
        (RUNNING, None, RUNNING),
        (RUNNING, Request.PAUSE, PAUSED),
        (PAUSED, Request.RESUME, RUNNING),
        (RUNNING, Request.RESUME, RUNNING),
        (DONE, Request.PAUSE, DONE),
        (ABORTED, Request.RESUME, ABORTED),
        (RUNNING, Request.ABORT, ABORTED),
        (PAUSED, Request.ABORT, ABORTED),
        (DONE, Request.ABORT, ABORTED),
        (ABORTED, Request.PAUSE, ABORTED),
    ],
)
def test_what_a_request_changes(state, request_, after):
    assert apply_request(Progress(began=0.0, state=state), request_, 5.0).state is after


def test_the_same_plan_goes_on_where_it_was(tmp_path):
    folder = Folder(tmp_path)
    progress = Progress(began=3.0, stage=1, share=0.5)
    folder.write(Record(plan=PLAN, progress=progress))
    folder.write_request(Request.PAUSE)

    assert start_rollout(folder, replace(PLAN, id="other"), 9.0) == (PLAN, progress)
    assert folder.take_request() is Request.PAUSE


@pytest.mark.parametrize("state", [RUNNING, PAUSED])
def test_one_rollout_at_a_time(tmp_path, state):
    Folder(tmp_path).write(Record(plan=PLAN, progress=Progress(began=3.0, state=state)))
    with pytest.raises(ConfigError, match="abort it first"):
        start_rollout(Folder(tmp_path), replace(PLAN, target="3/manifest.json"), 9.0)


@pytest.mark.parametrize("state", [ABORTED, DONE])
def test_after_its_end_the_next_one_begins(tmp_path, state):
    folder = Folder(tmp_path)
    folder.write(Record(plan=PLAN, progress=Progress(began=3.0, state=state)))
    folder.write_request(Request.PAUSE)
    folder.take_request()
    folder.write_request(Request.ABORT)  # both were for the one before
    following = replace(PLAN, target="3/manifest.json")
    assert start_rollout(folder, following, 9.0) == (following, Progress(began=9.0))
    assert folder.take_request() is None


def test_what_rollouts_before_came_to_is_kept(tmp_path):
    folder = Folder(tmp_path)
    ended = Progress(began=3.0, state=ABORTED, reasons=("cam1 refused: accuracy: x",))
    folder.write(Record(plan=PLAN, progress=ended, events=(RolloutEvent(at=1.0, text="old"),)))
    Course(folder, replace(PLAN, id="r2", soak_s=1.0), Plain(), print).save(Progress(began=9))
    record = folder.read()
    assert [(e.id, e.state, e.reasons) for e in record.earlier] == [("r", ABORTED, ("cam1 refused: accuracy: x",))]
    assert [e.text for e in record.events] == ["running: stage 1 of 3, 0 of 0 devices run it"]
    Course(folder, record.plan, Plain(), print).save(record.progress)
    assert (folder.read().earlier, folder.read().events) == (record.earlier, record.events)
