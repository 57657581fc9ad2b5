"""All methods on a frozen deep network: what comes before the cut is computed once for each image, not in each step.

A backbone, MobileNetV3-Small or ResNet-18, learns from images of the training part of CIFAR-10 (JPEG), as in
`deep.py`. The federation has images of the test part, partitioned among 20 devices, and `spoken digits` the recordings
of six speakers, which the backbone sees as grey images of another kind. Devices train with the methods of the product:

  frozen   the backbone up to its last layer is frozen; a perceptron with 32 hidden units learns from its features
  adapted  the last block and the classifier get adapters (`--adapt lora:2`), all before is frozen

This is what `--adapt` does with the whole network in each step, to float tolerance; bytes are the same. Rows are means
over the devices, then over the seeds. Below the table: bytes up and down of all devices, and how much less that is than
full fine-tuning in float32 with as many updates.

    python benchmarks/deeper.py --data DIR --out deeper
    python benchmarks/deeper.py --data DIR --out deeper --part adapted --settings "alpha 0.1" --methods local,fedge
    python benchmarks/deeper.py --data DIR --out deeper-full --network resnet-18 --full --train-on cuda

Runs that are done, the backbone and its features are kept in --out; the same command goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from deep import LARGE, SMALL, backbone, images
from default_method import METHODS, OURS, splits, summarise
from numpy.typing import NDArray
from script import parser_of, progress_of, several
from torch import nn

from coordinator.simulation.compare import compare, compare_runs
from coordinator.simulation.reports.comparison import Comparison
from coordinator.simulation.settings import CompareSettings
from fedge.data import preprocessing
from fedge.data.task import TaskSpec
from fedge.models import build, choice
from fedge.models import network as models
from fedge.system.hardware import Processor
from fedge.tasks import Partitioning, Pool, load_pool, load_task, partition_pool
from fedge.tensors.layout import Codec, to_bytes, unflatten

CUTS: Final[Mapping[str, Mapping[str, str]]] = {
    "mobilenet-v3-small": {"frozen": "classifier.3", "adapted": "features.12"},
    "resnet-18": {"frozen": "fc", "adapted": "layer4"},
}
"""The first layer after the cut."""
TOPS: Final = {"mobilenet-v3-small": "after_block_11", "resnet-18": "after_layer_3"}
SPOKEN: Final = "spoken digits"
SETTINGS: Final[Mapping[str, dict[str, Any]]] = {
    "alpha 0.5": {"partition": "dirichlet", "alpha": 0.5},
    "alpha 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "4 rotations": {"partition": "groups", "alpha": 1.0, "n_groups": 4},
    SPOKEN: {},
}
DEVICES: Final = 20
CHUNK: Final = 256


def after_block_11(task: TaskSpec) -> nn.Module:
    """The last block of MobileNetV3-Small and its classifier, for what comes out of the block before."""
    return top_of(plain("mobilenet-v3-small", task))


def after_layer_3(task: TaskSpec) -> nn.Module:
    """The last stage of ResNet-18 and its head."""
    return top_of(plain("resnet-18", task))


def plain(network: str, task: TaskSpec) -> nn.Module:
    """A whole network for small images with random weights."""
    whole = msgspec.structs.replace(task, model=network, model_options={}, input_shape=(3, 32, 32))
    return build.make_network(whole)


def top_of(whole: Any) -> nn.Module:
    """What comes after the cut of `adapted`."""
    last, head = (whole.layer4, whole.fc) if hasattr(whole, "fc") else (whole.features[12], whole.classifier)
    return nn.Sequential(last, whole.avgpool, nn.Flatten(), head)


# ------------------------------------------------------------------------------------------------------- the data


class Source:
    """The backbone, and what comes out at the cut."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, given.out / given.network
        self.folder.mkdir(parents=True, exist_ok=True)
        asked = {"pretrain": given.pretrain, "epochs": given.epochs}
        size = {**(LARGE if given.full else SMALL), **{name: n for name, n in asked.items() if n}}
        archive, self.pixels = given.data / "cifar10-jpeg.zip", self.folder / "federation.npz"
        if not self.pixels.exists():
            x, y = images(archive, "test", size["federation"])
            np.savez(self.pixels, x=x, y=y)
        self.task = choice.with_network(load_task("arrays", self.pixels), given.network)
        file = backbone(archive, self.folder, self.task, size, given.train_on)
        self.task = choice.with_network(self.task, weights=file)
        layout, model = build.make_initial_model(self.task, 0)
        self.module, self.n_params = build.make_network(self.task).eval(), layout.n_params
        models.load_model(self.module, model, layout)

    def at_the_cut(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the first layer after the cut sees (n, ...) of model inputs."""
        seen: list[torch.Tensor] = []
        layer = self.module.get_submodule(CUTS[self.given.network][self.given.part])
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        with torch.inference_mode():
            for chunk in torch.split(torch.from_numpy(x), CHUNK):
                self.module(chunk)
        hook.remove()
        return torch.cat(seen).numpy()

    def turned(self, turns: int) -> NDArray[np.float32]:
        """The federation's images, turned so many times, at the cut."""
        file = self.folder / f"{self.given.part}-{turns}.npy"
        if not file.exists():
            x = np.rot90(np.load(self.pixels)["x"], turns, axes=(2, 3)).copy()
            np.save(file, self.at_the_cut(preprocessing.preprocess(self.task, x)))
        return np.asarray(np.load(file))

    def partitioned(self, setting: str, seed: int) -> Path:
        """The file of a federation: what devices have at the cut, labels, and the device of each sample."""
        file = self.folder / f"{self.given.part}-{setting.replace(' ', '-')}-{seed}.npz"
        if file.exists():
            return file
        if setting == SPOKEN:
            found = load_pool("spoken-digits", self.given.data / "fsdd")
            grey = preprocessing.preprocess(found.spec, found.x)
            x = self.at_the_cut(np.kron(np.repeat(grey, 3, axis=1), np.ones((2, 2), np.float32)))
            y, user = found.y, found.user
        else:
            y = np.load(self.pixels)["y"]
            numbers = Pool(np.arange(len(y)).reshape(-1, 1, 1), y, self.task)  # one pixel, which turns into itself
            shares = partition_pool(numbers, DEVICES, Partitioning(**SETTINGS[setting]), seed=seed)
            own = [np.concatenate([s.x_train, s.x_val, s.x_test]).ravel() for s in shares]
            x = np.concatenate([self.turned(share.group)[chosen] for share, chosen in zip(shares, own, strict=True)])
            y, user = y[np.concatenate(own)], np.repeat(np.arange(DEVICES), [len(chosen) for chosen in own])
        np.savez(file, x=x, y=y, user=user)
        return file

    def trained(self) -> dict[str, Any]:
        """The network after the cut, its first weights, and what is trained of it."""
        if self.given.part == "frozen":
            return {"model": "mlp"}
        file = self.folder / "top.safetensors"
        top = top_of(self.module)
        layout = models.make_layout(top)
        file.write_bytes(to_bytes(unflatten(models.dump_model(top, layout), layout)))
        return {"model": f"deeper:{TOPS[self.given.network]}", "weights": file, "adapt": self.given.adapt}


# ------------------------------------------------------------------------------------------------------ the table


def measure(source: Source, setting: str) -> Comparison:
    """All methods on one setting; each seed has devices of its own."""
    given, runs, found = source.given, [], None
    for seed in given.seeds:
        settings = CompareSettings(
            task="arrays",
            data=source.partitioned(setting, seed),
            partition="natural",
            methods=",".join(given.methods),
            seeds=str(seed),
            rounds=given.rounds,
            learning_rate=given.learning_rate,
            codec=given.codec,
            global_test=0.0,
            evaluate_every=1000,
            hardware="none",
            train_on=given.train_on,
            jobs=given.jobs,
            **source.trained(),
        )
        found = compare(settings, given.out, progress_of(setting))
        runs.extend(found.runs)
    assert found is not None
    return compare_runs(found.scenario, runs, given.methods, given.seeds, given.methods[0], None)


def row(setting: str, found: Comparison) -> str:
    """Accuracy in %, and the default method minus the best other in points, by seed."""
    ours = next(m for m in found.methods if m.method == OURS)
    assert ours.to_best_other is not None
    cells = [f"{100 * m.accuracy.mean:.1f}" for m in found.methods]
    each = " ".join(f"{100 * d:+.1f}" for d in ours.to_best_other.seeds)
    return f"| {setting} | {' | '.join(cells)} | {100 * ours.to_best_other.mean:+.2f} [{each}] {ours.best_other} |"


def bytes_row(found: Comparison, whole: int, way: str) -> str:
    """MB of all devices, and the part of what float32 of the whole network takes."""
    cells = []
    for method in found.methods:
        used, updates = getattr(method, f"bytes_{way}").mean, found.scenario.rounds * len(found.runs[0].devices)
        cells.append(f"{used / 1e6:.1f} (1/{4 * whole * updates / used:.0f})" if used else "-")
    return f"| MB {way} | {' | '.join(cells)} | |"


def main() -> None:
    """Make the backbone and what it computes, do the runs that are missing, print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10-jpeg.zip and fsdd")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--network", choices=list(CUTS), default="mobilenet-v3-small")
    parser.add_argument("--part", choices=("frozen", "adapted"), default="frozen")
    parser.add_argument("--adapt", default="lora:2", help="what is trained after the cut of adapted (default lora:2)")
    parser.add_argument("--settings", type=several(), default=list(SETTINGS), metavar="A,B")
    parser.add_argument("--methods", type=several(), default=list(METHODS), metavar="A,B")
    parser.add_argument("--seeds", type=several(int), default=[60, 61])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--codec", type=Codec, choices=list(Codec), default=Codec.INT8, help="(default int8+zstd)")
    parser.add_argument("--pretrain", type=int, help="images that the backbone learns from (default 20,000)")
    parser.add_argument("--epochs", type=int, help="how often it sees them (default 4)")
    parser.add_argument("--full", action="store_true", help="all images, and a backbone of 60 epochs: for a GPU")
    parser.add_argument("--train-on", type=Processor, choices=list(Processor), default=Processor.CPU)
    parser.add_argument("--jobs", type=int, help="runs at a time (default: a core each)")
    given = parser.parse_args()
    if OURS not in given.methods:
        parser.error(f"--methods needs {OURS}, with which the others are compared")
    source = Source(given)
    print(f"| setting | {' | '.join(given.methods)} | fedge - best other |\n{'|---' * (len(given.methods) + 2)}|")
    comparisons = {}
    for setting in given.settings:
        comparisons[setting] = measure(source, setting)
        print(row(setting, comparisons[setting]), flush=True)
    last = next(iter(comparisons.values()))
    print(bytes_row(last, source.n_params, "up"), bytes_row(last, source.n_params, "down"), sep="\n")
    print(summarise(comparisons), splits(comparisons), sep="\n")


if __name__ == "__main__":
    main()
