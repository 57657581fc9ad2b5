"""What a step may use of a device: files that survive, releases that rise, models, random numbers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from deploy import load
from deploy.commands.install import install_bundle
from deploy.updates.slots import lock_slots
from edge_agent.device.device import (
    PERSONAL,
    FailedError,
    KeptTensors,
    cache_models,
    decode_kept,
    overlay_tensors,
    prune_bundles,
)
from edge_agent.device.files import Files, read_newest
from fedge.bundle.manifest import read_bundle
from fedge.errors import ConfigError, ProtocolError, StoreError
from fedge.models import build
from fedge.steps.contract import Failed, load_installed_steps
from fedge.steps.mixture.install import Install, Installed
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.system.files import find_highest_release
from fedge.tensors.layout import BASE, HEAD, flatten, unflatten
from tests.deploy.bundles import source, variant
from tests.deploy.serve_process import ask, process
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, layers_of, order, part_of, worker

INSTALL = Install(model=Blobs().model(1), method="fedavg")


# ---------------------------------------------------------------------------------------------------------- files


def test_what_a_round_wrote_is_read_by_it_and_later_rounds(tmp_path: Path) -> None:
    assert Files(tmp_path, "r", 3).read("a") is None
    Files(tmp_path, "r", 3).write("a", b"three")
    assert [Files(tmp_path, "r", number).read("a") for number in (2, 3, 4, 10)] == [None, b"three", b"three", b"three"]
    assert Files(tmp_path, "r", 3).read("a", before=3) is None
    assert Files(tmp_path, "r", 4).read("a", before=4) == b"three"
    assert Files(tmp_path, "r", 3).read("b") is None


def test_a_repeated_order_reads_what_it_read_before(tmp_path: Path) -> None:
    """It has written already when it is killed: the file that it read is still there."""
    for number in (1, 2, 7):
        files = Files(tmp_path, "r", number)
        seen = [files.read("a", before=number) for _ in range(2)]
        files.write("a", f"round {number}".encode())
        assert [Files(tmp_path, "r", number).read("a", before=number)] * 2 == seen
        Files(tmp_path, "r", number).write("a", f"round {number}".encode())
    assert sorted(p.name for p in (tmp_path / "kept" / "r" / "a").iterdir()) == ["2", "7"]


def test_rounds_are_numbers_and_not_names(tmp_path: Path) -> None:
    for number in (2, 9, 10):
        Files(tmp_path, "r", number).write("a", str(number).encode())
    folder = tmp_path / "kept" / "r" / "a"
    assert sorted(path.name for path in folder.iterdir()) == ["10", "9"]
    assert [read_newest(folder), read_newest(folder, 10), read_newest(folder, 9), read_newest(folder, 8)] == [
        b"10",
        b"10",
        b"9",
        None,
    ]
    assert read_newest(tmp_path / "nowhere") is None


def test_names_do_not_mix_and_a_new_run_ends_the_older_ones(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Files(tmp_path, "old.1", 5).write(name, name.encode())
    assert Files(tmp_path, "old.1", 6).read("b") == b"b"
    new = Files(tmp_path, "new", 1)
    assert new.read("a") is None
    assert (tmp_path / "kept" / "old.1").exists(), "reading ends nothing"
    new.write("a", b"new")
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["new"]


def test_a_write_that_was_cut_off_leaves_nothing_behind_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "r" / "a"
    folder.mkdir(parents=True)
    (folder / ".tmp-torn").write_bytes(b"half")
    assert Files(tmp_path, "r", 3).read("a") is None
    Files(tmp_path, "r", 3).write("a", b"x")
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_what_cannot_be_written_or_read_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "kept" / "r" / "a" / "3").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be read"):
        Files(tmp_path, "r", 3).read("a")
    (tmp_path / "other").write_text("no folder")
    with pytest.raises(StoreError):
        Files(tmp_path / "other", "r", 3).write("a", b"x")


DIES = """
    import os, signal
    from pathlib import Path
    from edge_agent.device import files

    def dying(call, after):
        def once(*args, **more):
            if after:
                call(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)
        return once

    where, after = {where!r}
    if where == "write":
        files.write_atomically = dying(files.write_atomically, after)
    else:
        Path.unlink = dying(Path.unlink, after)
    kept = files.Files(Path({home!r}), "r", 3)
    assert kept.read("a", before=3) == b"two"
    kept.write("a", b"three")
