"""Whatever is cut off whenever: the bundle that answers is whole, and the last good one is there."""

import json
import os
import shutil

import pytest

from deploy.updates.slots import MAX_STARTS, Slots, lock_slots
from fedge.bundle.manifest import MANIFEST, SKELETON, decode_manifest, read_bundle
from fedge.errors import ConfigError, StoreError, UpdateRejected

from ..bundles import digest, other_gate, source, variant
from ..faults import no_room
from ..power import in_a_process_cut_off_at

pytestmark = pytest.mark.torch_free


@pytest.fixture
def first(tmp_path):
    return variant(tmp_path / "first", release=1)


@pytest.fixture
def second(tmp_path):
    return variant(tmp_path / "second", release=2, gate=other_gate)


def install(slots, folder):
    slots.stage(*source(folder))
    slots.switch()
    slots.boot()
    slots.confirm()


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def release_of(folder):
    return None if folder is None else read_bundle(folder).manifest.release


def test_an_empty_device_runs_nothing(tmp_path):
    slots = Slots(tmp_path / "home")

    assert slots.boot() is None
    assert slots.good is None


def test_a_bundle_on_trial_answers_and_the_good_one_stays(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    assert release_of(slots.running) == 1

    slots.switch(rollout="r2")

    assert (release_of(slots.running), release_of(slots.good)) == (2, 1)
    assert Slots(tmp_path / "home").state == slots.state


def test_confirmed_it_is_the_good_one_and_the_old_one_can_be_replaced(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    install(slots, second)

    assert slots.running == slots.good
    assert release_of(slots.good) == 2
    assert release_of(slots.staged) == 1


def test_rolled_back_it_is_refused_from_then_on(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    manifest, _ = source(second)
    slots.stage(manifest, second)
    slots.switch()

    slots.roll_back("accuracy fell")

    again = Slots(tmp_path / "home")
    assert release_of(again.running) == release_of(again.good) == 1
    with pytest.raises(UpdateRejected, match="accuracy fell"):
        again.require_acceptable(decode_manifest(manifest), digest(second))


def test_older_releases_are_refused_also_after_a_rollback(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, second)

    with pytest.raises(UpdateRejected, match="older than 2"):
        slots.require_acceptable(decode_manifest((first / MANIFEST).read_bytes()), digest(first))


def test_processes_that_die_during_the_trial_bring_the_old_one_back(tmp_path, first, second):
    install(Slots(tmp_path / "home"), first)
    slots = Slots(tmp_path / "home")
    slots.stage(*source(second))
    slots.switch()

    loaded = [release_of(Slots(tmp_path / "home").boot()) for _ in range(MAX_STARTS + 2)]

    assert loaded == [2] * MAX_STARTS + [1, 1]


def inodes(folder):
    return {path.stat().st_ino for path in folder.iterdir()}


def test_an_update_lacks_only_what_changed_and_each_slot_has_bytes_of_its_own(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    manifest = read_bundle(second).manifest

    assert slots.list_missing(manifest) == [(manifest.gate.digest, manifest.gate.size_bytes)]

    slots.parts.put((second / manifest.gate.file_name).read_bytes())
    assert slots.list_missing(manifest) == []
    slots.stage((second / MANIFEST).read_bytes())
    assert not inodes(slots.running) & inodes(slots.staged)
    assert not (inodes(slots.running) | inodes(slots.staged)) & (inodes(first) | inodes(second))
    assert not inodes(slots.staged) & inodes(tmp_path / "home" / "parts")


def test_the_store_is_empty_when_a_bundle_is_good(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    gate = read_bundle(second).manifest.gate
    slots.parts.put((second / gate.file_name).read_bytes())
    for kind in ("part", "ranges"):  # of a transfer that was given up
        slots.parts.get_path(f"{'a' * 64}.{kind}").write_bytes(b"1")

    slots.stage((second / MANIFEST).read_bytes())
    slots.switch()
    slots.confirm()

    assert not [*(tmp_path / "home" / "parts").iterdir()]


def test_a_part_that_was_altered_in_the_store_is_fetched_again(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    gate = read_bundle(second).manifest.gate
    slots.parts.put((second / gate.file_name).read_bytes())
    flip(slots.parts.get_path(gate.digest), -1)

    with pytest.raises(StoreError, match=gate.digest):
        slots.stage((second / MANIFEST).read_bytes())

    assert slots.list_missing(read_bundle(second).manifest) == [(gate.digest, gate.size_bytes)]
    assert gate.digest not in slots.parts
    assert release_of(slots.running) == 1
    assert not leftovers(tmp_path / "home")


def test_a_missing_part_is_named(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    gate = read_bundle(second).manifest.gate.digest

    with pytest.raises(StoreError, match=gate):
        slots.stage((second / MANIFEST).read_bytes())


def test_nothing_is_staged_while_a_bundle_is_on_trial(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    slots.switch()

    with pytest.raises(StoreError, match="on trial"):
        slots.stage(*source(first))

    assert release_of(slots.good) == 1


def test_a_state_file_that_cannot_be_read_runs_the_newest_whole_bundle(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    install(slots, second)
    (tmp_path / "home" / "slots.json").write_bytes(b"\0" * 100)

    slots = Slots(tmp_path / "home")

    assert release_of(slots.boot()) == 2
    assert slots.state.highest_release == 2


# ------------------------------------------------------------------------------------------------------ power cuts


def leftovers(home):
    return [path for path in home.rglob("*") if path.name.startswith(".")]


def update(home, folder):
    slots = Slots(home)
    slots.stage(*source(folder))
    slots.switch(rollout="r2")
    slots.confirm()


def take_back(home, folder):
    update(home, folder)
    Slots(home).revert("aborted")


def give_up(home, folder):
    slots = Slots(home)
    slots.stage(*source(folder))
    slots.switch(rollout="r2")
    slots.roll_back("worse")


@pytest.mark.parametrize("work", [update, give_up, take_back])
def test_a_power_cut_at_any_point_leaves_a_whole_bundle_that_answers(tmp_path, first, second, work):
    before = tmp_path / "before"
    install(Slots(before), first)
    home = tmp_path / "home"
    seen = set()
    change = 0
    while True:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(before, home)
        was_cut = in_a_process_cut_off_at(change, lambda: work(home, second))

        slots = Slots(home)
        on_trial = slots.state.trial is not None
        seen.add((release_of(slots.running), on_trial))
        assert release_of(slots.good) in ({1} if work is give_up or on_trial else {1, 2})
        assert release_of(slots.running) == (2 if on_trial else release_of(slots.good))
        assert not leftovers(home)
        if not on_trial and digest(second) not in slots.state.refused:  # the next attempt brings it to its end
            slots.stage(*source(second))
            slots.switch()
        if slots.state.trial is not None:
            slots.confirm()
            assert release_of(Slots(home).good) == 2
        if not was_cut:
            break
        change += 1

    assert change > 15
    assert seen == ({(1, False), (2, True)} if work is give_up else {(1, False), (2, True), (2, False)})


def test_what_the_state_names_was_forced_to_the_disk_before(tmp_path, first, second, forced):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    folder = slots.staged

    needed = [folder, folder.parent, folder / MANIFEST, folder / SKELETON, *folder.glob("*.safetensors")]
    assert forced.has(*needed)

    forced.inodes.clear()
    slots.switch()
    assert forced.has(tmp_path / "home" / "slots.json", tmp_path / "home")
    assert json.loads((tmp_path / "home" / "slots.json").read_bytes())["trial"] is not None


def test_a_refused_bundle_is_none_to_go_back_to(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    slots.record_refusal(digest(second), "accuracy: worse")

    with pytest.raises(StoreError, match="accuracy"):
        slots.revert("aborted")

    assert release_of(slots.running) == 1


def test_a_bundle_on_trial_whose_manifest_is_lost_gives_way_all_the_same(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    slots.switch()
    (slots.running / MANIFEST).unlink()

    slots.roll_back("it cannot be loaded")

    assert release_of(Slots(tmp_path / "home").running) == 1


def test_what_answers_is_not_given_up_for_a_good_bundle_that_is_damaged(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    slots.switch()
    (slots.good / SKELETON).unlink()
    before = slots.state

    with pytest.raises(StoreError, match="go back"):
        slots.revert("aborted")

    assert Slots(tmp_path / "home").state == before


def test_a_bundle_on_trial_that_is_damaged_gives_way_and_is_not_refused(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    slots.switch()
    flip(slots.running / f"{read_bundle(second).manifest.gate.digest}.safetensors", -1)

    assert release_of(slots.revert("it cannot be loaded")) == 1

    slots.require_acceptable(read_bundle(second).manifest, digest(second))
    slots.stage(*source(second))


def test_a_trial_that_cannot_be_counted_is_suspended(tmp_path, first, second):
    """A full disk: were the bundle on trial to bring the process down, it would do so for ever."""
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(*source(second))
    slots.switch()
    state = (tmp_path / "home" / "slots.json").read_bytes()

    with no_room():
        assert release_of(Slots(tmp_path / "home").boot()) == 1
    assert (tmp_path / "home" / "slots.json").read_bytes() == state


def test_a_copy_of_the_running_bundle_is_none_to_go_back_to(tmp_path, first):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.repair()
    assert digest(slots.staged) == digest(slots.running)

    with pytest.raises(StoreError, match="both slots hold the same"):
        slots.revert("aborted")


def as_fedge_0_1_left_it(home):
    """Slots below one folder, whose files are hard links into a content store."""
    (home / "slots").mkdir()
    (home / "parts").mkdir(exist_ok=True)
    for slot in "ab":
        (home / f"slot-{slot}").rename(home / "slots" / slot)
        for path in (home / "slots" / slot).glob("*.safetensors"):
            kept = home / "parts" / path.stem
            if kept.exists():
                path.unlink()
                os.link(kept, path)
            else:
                os.link(path, kept)
    (home / "slots" / "lock").touch()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_home_of_fedge_0_1_answers_and_its_slots_are_copied_apart(tmp_path, first, second, read_only, monkeypatch):
    home = tmp_path / "home"
    install(Slots(home), first)
    install(Slots(home), second)
    as_fedge_0_1_left_it(home)
    assert inodes(home / "slots" / "a") & inodes(home / "slots" / "b")
    if read_only:
        with monkeypatch.context() as cannot:
            cannot.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(OSError(30, "read-only")))
            assert release_of(Slots(home).boot()) == 2

    slots = Slots(home)
    assert release_of(slots.boot()) == 2
    slots.repair()

    assert (release_of(slots.running), release_of(slots.staged)) == (2, 1)
    assert all(path.stat().st_nlink == 1 for slot in "ab" for path in (home / f"slot-{slot}").iterdir())
    assert not (home / "slots").exists()


def test_one_process_at_a_time_owns_a_device(tmp_path, first):
    with lock_slots(tmp_path / "home") as slots:
        install(slots, first)
        with pytest.raises(ConfigError, match="fedge serve"), lock_slots(tmp_path / "home"):
            pass
    with lock_slots(tmp_path / "home") as slots:
        assert release_of(slots.running) == 1


def test_what_others_are_writing_into_the_folder_is_left_alone(tmp_path):
    home = tmp_path / "home"
    Slots(home)
    (home / ".tmp-validation.npz-x").write_bytes(b"of the agent, just now")
    for name in ("slots", "outcome", "root"):
        (home / f".tmp-{name}.json-x").write_bytes(b"cut off")

    Slots(home)

    assert [path.name for path in leftovers(home)] == [".tmp-validation.npz-x"]


def test_a_home_that_onnx_runtime_cannot_read_is_wrong_usage(tmp_path):
    home = tmp_path / os.fsdecode(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"), lock_slots(home):
        pass
    assert not home.exists()
