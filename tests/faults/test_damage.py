"""A disk that fails: whatever single file or folder below HOME is damaged, the device answers and says by what."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.commands.install import install_bundle
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots, lock_slots
from fedge.bundle.manifest import read_bundle
from fedge.errors import StoreError
from fedge.system.files import skip_fsync
from tests.deploy.bundles import digest, other_gate, source, variant
from tests.deploy.served import golden

pytestmark = pytest.mark.torch_free

X = golden()["x"]


def flip(where):
    def damage(path):
        data = bytearray(path.read_bytes())
        if data:
            data[int(where * (len(data) - 1))] ^= 0xFF
        write_in_place(path, data)

    return damage


def write_in_place(path, data):
    """The file that a process may have mapped, not another one of this name."""
    with path.open("r+b") as file:
        file.write(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    if path.is_dir():
        delete(path)
        path.mkdir()
    else:
        os.truncate(path, 0)


def delete(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def lock_out(path):
    path.chmod(0)


def become_a_folder(path):
    delete(path)
    (path / "lost+found").mkdir(parents=True)


def become_a_file(path):
    delete(path)
    path.write_bytes(b"\0" * 4096)


DAMAGES = {
    "first byte": flip(0),
    "middle byte": flip(0.5),
    "last byte": flip(1),
    "truncated": truncate,
    "emptied": empty,
    "deleted": delete,
    "no permission": lock_out,
    "a folder": become_a_folder,
    "a file": become_a_file,
}
OF_FILES = {"first byte", "middle byte", "last byte", "truncated"}


def prepared(folder, releases):
    """A home with this many releases, as `fedge install` leaves it; and with the last one on trial: "trial"."""
    home = folder / "home"
    bundles = [variant(folder / str(n), release=n, gate=other_gate if n == 2 else None) for n in (1, 2)]
    with lock_slots(home) as slots:
        for bundle in bundles[: 2 if releases == 2 else 1]:
            install_bundle(home, slots, read_bundle(bundle))
        if releases == "trial":
            slots.stage(*source(bundles[1]))
            slots.switch()
        slots.parts.put(b"on its way")
    return home, {digest(bundle) for bundle in bundles}


def targets(home, damage):
    return [path for path in sorted(home.rglob("*")) if path.is_file() or damage not in OF_FILES]


def asked(answering):
    """The bundle that answers."""
    runtime, prediction = answering.answer(X)
    assert prediction.class_index.shape == (len(X),)
    return runtime.digest


def check(folder, damage, releases, *, serving):
    """Damage each file and folder of a home in turn."""
    with skip_fsync():  # what a power cut does is asked elsewhere
        check_each(folder, damage, releases, serving=serving)


def check_each(folder, damage, releases, *, serving):
    pristine, known = prepared(folder, releases)
    for n, target in enumerate(targets(pristine, damage)):
        home = shutil.copytree(pristine, folder / f"damaged-{n}")
        with lock_slots(home) as slots:
            answering = ActiveBundle(slots, Limits()) if serving else None
            DAMAGES[damage](home / target.relative_to(pristine))
            if answering is not None:
                assert asked(answering) in known, target
                with suppress(StoreError):
                    slots.repair()
                    answering.settle()
                assert asked(answering) in known, target
        with lock_slots(home) as slots:
            answering = ActiveBundle(slots, Limits())
            assert asked(answering) in known, target
            assert not slots.state.refused, target
            if slots.state.trial is None and damage != "no permission":
                slots.repair()
                assert {read_bundle(slots.running).digest, read_bundle(slots.staged).digest} <= known, target
                assert asked(ActiveBundle(Slots(home), Limits())) in known, target


@pytest.mark.parametrize("serving", [False, True], ids=["before a start", "while serving"])
@pytest.mark.parametrize("releases", [1, 2, "trial"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_it_answers_whatever_is_damaged(tmp_path, damage, releases, serving):
    if damage != "no permission" or os.geteuid() != 0:
        check(tmp_path, damage, releases, serving=serving)
        return
    as_others(f"check(Path({str(tmp_path)!r}), {damage!r}, {releases!r}, serving={serving})")


@pytest.mark.parametrize("releases", [1, 2, "trial"])
def test_it_answers_where_nothing_can_be_written(tmp_path, releases):
    home, known = prepared(tmp_path, releases)
    for path in (home, *home.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() != 0:
        start(home, known)
    else:
        as_others(f"start(Path({str(home)!r}), {known!r})")


def start(home, known):
    """A device that is switched on."""
    with lock_slots(home) as slots:
        assert asked(ActiveBundle(slots, Limits())) in known


def as_others(call):
    """Root may do everything: call a function of this module in a process that no longer may."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("only a user who is not root is ever denied anything")
    done = subprocess.run(
        [setpriv, "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-c",
         f"from pathlib import Path; from tests.faults.test_damage import *; {call}"],
        cwd=Path(__file__).parents[2], capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("releases", [1, 2])
@pytest.mark.parametrize("damage", ["middle byte", "truncated", "deleted", "a folder"])
def test_an_install_repairs_both_slots(tmp_path, damage, releases):
    home, _ = prepared(tmp_path, releases)
    for target in [path for path in targets(home, damage) if path.is_file() and "slot-" in path.parent.name]:
        DAMAGES[damage](target)
    last = tmp_path / str(releases)

    with lock_slots(home) as slots:
        install_bundle(home, slots, read_bundle(last))

        assert read_bundle(slots.running).digest == read_bundle(slots.staged).digest == digest(last)
        assert asked(ActiveBundle(slots, Limits())) == digest(last)


def test_a_copy_over_the_folder_that_was_installed_harms_nothing(tmp_path):
    home, known = prepared(tmp_path, 1)
    with lock_slots(home) as slots:
        answering = ActiveBundle(slots, Limits())
        for path in (tmp_path / "1").iterdir():
            os.truncate(path, 0)
        assert asked(answering) in known
        assert asked(ActiveBundle(slots, Limits())) in known