"""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["write", "unlink"])
@pytest.mark.process
def test_killed_at_any_moment_the_order_finds_what_it_found(tmp_path: Path, where: str, after: bool) -> None:
    for number, data in ((1, b"one"), (2, b"two")):
        Files(tmp_path, "r", number).write("a", data)
    program = textwrap.dedent(DIES).format(where=(where, after), home=str(tmp_path))
    died = subprocess.run(
        [sys.executable, "-c", program], check=False, env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )
    assert died.returncode == -signal.SIGKILL
    again = Files(tmp_path, "r", 3)
    assert again.read("a", before=3) == b"two"
    again.write("a", b"three")
    assert Files(tmp_path, "r", 4).read("a") == b"three"
    assert {p.name for p in (tmp_path / "kept" / "r" / "a").iterdir()} == {"2", "3"}


# ---------------------------------------------------------------------------------------------------------- kept


def test_what_a_step_kept_is_its_own(tmp_path: Path) -> None:
    head = layers_of(INITIAL, HEAD)
    first = device(tmp_path, INSTALL, number=1)
    assert first.load_kept("install", LAYOUT.select(HEAD)) is None
    first.save_kept(head)
    later = device(tmp_path, INSTALL, number=2)
    found = later.load_kept("install", LAYOUT.select(HEAD))
    assert found is not None
    assert found.layout == head.layout
    assert found.model.params.tobytes() == head.model.params.tobytes()
    assert later.load_kept("install", LAYOUT.select(HEAD), before=1) is None
    with pytest.raises(FailedError, match="step install kept the tensors on this device, but the order names train"):
        later.load_kept("train", LAYOUT.select(HEAD))
    with pytest.raises(ProtocolError, match="layout"):
        later.load_kept("install", LAYOUT.select(BASE))


def test_what_was_kept_by_a_step_that_is_gone_cannot_be_used() -> None:
    with pytest.raises(FailedError, match="is not installed any more"):
        overlay_tensors({}, "train", INITIAL, layers_of(INITIAL, HEAD), LAYOUT)


def test_the_device_predicts_with_what_it_kept_in_its_newest_run(tmp_path: Path) -> None:
    own, served = worker(tmp_path), build.make_initial_model(TASK, 5)[1]
    assert own.make_personal_model(served) is served
    blobs = Blobs()
    for run, number in (("one", 9), ("two", 1)):
        train = Train(
            starts=(Start(model=blobs.model(1, HEAD)),), sgd=Sgd(steps=2), personal=HEAD, initial=blobs.model(0)
        )
        own.execute(order(train, number, run=run), blobs)
        kept = own.make_device(order(INSTALL, number, run=run), blobs).load_kept("train", LAYOUT.select(HEAD))
        assert kept is not None
        own_tensors = kept.get_tensors()
        mine = unflatten(own.make_personal_model(served), LAYOUT)
        for name, tensor in unflatten(served, LAYOUT).items():
            np.testing.assert_array_equal(mine[name], own_tensors.get(name, tensor))


@pytest.mark.parametrize("data", [b"", b"no", b"\x80"])
def test_a_damaged_file_is_a_store_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        decode_kept(data, KeptTensors)
    Files(tmp_path, "r", 1).write(PERSONAL, data)
    with pytest.raises(StoreError):
        worker(tmp_path).make_personal_model(INITIAL)


# ------------------------------------------------------------------------------------------------------- releases


def install(home: Path, number: int = 1, *, run: str = "r", seed: int = 1) -> Installed:
    blobs = Blobs()
    action = Install(model=blobs.model(seed), method="fedavg")
    result = worker(home).execute(order(action, number, run=run), blobs).result
    assert isinstance(result, Installed), result
    return result


def test_a_second_federation_on_a_used_home_writes_the_next_release(tmp_path: Path) -> None:
    first = install(tmp_path, run="one")
    second = install(tmp_path, run="two", seed=2)
    assert (first.release, second.release) == (1, 2)
    for result in (first, second):
        runtime = load(tmp_path / "bundles" / str(result.release))
        assert runtime.manifest.release == result.release


def test_releases_rise_above_what_has_ever_answered(tmp_path: Path) -> None:
    """The runtime took release 7 from a rollout, and went back since."""
    (tmp_path / "slots.json").write_text(json.dumps({"highest_release": 7}))
    assert install(tmp_path).release == 8
    assert find_highest_release(tmp_path) == 8


def test_a_repeated_order_writes_the_same_release(tmp_path: Path) -> None:
    first = install(tmp_path)
    assert install(tmp_path) == first
    assert [p.name for p in (tmp_path / "bundles").iterdir()] == ["1"]
    assert install(tmp_path, 2).release == 2


def test_a_release_is_taken_before_its_bundle_is_written(tmp_path: Path) -> None:
    """A kill -9 between the two leaves no hole: the order that is done again has the number already."""
    here = device(tmp_path, INSTALL)
    assert here.reserve_release() == 1
    assert install(tmp_path).release == 1
    assert device(tmp_path, INSTALL).reserve_release() == 1


def test_an_order_that_fails_writes_no_bundle(tmp_path: Path) -> None:
    blobs = Blobs()
    action = Install(model=blobs.file(b"nonsense"), method="fedavg")
    assert isinstance(worker(tmp_path).execute(order(action), blobs).result, Failed)
    assert install(tmp_path, 2).release == 1


# ---------------------------------------------------------------------------------------- models, numbers, blobs


def test_a_model_is_decoded_once_where_it_is_remembered(tmp_path: Path) -> None:
    blobs = Blobs()
    ref = blobs.model(1)
    here = device(tmp_path, INSTALL, blobs)
    with cache_models():
        assert here.fetch_model(ref) is here.fetch_model(ref)
    assert here.fetch_model(ref) is not here.fetch_model(ref)


def test_a_part_of_a_model_has_the_layout_that_is_asked_for(tmp_path: Path) -> None:
    blobs = Blobs()
    here, base = device(tmp_path, INSTALL, blobs), LAYOUT.without(HEAD)
    expected = flatten(part_of(INITIAL, BASE), base)
    np.testing.assert_array_equal(here.fetch_model(blobs.model(0, HEAD), base).params, expected.params)
    with pytest.raises(ProtocolError, match="layout"):
        here.fetch_model(blobs.model(0, HEAD))


def test_random_numbers_are_those_of_the_order(tmp_path: Path) -> None:
    def drawn(seed: int, *stream: int) -> float:
        return float(device(tmp_path, INSTALL, seed=seed).make_rng(*stream).random())

    assert drawn(3) == drawn(3) == np.random.default_rng(3).random()
    assert drawn(3, 1) == drawn(3, 1) == np.random.default_rng([3, 1]).random()
    assert len({drawn(3), drawn(3, 1), drawn(3, 2), drawn(4)}) == 4
    assert drawn(3, 0) == drawn(3)


def test_what_is_sent_is_named_by_its_content(tmp_path: Path) -> None:
    here = device(tmp_path, INSTALL)
    ref = here.send(b"tensors")
    assert here.blobs == {ref.digest: b"tensors"}
    assert ref.size_bytes == 7


def test_a_step_finds_the_task_and_the_data(tmp_path: Path) -> None:
    own = worker(tmp_path)
    here = own.make_device(order(INSTALL, seed=9), Blobs())
    assert (here.task, here.data, here.seed, here.home) == (TASK, own.data, 9, tmp_path)
    assert here.layout == LAYOUT
    assert set(here.steps) == set(load_installed_steps())


def test_a_selector_that_means_nothing_is_the_orders_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        device(tmp_path, INSTALL).layout.select(("conv",))


# ------------------------------------------------------------------------------------------------------- retention


def released(home: Path) -> list[int]:
    return sorted(int(path.name) for path in (home / "bundles").glob("[0-9]*"))


def test_of_its_bundles_the_last_three_stay_and_what_answers_and_the_one_before(tmp_path: Path) -> None:
    for release in range(1, 8):
        variant(tmp_path / "bundles" / str(release), release=release)
    with lock_slots(tmp_path) as slots:
        install_bundle(tmp_path, slots, read_bundle(tmp_path / "bundles" / "1"))
        slots.stage(*source(tmp_path / "bundles" / "3"))
        slots.switch()  # on trial
    prune_bundles(tmp_path)
    assert released(tmp_path) == [1, 3, 5, 6, 7]
    assert find_highest_release(tmp_path) == 7
    with lock_slots(tmp_path) as slots:
        slots.confirm()
        slots.stage(*source(tmp_path / "bundles" / "7"))
    prune_bundles(tmp_path)
    assert released(tmp_path) == [3, 5, 6, 7]


def test_each_bundle_that_is_written_sends_an_old_one_away(tmp_path: Path) -> None:
    blobs, mine = Blobs(), worker(tmp_path)
    model = blobs.model(1)
    for number in range(1, 6):
        made = order(msgspec.structs.replace(INSTALL, model=model), number)
        assert mine.execute(made, blobs).result == Installed(release=number)
    assert released(tmp_path) == [3, 4, 5]


def test_killed_while_it_prunes_it_leaves_no_half_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in range(1, 5):
        variant(tmp_path / "bundles" / str(release), release=release)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune_bundles(tmp_path)
    assert released(tmp_path) == [2, 3, 4]
    prune_bundles(tmp_path)
    assert all(read_bundle(tmp_path / "bundles" / str(release)) for release in released(tmp_path))


@pytest.mark.process
async def test_a_bundle_that_is_served_by_its_folder_stays(tmp_path: Path) -> None:
    for release in range(1, 6):
        variant(tmp_path / "bundles" / str(release), release=release)
    async with process(f"golden={tmp_path / 'bundles' / '1'}") as (_, _, session):
        prune_bundles(tmp_path)
        assert released(tmp_path) == [1, 3, 4, 5]
        assert (await ask(session, "golden"))[0] == 200
    prune_bundles(tmp_path)
    assert released(tmp_path) == [3, 4, 5]


def test_what_an_order_keeps_is_kept_once(tmp_path: Path) -> None:
    """A second call would replace what the first has kept."""
    own = device(tmp_path, INSTALL)
    own.save_kept(layers_of(INITIAL, HEAD))
    with pytest.raises(FailedError, match="keeps tensors once in an order"):
        own.save_kept(layers_of(INITIAL, BASE))
