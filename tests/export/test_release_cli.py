"""`fedge release`: what it signs, a device trusts."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from deploy.updates.trust import Trust, install_root
from export.release_cli import release
from export.signing import Repository
from fedge.bundle.manifest import decode_manifest, read_manifest
from fedge.errors import ConfigError
from tests.deploy.bundles import other_gate, variant


def run(*arguments):
    result = CliRunner().invoke(release, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_from_init_to_a_device_that_trusts(tmp_path):
    repo = tmp_path / "repo"
    assert run("init", repo)[0] == 0
    code, out = run("add", repo, variant(tmp_path / "bundle", release=3), "--json")
    assert (code, json.loads(out)["target"]) == (0, "3/manifest.json")
    assert run("rotate", repo, "timestamp")[0] == 0
    assert run("renew", repo)[0] == 0

    record = json.loads(run("show", repo, "--json")[1])
    assert record["targets"] == ["3/manifest.json"]
    assert sorted(record["expires"]) == ["root", "snapshot", "targets", "timestamp"]
    install_root(tmp_path / "home", (repo / "metadata" / "1.root.json").read_bytes())
    files = {name: path.read_bytes() for name, path in Repository(repo).find_files("3/manifest.json").items()}
    assert Trust(tmp_path / "home").verify_manifest(files, "3/manifest.json")


def test_bundles_of_one_release_have_names(tmp_path):
    repo = tmp_path / "repo"
    run("init", repo)
    run("add", repo, variant(tmp_path / "1", release=1), "--name", "cam1")
    run("add", repo, variant(tmp_path / "2", release=1, gate=other_gate), "--name", "cam2")

    assert Repository(repo).list_targets() == ["1/cam1.json", "1/cam2.json"]
    assert "1/cam1.json" in run("show", repo)[1]


def test_the_newest_bundle_of_a_home_under_a_number_of_its_own(tmp_path):
    repo, home = tmp_path / "repo", tmp_path / "home"
    for number in (9, 10):
        variant(home / "bundles" / str(number), release=number)
    run("init", repo)
    assert run("add", repo, home)[1] == "10/manifest.json\n"
    assert run("add", repo, home, "--number", 12)[1] == "12/manifest.json\n"
    repository = Repository(repo)
    assert repository.list_releases() == [10, 12]
    install_root(tmp_path / "device", repository.read_root())
    files = {name: path.read_bytes() for name, path in repository.find_files("12/manifest.json").items()}
    trusted = decode_manifest(Trust(tmp_path / "device").verify_manifest(files, "12/manifest.json"))
    before = read_manifest(home / "bundles" / "10")[0]
    assert trusted == msgspec.structs.replace(before, release=12)


def test_no_repository_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="fedge release init"):
        run("show", tmp_path / "nothing")


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "precious").write_text("x")

    with pytest.raises(ConfigError, match="not empty"):
        run("init", tmp_path)

    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_there_are_four_roles(tmp_path):
    run("init", tmp_path / "repo")
    assert run("rotate", tmp_path / "repo", "janitor")[0] == 2


def test_a_bundle_that_is_not_there_is_wrong_usage(tmp_path):
    run("init", tmp_path / "repo")
    with pytest.raises(ConfigError, match="no bundle at"):
        run("add", tmp_path / "repo", tmp_path / "nowhere")
