"""Whatever is cut off whenever: the bundle that answers is whole, and the last good one is there."""

import json
import os
import shutil

import pytest

from deploy.slots import MAX_STARTS, Slots, owned
from fedge.bundle import MANIFEST, SKELETON, decode, read
from fedge.errors import ConfigError, StoreError, UpdateRejected

from .bundles import digest, other_gate, variant
from .power import in_a_process_cut_off_at

pytestmark = pytest.mark.torch_free


@pytest.fixture
def first(tmp_path):
    return variant(tmp_path / "first", release=1)


@pytest.fixture
def second(tmp_path):
    return variant(tmp_path / "second", release=2, gate=other_gate)


def install(slots, folder):
    slots.stage(slots.take_in(read(folder)))
    slots.switch()
    slots.boot()
    slots.confirm()


def release_of(folder):
    return None if folder is None else read(folder).manifest.release


def test_an_empty_device_runs_nothing(tmp_path):
    slots = Slots(tmp_path / "home")

    assert slots.boot() is None
    assert slots.good is None


def test_a_bundle_on_trial_answers_and_the_good_one_stays(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(slots.take_in(read(second)))
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
    manifest = slots.take_in(read(second))
    slots.stage(manifest)
    slots.switch()

    slots.roll_back("accuracy fell")

    again = Slots(tmp_path / "home")
    assert release_of(again.running) == release_of(again.good) == 1
    with pytest.raises(UpdateRejected, match="accuracy fell"):
        again.may_take(decode(manifest), digest(second))


def test_older_releases_are_refused_also_after_a_rollback(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, second)

    with pytest.raises(UpdateRejected, match="older than 2"):
        slots.may_take(decode((first / MANIFEST).read_bytes()), digest(first))


def test_processes_that_die_during_the_trial_bring_the_old_one_back(tmp_path, first, second):
    install(Slots(tmp_path / "home"), first)
    slots = Slots(tmp_path / "home")
    slots.stage(slots.take_in(read(second)))
    slots.switch()

    loaded = [release_of(Slots(tmp_path / "home").boot()) for _ in range(MAX_STARTS + 2)]

    assert loaded == [2] * MAX_STARTS + [1, 1]


def test_equal_parts_lie_on_the_disk_once_and_an_update_lacks_only_what_changed(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    manifest = read(second).manifest

    assert slots.lacks(manifest) == [(manifest.gate.digest, manifest.gate.size_bytes)]

    slots.stage(slots.take_in(read(second)))
    expert = manifest.candidates[0].part
    store = slots.parts.path(expert.digest).stat()
    assert (slots.running / expert.file_name).stat().st_ino == store.st_ino
    assert (slots.staged / expert.file_name).stat().st_ino == store.st_ino


def test_the_store_holds_what_the_slots_name_and_nothing_else(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    third = variant(tmp_path / "third", release=3)
    for folder in (first, second, third):
        install(slots, folder)
    gate = read(second).manifest.gate.digest
    assert gate in slots.parts  # the last good one but one

    install(slots, variant(tmp_path / "fourth", release=4))

    assert gate not in slots.parts
    manifest = read(third).manifest
    assert set(slots.parts) == {part.digest for part in (manifest.skeleton, *manifest.parts)}


def test_what_came_of_a_transfer_that_was_given_up_goes_when_the_next_bundle_is_good(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    for kind in ("part", "ranges"):
        slots.parts.path(f"{'a' * 64}.{kind}").write_bytes(b"1")

    install(slots, second)

    assert {path.name for path in (tmp_path / "home" / "parts").iterdir()} == set(slots.parts)


def test_a_part_that_was_altered_in_the_store_is_not_staged(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    manifest = slots.take_in(read(second))
    path = slots.parts.path(read(second).manifest.gate.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)

    with pytest.raises(UpdateRejected, match="does not hash"):
        slots.stage(manifest)

    assert release_of(slots.running) == 1
    assert not leftovers(tmp_path / "home")


def test_a_missing_part_is_named(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    gate = read(second).manifest.gate.digest

    with pytest.raises(UpdateRejected, match=gate):
        slots.stage((second / MANIFEST).read_bytes())


def test_nothing_is_staged_while_a_bundle_is_on_trial(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(slots.take_in(read(second)))
    slots.switch()

    with pytest.raises(StoreError, match="on trial"):
        slots.stage(slots.take_in(read(first)))

    assert release_of(slots.good) == 1


def test_a_state_file_that_cannot_be_read_runs_the_newest_whole_bundle(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    install(slots, second)
    (tmp_path / "home" / "slots.json").write_bytes(b"\0" * 100)

    slots = Slots(tmp_path / "home")

    assert release_of(slots.boot()) == 2
    assert slots.state.highest_release == 2


def test_file_systems_without_hard_links_hold_copies(tmp_path, first, second, monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    slots = Slots(tmp_path / "home")
    install(slots, first)
    install(slots, second)

    assert release_of(slots.running) == 2


# ------------------------------------------------------------------------------------------------------ power cuts


def leftovers(home):
    return [path for path in home.rglob("*") if path.name.startswith(".")]


def update(home, folder):
    slots = Slots(home)
    slots.stage(slots.take_in(read(folder)))
    slots.switch(rollout="r2")
    slots.confirm()


def take_back(home, folder):
    update(home, folder)
    Slots(home).go_back("aborted")


def give_up(home, folder):
    slots = Slots(home)
    slots.stage(slots.take_in(read(folder)))
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
            slots.stage(slots.take_in(read(second)))
            slots.switch()
        if slots.state.trial is not None:
            slots.confirm()
            assert release_of(Slots(home).good) == 2
        if not was_cut:
            break
        change += 1

    assert change > 15
    assert seen == ({(1, False), (2, True)} if work is give_up else {(1, False), (2, True), (2, False)})


def test_what_the_state_names_was_forced_to_the_disk_before(tmp_path, first, second, monkeypatch):
    forced = set()
    fsync = os.fsync

    def record(handle):
        forced.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links here")))
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(slots.take_in(read(second)))
    folder = slots.staged

    needed = [folder, folder.parent, folder / MANIFEST, folder / SKELETON, *folder.glob("*.safetensors")]
    needed += [slots.parts.path(part.digest) for part in read(folder).manifest.parts]
    assert {path.stat().st_ino for path in needed} <= forced

    forced.clear()
    slots.switch()
    assert {(tmp_path / "home" / "slots.json").stat().st_ino, (tmp_path / "home").stat().st_ino} <= forced
    assert json.loads((tmp_path / "home" / "slots.json").read_bytes())["trial"] is not None


def test_a_refused_bundle_is_none_to_go_back_to(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(slots.take_in(read(second)))
    slots.refuse(digest(second), "accuracy: worse")

    with pytest.raises(StoreError, match="accuracy"):
        slots.go_back("aborted")

    assert release_of(slots.running) == 1


def test_a_bundle_on_trial_whose_manifest_is_lost_gives_way_all_the_same(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(slots.take_in(read(second)))
    slots.switch()
    (slots.running / MANIFEST).unlink()

    slots.roll_back("it cannot be loaded")

    assert release_of(Slots(tmp_path / "home").running) == 1


def test_what_answers_is_not_given_up_for_a_good_bundle_that_is_damaged(tmp_path, first, second):
    slots = Slots(tmp_path / "home")
    install(slots, first)
    slots.stage(slots.take_in(read(second)))
    slots.switch()
    (slots.good / SKELETON).unlink()
    before = slots.state

    with pytest.raises(StoreError, match="go back"):
        slots.go_back("aborted")

    assert Slots(tmp_path / "home").state == before


def test_one_process_at_a_time_owns_a_device(tmp_path, first):
    with owned(tmp_path / "home") as slots:
        install(slots, first)
        with pytest.raises(ConfigError, match="fedge serve"), owned(tmp_path / "home"):
            pass
    with owned(tmp_path / "home") as slots:
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
    with pytest.raises(ConfigError, match="no UTF-8"), owned(home):
        pass
    assert not home.exists()
