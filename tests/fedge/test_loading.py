from pathlib import Path

import pytest

from fedge.errors import ConfigError
from fedge.loading import load_object


def test_loads_what_a_path_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_network.py").write_text("def factory(task): return task\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object("my_network:factory")(3) == 3


@pytest.mark.parametrize(
    "path", ["no_such_module_here:x", "fedge.errors:no_such", ":x", "fedge.errors:", "fedge..errors:x"]
)
def test_a_wrong_path_is_the_users_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:name"):
        load_object(path)
