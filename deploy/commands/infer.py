"""`fedge infer`: predict with a bundle from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from deploy.inference.engines import (
    APPROXIMATE,
    ModeOption,
    ProviderOption,
    ProviderOptions,
    RuntimeOption,
    ThreadsOption,
    make_engine_options,
)
from deploy.inference.prediction import Prediction, join_predictions
from deploy.inference.runtime import Runtime, load_runtime
from fedge.data import images, npz, tables
from fedge.data.preprocessing import load_image, preprocess
from fedge.data.problems.labels import require_class_numbers
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, UpdateRejected, raise_as
from fedge.settings import resolve, settings_options
from fedge.system.help import Command, json_lines_option
from fedge.system.text import Heading, escape_controls

MAX_ROWS = 20
"""Most samples of an input that the table shows; --json has all of them."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one input: raw (n, ...), with class numbers (n,) if known, and paths if they are images."""

    x: NDArray[Any]
    y: NDArray[Any] | None = None
    files: tuple[str, ...] = ()


class InferSettings(Struct, frozen=True, kw_only=True):
    """Section [infer] of the configuration."""

    batch: Annotated[int, Meta(ge=1), Heading.PREDICTION, "One call has this many samples."] = 1
    repeat: Annotated[
        int, Meta(ge=1), Heading.PREDICTION, "The prediction is repeated this many times, to measure latency."
    ] = 1
    runtime: RuntimeOption = "auto"
    mode: ModeOption = "normal"
    threads: ThreadsOption = 1
    provider: ProviderOption = "auto"
    provider_options: ProviderOptions = ""


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path(path_type=Path))
@settings_options(InferSettings, "infer")
@json_lines_option("input")
def infer(bundle: Path, inputs: tuple[Path, ...], config: Path | None, as_json: bool, **flags: object) -> None:
    """Predict with an installed bundle; needs no torch.

    INPUT is a PNG or JPEG picture, a folder or .zip of pictures, an .npy array (one sample or a batch), an .npz file
    with x, or a .csv or .parquet of a task with a schema. The accuracy is shown if y in the .npz, class folders or the
    schema's column tell the classes.

    Each sample is shown with its class and probability, and with the weight of each model in the mixture. In brackets
    is its calibrated energy: the lower, the surer the model.

    Examples:
      fedge infer bundles/3 photo.png
      fedge infer bundles/3 photos --json
      fedge infer bundles/3 sample.npy --repeat 1000
      fedge infer bundles/3 test.npz --provider tensorrt --provider-options trt_fp16_enable=1

    Exit codes: 0 done, 2 no bundle there, an input that cannot be read or a provider that does not run here, 5 the
    bundle is not what its manifest says, or gives no numbers.
    """
    settings = resolve(InferSettings, "infer", config, flags)
    how = make_engine_options(
        settings.runtime, settings.mode, settings.threads, settings.provider, settings.provider_options
    )
    runtime = load_runtime(bundle, how)
    for path in inputs:
        samples = _read(runtime, path)
        with raise_as(ConfigError, str(path), on=ConfigError):
            preprocess(runtime.task, samples.x)  # all at once, since an error in a batch would count samples from 0
        answers, calls_ms = _predict(runtime, samples.x, settings.batch, settings.repeat)
        _require_answers(runtime, bundle, answers)
        if as_json:
            click.echo(msgspec.json.encode(_make_record(runtime, path, answers, calls_ms, samples)).decode())
        else:
            click.echo("\n".join(_render_table(runtime, path, answers, calls_ms, samples)))


def _read(runtime: Runtime, path: Path) -> Samples:
    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".zip":
        return _read_pictures(runtime.task, path)
    if suffix in images.SUFFIXES:
        return Samples(load_image(runtime.task, path)[np.newaxis])
    if suffix in tables.SUFFIXES:
        rows = tables.read_table(tables.get_schema(runtime.task), path, labelled=False)
        return Samples(rows["x"], rows.get("y"))
    if suffix not in {".npy", ".npz"}:
        raise ConfigError(f"cannot read {path}: use .png, .jpg, a folder or .zip of them, .npy, .npz, .csv or .parquet")
    if suffix == ".npy":
        return Samples(runtime.add_batch_axis(npz.load_array(path)))
    loaded = npz.load_arrays(path, ("x", "y"))
    if "x" not in loaded:
        raise ConfigError(f"{path} has no array x, the samples")
    x, y = runtime.add_batch_axis(loaded["x"]), loaded.get("y")
    return Samples(x, None if y is None else require_class_numbers(y, len(x), runtime.task.n_classes, f"{path}: y"))


def _read_pictures(task: TaskSpec, source: Path) -> Samples:
    """Load the pictures in a folder or .zip, with labels if the pictures lie in class folders."""
    names = images.list_images(source, labelled=False)
    y = images.get_labels(names, task.classes) if images.has_classes(names, task.classes) else None
    return Samples(images.load_images(task, source, names), y, tuple(names))


