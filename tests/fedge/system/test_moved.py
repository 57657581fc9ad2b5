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

    with pytest.warns(
        FutureWarning, match=r"fedge\.files is fedge\.system\.files now; the old name goes with version 0\.3"
    ):
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


class Base:
    def get_model(self) -> str:
        return "the base's"

    def describe(self) -> str:
        return self.get_model()

    @staticmethod
    def count_steps(n: int) -> int:
        return n


Base = moved.alias_members(serves="get_model", steps_for="count_steps")(Base)  # type: ignore[misc]


def test_a_member_is_found_by_its_old_name() -> None:
    with pytest.warns(FutureWarning, match=r"Base\.serves is get_model now"):
        assert Base().serves() == "the base's"  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"Base\.steps_for is count_steps now"):
        assert Base.steps_for(3) == 3  # type: ignore[attr-defined]


def test_who_overrides_an_old_name_overrides_the_new_one() -> None:
    with pytest.warns(FutureWarning, match=r"Own\.serves is get_model now"):

        class Own(Base):
            def serves(self) -> str:
                return "own, over " + super().serves()  # type: ignore[misc]

    with pytest.warns(FutureWarning, match=r"Own\.serves is get_model now"):
        assert Own().describe() == "own, over the base's"


def test_a_field_of_an_old_name_is_a_field() -> None:
    class Own(Base):
        serves = "a text"

    assert Own.serves == "a text"
    assert Own().describe() == "the base's"


def test_functions_are_found_by_their_old_names() -> None:
    import fedge.tasks
    from coordinator.methods import rounds

    with pytest.warns(FutureWarning, match=r"coordinator\.methods\.rounds\.round_done is .*\.finish_round now"):
        assert rounds.round_done is rounds.finish_round
    with pytest.warns(FutureWarning, match=r"fedge\.tasks\.task_spec is fedge\.tasks\.load_task now"):
        assert fedge.tasks.task_spec is fedge.tasks.load_task
    with pytest.raises(AttributeError, match=r"module 'coordinator\.methods\.rounds' has no attribute 'nothing'"):
        _ = rounds.nothing
