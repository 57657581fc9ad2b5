import json
from pathlib import Path

import numpy as np
import pytest

from fedge.commands.cli import main


def test_it_tells_what_a_task_and_a_network_are_and_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--task", "digits"]) == 0
    told = capsys.readouterr().out
    assert "mlp, 2,410 trained weights, 0.01 MB whole" in told
    assert "1797 read" in told
    assert "remark" not in told


@pytest.mark.parametrize(("free", "says"), [("0.1", "too much for the devices (0.1 GB free)"), ("8", "")])
def test_a_network_is_compared_with_the_memory_of_the_devices(
    free: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--task", "digits", "--ram-gb", free, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ram_gb"] > 0.1
    assert any(says in finding["what"] for finding in found["findings"]) is bool(says)


def test_remarks_and_faults_are_told_as_json_and_by_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nets_to_check.py").write_text(
        "from torch import nn\n"
        "def gelu(): return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))\n"
        "def two(): return nn.Linear(4, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).random((20, 4)), y=np.arange(20) % 2, classes=[*"abc"])
    words = ["check", "--task", "arrays", "--data", str(tmp_path / "d.npz"), "--json"]
    assert main([*words, "--model", "nets_to_check:gelu"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["what"].partition(" (")[0] for finding in found] == [
        "devices cannot be told apart by a ReLU profile",
        "no sample is of c",
    ]
    assert main([*words, "--model", "nets_to_check:two"]) == 2
    assert json.loads(capsys.readouterr().out)["findings"][0]["stops"]


def test_a_devices_own_data_are_checked_against_the_task_of_its_federation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", "--out", str(tmp_path / "s"), "--devices", "2"]) == 0
    words = ["check", "--task", str(tmp_path / "s/task.json"), "--data"]
    assert main([*words, str(tmp_path / "s/cam1.npz")]) == 0
    np.savez(tmp_path / "odd.npz", x=np.zeros((4, 9, 9)), y=np.arange(4))
    assert main([*words, str(tmp_path / "odd.npz")]) == 2
    assert "shape" in capsys.readouterr().err


def test_samples_are_counted_by_device_and_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--out", str(tmp_path / "s"), "--devices", "2"]) == 0
    sources = [str(tmp_path / f"s/cam{n}.npz") for n in (1, 2)]
    capsys.readouterr()
    assert main(["check", "--task", "digits", *sources]) == 0
    told = capsys.readouterr().out
    assert all(f"{source}  " in told for source in sources)
    assert main(["check", "--task", "digits", *sources, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["samples"]
    assert [*counts] == sources
    assert sum(counts[sources[0]].values()) > 100


def test_data_that_are_not_there_are_told_with_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.gif").touch()
    monkeypatch.chdir(tmp_path)
    for data, told in (
        ("photo", f"there is no folder or .zip of images at {tmp_path / 'photo'} (did you mean photos?)"),
        ("a/b", f"not even the folder {tmp_path / 'a'} exists"),
        ("photos", "there is no image in it, but a.gif"),
    ):
        assert main(["check", "--task", "image-folder", "--data", data]) == 2
        assert told in capsys.readouterr().err


TASK_OF_TOKENS = """
import numpy as np
from torch import nn

from fedge.data.task import TaskSpec
from fedge.tasks import DeviceData


class Tokens:
    def spec(self, data):
        return TaskSpec(name="tokens", classes=("no", "yes"), input_shape=(5,), model="task_of_tokens:Net")

    def device_data(self, source, *, seed):
        x = np.random.default_rng(seed).integers(0, 30, (40, 5)).astype(np.float32)
        return DeviceData.from_samples(x, (x[:, 0] > 14).astype(np.int64), seed=seed)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.relu, self.last = nn.Embedding(30, 4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.relu(self.words(x.long()).mean(1)))
"""


def test_a_task_of_ones_own_is_tried_with_its_own_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task_of_tokens.py").write_text(TASK_OF_TOKENS)
    (tmp_path / "words").touch()
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--task", "task_of_tokens:Tokens"]
    np.savez(tmp_path / "d.npz", x=np.arange(600).reshape(120, 5) % 30, y=np.arange(120) % 2)
    arrays = ["--task", "arrays", "--model", "task_of_tokens:Net", "--data", str(tmp_path / "d.npz")]
    for more in ([*own, "--data", str(tmp_path / "words")], [*own, str(tmp_path / "words")], own, arrays):
        assert main(["check", *more]) == 0
        told = capsys.readouterr()
        assert "WRONG" not in told.out
        assert told.out.count("remark") == 0
        assert told.err.splitlines()[-3:] == [
            "build the network, and ask it about a few samples",
            "train the network on these samples",
            "export the network to ONNX, which takes a minute or more with a large one",
        ]


def test_check_says_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The graph that is kept on disk held the first build's numbers, so the first run had nothing to say."""
    (tmp_path / "net_with_a_list.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers, self.last = [nn.Linear(64, 8), nn.ReLU()], nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.layers[1](self.layers[0](x.flatten(1))))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    for _ in range(2):
        assert main(["check", "--task", "digits", "--model", "net_with_a_list:Net"]) == 2
        told.append(capsys.readouterr().out)
    assert "WRONG" in told[0]
    assert "since no state dict has layers[0].weight, layers[0].bias" in told[0]
    assert told[0] == told[1]
