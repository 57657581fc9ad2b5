import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedge.errors import StoreError
from fedge.system.files import (
    LEFT_S,
    BlobFolder,
    InUseError,
    compute_digest,
    fill_folder,
    lock_folder,
    remove_unfinished,
    require_writable,
    skip_fsync,
    write_atomically,
)


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_writes_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "state"
    write_atomically(file, b"old")
    write_atomically(file, memoryview(b"new"))
    assert file.read_bytes() == b"new"
    assert names_in(file.parent) == ["state"]


def test_what_can_be_written_is_left_as_it_is_and_what_cannot_is_named(tmp_path: Path) -> None:
    file = tmp_path / "new" / "figures.json"
    require_writable(file)
    assert names_in(file.parent) == []
    file.write_bytes(b"old")
    require_writable(file)
    assert file.read_bytes() == b"old"
    for wrong in (tmp_path, file / "below"):
        with pytest.raises(StoreError, match=str(wrong if wrong == tmp_path else file)):
            require_writable(wrong)


def test_a_failed_write_keeps_the_old_bytes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_atomically(file, b"old")
    with pytest.raises(TypeError):
        write_atomically(file, "text")  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert names_in(tmp_path) == ["state"]


def test_what_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write"):
        write_atomically(tmp_path / "file" / "below", b"x")


def test_a_full_disk_is_a_store_error_and_keeps_the_old_bytes(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from fedge.errors import StoreError
from fedge.system.files import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(Path(sys.argv[1]), bytes(5000))
except StoreError:
    sys.exit(7)
"""
    file = tmp_path / "state"
    write_atomically(file, b"old")
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == 7
    assert file.read_bytes() == b"old"
    assert names_in(tmp_path) == ["state"]


def test_readers_see_the_old_or_the_new_bytes_never_a_part(tmp_path: Path) -> None:
    file = tmp_path / "state"
    versions = [bytes([i]) * 20_000 for i in range(40)]
    write_atomically(file, versions[0])
    writer = threading.Thread(target=lambda: [write_atomically(file, v) for v in versions])
    writer.start()
    while writer.is_alive():
        assert file.read_bytes() in versions
    writer.join()


def test_a_folder_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for number in range(2):
        with fill_folder(tmp_path / "folder") as finished:
            (finished / f"{number}").write_bytes(b"x")
        assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == [
            "folder", f"folder/{number}",
        ]  # fmt: skip


def test_a_folder_of_blobs_on_a_disk_that_is_not_mounted_is_an_error_and_stays_a_link(tmp_path: Path) -> None:
    link, disk = tmp_path / "blobs", tmp_path / "disk"
    link.symlink_to(disk)
    with pytest.raises(StoreError, match=r"points to .*disk, and no folder is there"):
        BlobFolder(link)
    disk.mkdir()
    BlobFolder(link).put(b"tensor")
    assert [file.read_bytes() for file in disk.iterdir()] == [b"tensor"]


def test_blobs_are_named_by_their_content(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path / "blobs")
    digest = folder.put(b"weights")
    assert digest == compute_digest(b"weights") == folder.put(b"weights")
    assert digest in folder
    assert folder.get(digest) == b"weights"
    assert list(folder) == [digest]
    folder.remove(digest)
    folder.remove(digest)
    assert digest not in folder
    with pytest.raises(StoreError, match=digest):
        folder.get(digest)


def test_unfinished_files_are_no_blobs(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path)
    (tmp_path / ".tmp-x").write_bytes(b"")
    (tmp_path / ("a" * 64 + ".part")).write_bytes(b"")
    assert list(folder) == []


def test_what_is_volatile_is_written_but_not_forced_to_the_disk(tmp_path, forced) -> None:
    with skip_fsync():
        write_atomically(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    assert not forced.inodes
    write_atomically(tmp_path / "a", b"y")
    assert forced.inodes == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_a_folder_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "bundles" / "3"

    def write(name: str, data: bytes | None) -> None:
        with fill_folder(folder) as unfinished:
            (unfinished / name).write_bytes(b"begun")
            (unfinished / name).write_bytes(data)  # type: ignore[arg-type]
            assert not (folder / name).exists()

    write("a", b"1")
    with pytest.raises(TypeError):
        write("b", None)
    assert [path.name for path in folder.parent.iterdir()] == ["3"]
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("a", b"1")]


def test_what_killed_processes_left_half_written_goes_after_a_day(tmp_path: Path) -> None:
    yesterday = time.time() - LEFT_S - 60
    for name in (".unfinished-a", ".unfinished-b", ".replaced-c", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"{}")
    for name in (".unfinished-a", ".replaced-c", "2"):
        os.utime(tmp_path / name, (yesterday, yesterday))

    with fill_folder(tmp_path / "3"):
        pass

    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-b", "2", "3"]


def test_what_another_process_is_filling_is_no_leftover_until_that_is_killed(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from fedge.system.files import fill_folder\n"
    code += "with fill_folder(Path(sys.argv[1])) as made:\n"
    code += "  (made / 'a').write_bytes(b'1'); print(made, flush=True); time.sleep(60)"
    (tmp_path / ".replaced-c" / "bundle").mkdir(parents=True)
    command = [sys.executable, "-c", code, str(tmp_path / "copy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as filling:
        assert filling.stdout is not None
        made = Path(filling.stdout.readline().strip())
        remove_unfinished(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [made.name]
        assert (made / "a").read_bytes() == b"1"
        filling.kill()
        filling.wait()
        remove_unfinished(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_folder_is_one_process_s_at_a_time_and_free_again_when_that_was_killed(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from fedge.system.files import lock_folder\n"
    code += "with lock_folder(Path(sys.argv[1]), 'taken'): print('mine', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "home")], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(InUseError, match="somebody has it"), lock_folder(tmp_path / "home", "somebody has it"):
            pass
        other.kill()
    with lock_folder(tmp_path / "home", "somebody has it"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StoreError), lock_folder(tmp_path / "file", ""):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_writes_belongs_to_whoever_owns_the_folder(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    write_atomically(tmp_path / "file", b"x")
    found = (tmp_path / "file").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 12346, 0o600)
    with lock_folder(tmp_path / "new" / "home", None):
        pass
    for made in ("new", "new/home", "new/home/lock"):
        assert ((tmp_path / made).stat().st_uid, (tmp_path / made).stat().st_gid) == (12345, 12346), made
