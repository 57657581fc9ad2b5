"""Import paths of version 0.1 lead to the same objects, with a warning that says where they are now."""

import importlib
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest

from fedge.system import moved


def test_every_old_path_leads_to_a_module_that_exists() -> None:
    assert [old for old, new in moved.NEW.items() if find_spec(new) is None] == []
    with warnings.catch_warnings(action="ignore"):  # its parent may be an old name, too
        assert [old for old in moved.NEW if find_spec(old) is None] == []


def test_an_old_path_is_the_module_itself_and_says_where_it_is() -> None:
    sys.modules.pop("fedge.files", None)
    from fedge.system import files

    with pytest.warns(FutureWarning, match=r"fedge\.files is fedge\.system\.files now: import it from there"):
        old = importlib.import_module("fedge.files")
    assert old is files
    assert files.__name__ == files.__spec__.name == "fedge.system.files"


def test_a_room_gives_the_names_of_the_module_that_it_was() -> None:
    import fedge.bundle
    from fedge.bundle.manifest import Bundle
    from fedge.data.task import INPUT

    with pytest.warns(FutureWarning, match=r"fedge\.bundle\.Bundle is fedge\.bundle\.manifest\.Bundle now"):
        assert fedge.bundle.Bundle is Bundle
    with pytest.warns(FutureWarning, match=r"fedge\.bundle\.INPUT is fedge\.data\.task\.INPUT now"):
        assert fedge.bundle.INPUT == INPUT
    with pytest.raises(AttributeError, match=r"module 'fedge\.bundle' has no attribute 'nothing'"):
        _ = fedge.bundle.nothing


@pytest.mark.process
@pytest.mark.parametrize("name", ["fedge", "fedge.cli"])
def test_the_command_runs_as_a_module_by_both_names(name: str) -> None:
    ran = subprocess.run([sys.executable, "-m", name, "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("fedge")


def test_a_module_comes_before_a_name_of_the_module_that_the_room_was() -> None:
    from fedge.models import build

    assert build.__name__ == "fedge.models.build"