def _predict(runtime: Runtime, x: NDArray[Any], batch: int, repeat: int) -> tuple[Prediction, list[float]]:
    """Return the predictions, and the wall time of each call in ms."""
    if len(x) == 0:
        raise ConfigError("the input holds no sample")
    calls = [runtime.predict(x[i : i + batch]) for _ in range(repeat) for i in range(0, len(x), batch)]
    last = calls[len(calls) - len(calls) // repeat :]
    return join_predictions(last), [call.latency_ms for call in calls]


def _require_answers(runtime: Runtime, bundle: Path, answers: Prediction) -> None:
    """Refuse a bundle whose answers are not finite, or uniform for all samples because no candidate is usable.

    Raises:
        UpdateRejected: the bundle is refused; the text says which part of it is to blame.
    """
    usable = np.isfinite(answers.energies)
    if usable.any() and all(np.isfinite(each).all() for each in answers.answers):
        return
    names = [c.name for k, c in enumerate(runtime.manifest.candidates) if not usable[:, k].any()]
    blamed = f"candidate {', '.join(names)}" if names else "the gate, or the prior of a class"
    raise UpdateRejected(
        f"{bundle} has no answer: {blamed} gives numbers that are not finite; make the bundle anew, or install an "
        "earlier release"
    )


def _compute_class_accuracies(task: TaskSpec, answers: Prediction, y: NDArray[Any]) -> dict[str, tuple[int, float]]:
    """Return the number of samples and the accuracy for each class that occurs."""
    right = answers.class_index == y
    own = {name: y == number for number, name in enumerate(task.classes)}
    return {name: (int(those.sum()), float(right[those].mean())) for name, those in own.items() if those.any()}


def _make_record(
    runtime: Runtime, path: Path, answers: Prediction, calls_ms: list[float], samples: Samples
) -> dict[str, Any]:
    names = [candidate.name for candidate in runtime.manifest.candidates]
    n, y = len(answers.class_index), samples.y
    by_class = {} if y is None else _compute_class_accuracies(runtime.task, answers, y)
    return {
        "input": escape_controls(str(path)),
        "bundle": runtime.digest,
        "engine": runtime.engine,
        "mode": runtime.mode,
        "providers": list(runtime.providers),
        "n": n,
        "accuracy": None if y is None else float((answers.class_index == y).mean()),
        "by_class": {name: {"n": count, "accuracy": share} for name, (count, share) in by_class.items()},
        "files": [escape_controls(file) for file in samples.files],
        "predictions": answers.class_index.tolist(),
        "class_names": answers.class_name,
        "probability": answers.probabilities.max(axis=1).tolist(),
        "weights": dict(zip(names, answers.weights.mean(axis=0).tolist(), strict=True)),
        "energies": dict(zip(names, _compute_mean_energies(answers), strict=True)),
        "by_sample": {
            "probabilities": answers.probabilities.tolist(),
            "weights": answers.weights.tolist(),
            "energies": answers.energies.tolist(),
        },
        "latency_ms": float(np.median(calls_ms)),
        "latency_p99_ms": float(np.percentile(calls_ms, 99)),
        "imported_torch": "torch" in sys.modules,
    }


def _compute_mean_energies(answers: Prediction) -> list[float | None]:
    """Return each candidate's mean energy over the samples on which it was usable, or None."""
    usable = np.isfinite(answers.energies)
    total = np.where(usable, answers.energies, 0).sum(axis=0)
    return [float(t / n) if n else None for t, n in zip(total, usable.sum(axis=0), strict=True)]


def _render_table(
    runtime: Runtime, path: Path, answers: Prediction, calls_ms: list[float], samples: Samples
) -> Iterator[str]:
    """Yield a line per sample (class, probability, weights, energies, file), then the accuracy."""
    names = [candidate.name for candidate in runtime.manifest.candidates]
    width = max(len("class"), *map(len, runtime.task.classes))
    n = len(answers.class_index)
    yield f"{path}: {n} sample{'s' if n > 1 else ''}"
    yield f"  {'class':<{width}}  probability  " + "  ".join(f"{name[:18]:>18}" for name in names)
    for i in range(min(n, MAX_ROWS)):
        index = answers.class_index[i]
        mixed = zip(answers.weights[i], answers.energies[i], strict=True)
        file = f"  {escape_controls(samples.files[i])}" if samples.files else ""
        yield (
            f"  {runtime.task.classes[index]:<{width}}  {answers.probabilities[i, index]:>11.4f}  "
            + "  ".join(f"{f'{weight:.3f} ({energy:+.2f})':>18}" for weight, energy in mixed)
            + file
        )
    if n > MAX_ROWS:
        yield f"  ... and {n - MAX_ROWS} more (--json shows all)"
    if samples.y is not None:
        for name, (count, share) in _compute_class_accuracies(runtime.task, answers, samples.y).items():
            yield f"  {name:<{width}}  accuracy {share:.4f} of {count}"
        yield f"  accuracy {(answers.class_index == samples.y).mean():.4f}"
    median, worst = np.median(calls_ms), np.percentile(calls_ms, 99)
    yield f"  candidates: weight (energy); {median:.3f} ms a call (99 %: {worst:.3f} ms)"
    approximate = " (approximate)" if runtime.engine in APPROXIMATE else ""
    yield f"  engine {runtime.engine}{approximate}, mode {runtime.mode}, {', '.join(runtime.providers)}"
