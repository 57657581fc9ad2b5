"""Texts become the same tokens everywhere, and a federation learns from them."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import deploy
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from fedge.data.preprocessing import preprocess
from fedge.data.task import Preprocessing
from fedge.data.text import Text, make_tokens
from fedge.errors import ConfigError
from fedge.models.build import make_network
from fedge.system.loading import register_object
from fedge.tasks import Task, load_task, read_device_data

RNG = np.random.default_rng(0)


def crc(gram: str, buckets: int) -> int:
    return 1 + zlib.crc32(gram.encode()) % (buckets - 1)


def test_tokens_by_hand() -> None:
    how = Text(length=7, buckets=100)
    found = make_tokens(how, np.array(["Warm, dry air", "", "a " * 9]))
    wanted = [crc(gram, 100) for gram in ("warm", "dry", "air", "warm dry", "dry air")]
    assert found[0].tolist() == [*wanted, 0, 0]
    assert found[1].tolist() == [0] * 7
    assert found[2].tolist() == [crc("a", 100)] * 7
    letters = make_tokens(Text(length=4, buckets=100, words=1, characters=3), np.array(["ab"]))
    assert letters[0].tolist() == [crc(gram, 100) for gram in ("ab", "#<ab", "#ab>")] + [0]


def write_texts(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Reports of which each has one of three telling words."""
    y = RNG.integers(0, 3, n)
    telling = np.array(["leak", "noise", "heat"])[y]
    other = RNG.integers(0, 50, (n, 6))
    return np.array([" ".join([f"w{k}" for k in row] + [word]) for row, word in zip(other, telling, strict=True)]), y


def test_texts_are_learned_and_bundles_take_texts_and_tokens(tmp_path: Path) -> None:
    x, y = write_texts(250)
    task = Task.from_arrays(x, np.array(["leak", "noise", "heat"])[y])
    assert (task.spec.model, task.spec.input_shape) == ("bag", (256,))
    how = {"devices": 3, "rounds": 6, "optimizer": "adam", "learning_rate": 0.03, "hardware": "none"}
    scenario = Scenario(task=register_object(task), **how)  # type: ignore[arg-type]
    found = simulate(scenario, "fedavg", {}, 0, tmp_path, lambda _: None, "fedavg")
    assert found.accuracy > 0.85
    runtime = deploy.load(next(tmp_path.rglob("bundles/1")))
    said = runtime.predict(np.array(["a leak at w3", "much heat"]))
    assert said.class_name == ("leak", "heat")
    assert runtime.predict("a leak at w3").class_name == ("leak",)
    tokens = preprocess(task.spec, np.array(["a leak at w3", "much heat"]))
    assert np.array_equal(runtime.predict(tokens).probabilities, said.probabilities)


def test_a_file_of_texts_is_a_task_and_a_devices_data(tmp_path: Path) -> None:
    x, y = write_texts(20)
    np.savez(tmp_path / "texts.npz", x=x, y=y)
    task = load_task("arrays", tmp_path / "texts.npz")
    found = read_device_data(task, tmp_path / "texts.npz", seed=0)
    assert sorted(map(tuple, found.labelled[0])) == sorted(map(tuple, make_tokens(Text(), x).astype(float)))
    np.savez(tmp_path / "numbers.npz", x=np.zeros((4, 3)), y=[0, 1, 2, 0])
    with pytest.raises(ConfigError, match="the task takes"):
        read_device_data(task, tmp_path / "numbers.npz", seed=0)


def test_texts_are_refused_by_a_task_of_numbers() -> None:
    task = Task.from_arrays(np.eye(4), [0, 1, 0, 1]).spec
    with pytest.raises(ConfigError, match="samples must be numbers"):
        preprocess(task, np.array(["warm"]))


def test_tokens_in_memory_are_not_scaled() -> None:
    task = Task.from_arrays(RNG.integers(0, 50, (20, 8)), np.arange(20) % 2, model="bag")
    assert task.spec.preprocessing == Preprocessing()
    tokens = np.array([[1, 2, 0, 0, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0, 0, 10**6]])
    network = make_network(task.spec).eval()
    found = network(torch.from_numpy(preprocess(task.spec, tokens)))
    assert found.shape == (2, 2), "a token beyond the buckets is the last one"
    alone = network(torch.tensor([[2.0, 0, 0, 0, 0, 0, 0, 1]]))
    torch.testing.assert_close(alone, found[:1], msg="neither order nor padding counts")


def test_samples_of_four_axes_reach_a_bundle(tmp_path: Path) -> None:
    """Such as short films: channels, pictures, height, width."""
    x = RNG.random((60, 1, 3, 6, 6)).astype(np.float32)
    task = Task.from_arrays(x, np.arange(60) % 2, model=Films)
    scenario = Scenario(task=register_object(task), devices=2, rounds=1, hardware="none")
    assert simulate(scenario, "fedavg", {}, 0, tmp_path, lambda _: None, "fedavg").bundles == 2
    assert deploy.load(next(tmp_path.rglob("bundles/1"))).predict(x[:3]).probabilities.shape == (3, 2)


class Films(torch.nn.Sequential):
    """A network for films."""

    def __init__(self) -> None:
        layers = torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(216, 2)
        super().__init__(*layers)
