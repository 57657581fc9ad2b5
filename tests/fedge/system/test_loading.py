import gc
from pathlib import Path

import pytest

from fedge.errors import ConfigError
from fedge.system.loading import (
    describe_error,
    find_code,
    is_registered,
    load_object,
    load_role,
    make_missing_package_error,
    register_object,
)


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


def test_a_module_that_fails_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="my_broken_module fails with ZeroDivisionError: division by zero"):
        load_object("my_broken_module:x")


def test_an_object_of_this_process_is_found_by_its_name_for_as_long_as_there_is_one() -> None:
    class Net:
        pass

    name = register_object(Net)
    assert is_registered(name)
    assert load_object(name) is Net
    assert register_object(Net) == name
    old = name

    class Net:  # as a notebook's cell that is run again
        pass

    assert register_object(Net) != old, "what was made for the old one is not taken for the new one"
    del Net
    gc.collect()
    with pytest.raises(ConfigError, match="was made in another Python process"):
        load_object(old)


def test_a_name_of_a_module_is_not_of_an_object() -> None:
    assert not is_registered("fedge.errors:ConfigError")
    assert not is_registered(None)


def test_what_a_role_lacks_is_said_with_its_extra() -> None:
    missing = ModuleNotFoundError("No module named 'sklearn'", name="sklearn.cluster")
    assert "fedge.simulate needs the package sklearn: in fedge's clone, pip install '.[coordinator]'" in str(
        make_missing_package_error(missing, "fedge.simulate", "coordinator")
    )
    ours = ModuleNotFoundError("No module named 'coordinator.x'", name="coordinator.x")
    assert make_missing_package_error(ours, "x", "y") is ours
    assert load_role("fedge.errors", "x", "y").ConfigError is ConfigError
    with pytest.raises(ConfigError, match=r"x needs the package no_such_package: .*\[y\]"):
        load_role("no_such_package", "x", "y")


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("fedge", ()),
        ("task.json", ()),
        ("fedepc:clustering=k-means", ()),
        ("os:abort", ("os:abort",)),
        ("a.b:C+ft", ("a.b:C",)),
        ("fedavg, a.b:C:option=1,a.b:C+ft:option=2 , c:D", ("a.b:C", "c:D")),
        ("a:b.c", ()),
        ("a b:c", ()),
    ],
)
def test_code_that_a_setting_names(setting: str, code: tuple[str, ...]) -> None:
    assert find_code(setting) == code


@pytest.mark.parametrize("path", ["my_canary:x=1", "my_canary:a.b", "my_canary:", "my_canary", "my_canary:x:y"])
def test_what_is_no_path_imports_nothing(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_canary.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"write package\.module:name"):
        load_object(path)


def test_what_a_users_code_raised_is_one_line_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_failing_network.py").write_text("def net():\n    int('\\x1b[1mseven\\x1b[0m\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="seven") as raised:
        load_object("my_failing_network:net")()
    told = describe_error(raised.value)
    assert told.startswith("ValueError: invalid literal for int()")
    assert told.endswith("(my_failing_network.py, line 2)")
    assert "\x1b[" not in told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("weights"), "KeyError: 'weights'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("\n\x1b[96mThis is step 1/3\x1b[0m\nNext steps: ..."), "RuntimeError: This is step 1/3"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 300),
    ],
)
def test_the_rest_of_a_long_reason_is_left_out(error: Exception, told: str) -> None:
    assert describe_error(error) == told
