"""What `make release` counts as wrong; it builds and installs for minutes, which no test does."""

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.release import LEFT_OUT, Checks, differences, environments, names_in, needs
from tests.support.requirements import EXTRAS

WANTED = {"fedge/py.typed", "fedge/errors.py"}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (WANTED | {"fedge-0.2.0.dist-info/METADATA"}, ""),
        ({"fedge/errors.py"}, "missing: fedge/py.typed"),
        (WANTED | {"tests/test_layout.py"}, "stray: tests/test_layout.py"),
        (WANTED | {"fedge/PKG-INFO"}, "stray: fedge/PKG-INFO"),
        (set(), "missing: fedge/errors.py\nmissing: fedge/py.typed"),
    ],
)
def test_a_wheel_holds_what_is_committed_and_nothing_else(found: set[str], wrong: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel := tmp_path / "fedge-0.2.0-py3-none-any.whl", "w") as archive:
        for name in found:
            archive.writestr(name, "")
    assert differences(names_in(wheel), WANTED) == wrong


def test_an_sdist_is_looked_into_below_its_folder(tmp_path: Path) -> None:
    (tmp_path / "errors.py").touch()
    with tarfile.open(sdist := tmp_path / "fedge-0.2.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "errors.py", "fedge-0.2.0/fedge/errors.py")
    assert names_in(sdist) == {"fedge/errors.py"}


@pytest.mark.parametrize("each", [False, True])
def test_every_extra_is_tried_once_or_left_out_and_torch_comes_to_none_that_has_no_need_of_it(each: bool) -> None:
    tried = environments(each=each)
    assert sorted([*(extra for extras in tried for extra in extras), *LEFT_OUT]) == sorted(EXTRAS)
    for extras in tried:
        assert len({"torch" in needs(extra) for extra in extras}) == 1
    assert sum(len(extras) > 1 for extras in tried) == (0 if each else 1)


@pytest.mark.parametrize(
    ("code", "failed"), [("print('right')", 0), ("print('wrong')", 1), ("print('right'); raise SystemExit(3)", 1)]
)
def test_a_command_must_end_with_0_and_print_what_is_wanted(
    code: str, failed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = Checks()
    assert checks.run("a program", sys.executable, "-c", code, cwd=tmp_path, wanted="right") == (not failed)
    assert (checks.failed, checks.passed) == (failed, 1 - failed)
    assert capsys.readouterr().out.startswith("FAILED   a program (" if failed else "ok       a program (")
