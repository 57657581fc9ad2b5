"""The file of weights that a task names."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import weights
from fedge.models.choice import with_network
from fedge.models.weights import (
    find_device_weights,
    find_weights,
    has_weights,
    log_fresh_head,
    read_weights,
    store_weights,
)
from fedge.system.files import compute_digest
from fedge.tensors.layout import Layout, TensorInfo, to_bytes
from tests.deploy.faults import no_room

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(4,), model="mlp", model_options={"hidden": 3})
DATA = to_bytes({"head.weight": np.zeros((3, 3), np.float32), "head.bias": np.zeros(3, np.float32)})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for known in (weights._held, weights._whole):
        known.clear()
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "w.safetensors").write_bytes(DATA)
    return tmp_path / "w.safetensors"


def test_a_task_names_its_weights_by_digest(file: Path) -> None:
    task = with_network(TASK, None, file)
    assert task.model_options["hidden"] == 3, "it has the same network"
    ref = find_weights(task)
    assert ref is not None
    assert (ref.digest, ref.size_bytes) == (compute_digest(DATA), len(DATA))
    assert task.compute_fingerprint() != TASK.compute_fingerprint()
    assert read_weights(ref.digest) == DATA
    assert find_weights(TASK) is None


def test_devices_need_them_where_something_is_frozen(file: Path) -> None:
    assert find_device_weights(with_network(TASK, None, file)) is None
    assert find_device_weights(with_network(TASK, None, file, "head")) == find_weights(with_network(TASK, None, file))


def test_another_network_has_other_options(file: Path) -> None:
    task = with_network(with_network(TASK, None, file, "head"), "cnn")
    assert (task.model, task.model_options) == ("cnn", {})
    assert with_network(TASK) == TASK


def test_one_of_our_networks_is_named_without_torch() -> None:
    """By the processes beside a coordinator, too, which have its settings."""
    code = "import sys; from fedge.tasks import load_task; from fedge.models.choice import with_network\n"
    code += "with_network(load_task('digits'), 'cnn'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_adapted_without_weights() -> None:
    with pytest.raises(ConfigError, match="--weights"):
        with_network(TASK, None, None, "lora")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.safetensors cannot be read"):
        with_network(TASK, None, tmp_path / "none.safetensors")


def test_what_is_not_here_or_damaged_is_said(cache: Path) -> None:
    with pytest.raises(ConfigError, match="not here"):
        read_weights("0" * 64)
    digest = store_weights(DATA)
    assert has_weights(digest)
    weights._whole.clear()
    (path,) = cache.glob("**/*.safetensors")
    path.write_bytes(DATA[:-1])
    assert not has_weights(digest)
    with pytest.raises(ConfigError, match="damaged"):
        read_weights(digest)
    assert store_weights(DATA) == digest, "and it is mended when the weights come again"
    assert read_weights(digest) == DATA


def test_where_nothing_can_be_written_the_process_holds_them(cache: Path) -> None:
    with no_room():
        digest = store_weights(DATA)
    assert not list(cache.glob("**/*.safetensors"))
    assert read_weights(digest) == DATA


@pytest.mark.parametrize(("n_classes", "told"), [(2, True), (3, False)])
def test_a_head_that_begins_anew_is_logged(
    n_classes: int, told: bool, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    infos = [
        TensorInfo(name=f"head.{n}", shape=s, layer="head")
        for n, s in (("weight", (n_classes, 3)), ("bias", (n_classes,)))
    ]
    with caplog.at_level(logging.WARNING):
        log_fresh_head(with_network(TASK, None, file), Layout(tensors=tuple(infos)))
    assert ("fresh_head" in caplog.text) is told
