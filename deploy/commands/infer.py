"""`fedge infer`: predict with a bundle from the command line."""

from __future__ import annotations

import colorsys
import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import click
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from deploy.inference.engines import (
    APPROXIMATE,
    BudgetMbOption,
    BudgetMsOption,
    CoverageOption,
    ModeOption,
    ProviderOption,
    ProviderOptions,
    RuntimeOption,
    ThreadsOption,
    make_engine_options,
)
from deploy.inference.prediction import Prediction, join_predictions
from deploy.inference.runtime import Runtime, load_runtime
from fedge.bundle.conformal import count_needed
from fedge.data import folders, images, npz, tables
from fedge.data.preprocessing import load_image, preprocess
from fedge.data.problems.results import Column
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, UpdateRejected, raise_as
from fedge.settings import resolve, settings_options
from fedge.system.files import make_folder, write_atomically
from fedge.system.help import Command, json_lines_option, option
from fedge.system.loading import allow_code
from fedge.system.text import Heading, escape_controls

MAX_ROWS = 20
"""Most samples of an input that the table shows; --json has all of them."""
GOLDEN_ANGLE: Final = 0.381966
"""Part of a circle by which the colours of neighbouring class numbers differ."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one input: raw (n, ...), converted targets (n, ...) if known, and paths if they are images."""

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
    budget_ms: BudgetMsOption = None
    budget_mb: BudgetMbOption = None
    coverage: CoverageOption = None
    out: Annotated[
        Path | None,
        Heading.OUTPUT,
        "Masks go into this folder, and each is a PNG with a palette whose pixels are class numbers.",
    ] = None


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path(path_type=Path))
@settings_options(InferSettings, "infer")
@option(
    "--decode",
    heading=Heading.PREDICTION,
    metavar="PACKAGE.MODULE:CLASS",
    help="The outputs of a problem of your own are decoded and scored by this class, which is named here alone.",
)
@json_lines_option("input")
def infer(
    bundle: Path, inputs: tuple[Path, ...], config: Path | None, decode: str | None, as_json: bool, **flags: object
) -> None:
    """Predict with an installed bundle; needs no torch.

    INPUT is a PNG or JPEG picture, a folder or .zip of pictures, an .npy array (one sample or a batch), an .npz file
    with x, or a .csv or .parquet of a task with a schema. The accuracy is shown if y in the .npz, class folders or the
    schema's column tell the classes; of other problems their score.

    Each sample is shown with its class and probability, its labels, its values with spread and unit, the shares of the
    classes in its mask, or whether it is unusual, and with the weight of each model in the mixture. In brackets is its
    calibrated energy: the lower, the surer the model.

    Examples:
      fedge infer bundles/3 photo.png
      fedge infer bundles/3 photos --json
      fedge infer bundles/3 sample.npy --repeat 1000
      fedge infer bundles/3 test.npz --provider tensorrt --provider-options trt_fp16_enable=1
      fedge infer bundles/3 photos --out masks
      fedge infer bundles/3 test.npz --coverage 0.9
      fedge infer bundles/3 test.npz --budget-ms 20 --budget-mb 50

    Exit codes: 0 done, 2 no bundle there, an input that cannot be read or a provider that does not run here, 5 the
    bundle is not what its manifest says, or gives no numbers.
    """
    settings = resolve(InferSettings, "infer", config, flags)
    how = make_engine_options(
        settings.runtime,
        settings.mode,
        settings.threads,
        settings.provider,
        settings.provider_options,
        coverage=settings.coverage,
        budget_ms=settings.budget_ms,
        budget_mb=settings.budget_mb,
    )
    runtime = load_runtime(bundle, how)
    allow_code([decode] if decode else [])
    for path in inputs:
        samples = _read(runtime, path)
        with raise_as(ConfigError, str(path), on=ConfigError):
            preprocess(runtime.task, samples.x)  # all at once, since an error in a batch would count samples from 0
        answers, calls_ms = _predict(runtime, samples.x, settings.batch, settings.repeat)
        _require_answers(runtime, bundle, answers)
        extra = _decode_answers(decode, answers) if decode else {}
        if settings.out is not None:
            extra |= {"mask_files": _write_masks(settings.out, path, answers, samples)}
        if as_json:
            click.echo(msgspec.json.encode(_make_record(runtime, path, answers, calls_ms, samples, extra)).decode())
        else:
            click.echo("\n".join(_render_table(runtime, path, answers, calls_ms, samples, extra)))


def _read(runtime: Runtime, path: Path) -> Samples:
    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".zip":
        return _read_pictures(runtime.task, path)
    if suffix in images.SUFFIXES:
        return Samples(load_image(runtime.task, path)[np.newaxis])
    if suffix in tables.SUFFIXES:
        rows = tables.read_table(tables.get_schema(runtime.task), path, labelled=False)
        return _make_samples(runtime.task, rows["x"], rows.get("y"), path)
    if suffix not in {".npy", ".npz"}:
        raise ConfigError(f"cannot read {path}: use .png, .jpg, a folder or .zip of them, .npy, .npz, .csv or .parquet")
    if suffix == ".npy":
        return Samples(runtime.add_batch_axis(npz.load_array(path)))
    loaded = npz.load_arrays(path, ("x", "y"))
    if "x" not in loaded:
        raise ConfigError(f"{path} has no array x, the samples")
    return _make_samples(runtime.task, runtime.add_batch_axis(loaded["x"]), loaded.get("y"), path)


def _make_samples(task: TaskSpec, x: NDArray[Any], y: NDArray[Any] | None, path: Path) -> Samples:
    """Make samples with their targets, which are in their own units."""
    return Samples(x, None if y is None else task.problem.convert_targets(y, len(x), task.input_shape, f"{path}: y"))


def _read_pictures(task: TaskSpec, source: Path) -> Samples:
    """Load the pictures in a folder or .zip, with labels if the pictures lie in class folders."""
    names = folders.list_samples(task.problem, source, labelled=False)
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
    names = [runtime.manifest.candidates[k].name for k in runtime.used if not usable[:, k].any()]
    blamed = f"candidate {', '.join(names)}" if names else "the gate, or the prior of a class"
    raise UpdateRejected(
        f"{bundle} has no answer: {blamed} gives numbers that are not finite; make the bundle anew, or install an "
        "earlier release"
    )


def _decode_answers(path: str, answers: Prediction) -> dict[str, Any]:
    """Return what `decode` of the user's class makes of the answers, as JSON has it.

    Raises:
        ConfigError: there is no such class, it fails, or makes something that JSON does not have.
    """
    found = answers.decode(path)
    with raise_as(ConfigError, f"{path}.decode returns what JSON does not have", on=(TypeError, ValueError)):
        return {"decoded": msgspec.to_builtins(found, enc_hook=_list_numbers)}


def _list_numbers(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} is not for JSON")


def _write_masks(folder: Path, path: Path, answers: Prediction, samples: Samples) -> list[str]:
    """Write the mask of each sample as a PNG with a palette, whose pixels are class numbers; return the paths.

    Raises:
        ConfigError: the answers are no pictures.
        StoreError: a file cannot be written.
    """
    masks = answers.problem.draw_masks(answers.answers)
    if masks is None:
        raise ConfigError(f"--out is for masks, and this bundle's problem is {answers.problem.NAME}: leave it out")
    names = samples.files or tuple(f"{path.stem}-{i}" if len(masks) > 1 else path.stem for i in range(len(masks)))
    files = [folder / f"{name.replace('/', '-')}.png" for name in names]
    make_folder(folder)
    for file, mask in zip(files, masks, strict=True):
        write_atomically(file, encode_mask(mask))
    return [escape_controls(str(file)) for file in files]


def encode_mask(mask: NDArray[np.uint8]) -> bytes:
    """Return a mask as a PNG with a palette: 0 is black, and neighbouring class numbers have colours that differ."""
    from PIL import Image

    hues = [colorsys.hsv_to_rgb(k * GOLDEN_ANGLE % 1, 0.8, 1) for k in range(255)]
    picture = Image.frombytes("P", (mask.shape[1], mask.shape[0]), mask.tobytes())
    picture.putpalette([0, 0, 0, *(int(255 * part) for hue in hues for part in hue)])
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _make_record(
    runtime: Runtime,
    path: Path,
    answers: Prediction,
    calls_ms: list[float],
    samples: Samples,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    names = [candidate.name for candidate in runtime.manifest.candidates]
    problem = answers.problem
    sureness = {"probabilities": answers.probabilities.tolist()} if problem.SHARED else {}
    return {
        "input": escape_controls(str(path)),
        "bundle": runtime.digest,
        "engine": runtime.engine,
        "mode": runtime.mode,
        **_make_budget(runtime),
        "providers": list(runtime.providers),
        "n": len(answers),
        **problem.make_figures(answers.answers, samples.y),
        "files": [escape_controls(file) for file in samples.files],
        **problem.make_record(answers.answers, answers.usual),
        **_make_sets(answers, samples.y),
        **extra,
        "weights": dict(zip(names, answers.weights.mean(axis=0).tolist(), strict=True)),
        "energies": dict(zip(names, _compute_mean_energies(answers), strict=True)),
        "by_sample": {
            **sureness,
            "weights": answers.weights.tolist(),
            "energies": answers.energies.tolist(),
        },
        "latency_ms": float(np.median(calls_ms)),
        "latency_p99_ms": float(np.percentile(calls_ms, 99)),
        "imported_torch": "torch" in sys.modules,
    }


def _make_budget(runtime: Runtime) -> dict[str, Any]:
    """Return what was picked for a budget as JSON has it; nothing without a budget."""
    if runtime.plan is None:
        return {}
    plan, names = runtime.plan, [candidate.name for candidate in runtime.manifest.candidates]
    used, in_memory = ([names[k] for k in each] for each in (plan.used, plan.in_memory))
    return {"budget": {"used": used, "in_memory": in_memory, "ms": plan.ms, "mb": plan.mb, "fits": plan.fits}}


def _make_sets(answers: Prediction, y: NDArray[Any] | None) -> dict[str, Any]:
    """Return the prediction sets as JSON has them, and how they were made; nothing if none were asked for."""
    how, problem = answers.coverage, answers.problem
    if how is None:
        return {}
    sets = {name: each if isinstance(each, tuple) else each.tolist() for name, each in answers.sets.items()}
    found = None if y is None else float(problem.find_covered(answers.answers, y, how.threshold).mean())
    sizes = problem.measure_sets(answers.answers, how.threshold)
    return sets | {"coverage": {"wanted": how.wanted, "enough": how.enough, "n": how.n, "found": found, **sizes}}


def _render_sets(answers: Prediction, y: NDArray[Any] | None) -> Iterator[str]:
    """Yield lines with the coverage that was wanted, and what was found."""
    how = answers.coverage
    if how is None:
        return
    if not how.enough:
        yield (
            f"  coverage {how.wanted:g} needs {count_needed(how.wanted)} validation samples, and the bundle has "
            f"{how.n}: every answer is in the set"
        )
        return
    sizes = ", ".join(
        f"{name.replace('_', ' ')} {np.array2string(np.asarray(size), precision=3)}"
        for name, size in answers.problem.measure_sets(answers.answers, how.threshold).items()
    )
    found = "" if y is None else f", found {answers.problem.find_covered(answers.answers, y, how.threshold).mean():.4f}"
    yield f"  coverage wanted {how.wanted:g}{found}; {sizes}"


def _compute_mean_energies(answers: Prediction) -> list[float | None]:
    """Return each candidate's mean energy over the samples on which it was usable, or None."""
    usable = np.isfinite(answers.energies)
    total = np.where(usable, answers.energies, 0).sum(axis=0)
    return [float(t / n) if n else None for t, n in zip(total, usable.sum(axis=0), strict=True)]


def _render_table(
    runtime: Runtime,
    path: Path,
    answers: Prediction,
    calls_ms: list[float],
    samples: Samples,
    extra: Mapping[str, Any],
) -> Iterator[str]:
    """Yield a line per sample (class, probability, weights, energies, file), then the accuracy; or the like."""
    names = [candidate.name for candidate in runtime.manifest.candidates]
    n, shown = len(answers), answers.select_rows(0, MAX_ROWS)
    columns = shown.problem.make_columns(shown.answers, shown.usual)
    if shown.coverage is not None:
        columns += shown.problem.make_set_columns(shown.answers, shown.coverage.threshold)
    if isinstance(decoded := extra.get("decoded"), list) and len(decoded) == n:
        columns = (Column("decoded", tuple(msgspec.json.encode(one).decode() for one in decoded[:MAX_ROWS])),)
    head, *rows = zip(*(column.format_cells() for column in columns), strict=True)
    yield f"{path}: {n} sample{'s' if n > 1 else ''}"
    yield f"  {'  '.join(head)}  " + "  ".join(f"{name[:18]:>18}" for name in names)
    for i, row in enumerate(rows):
        mixed = zip(answers.weights[i], answers.energies[i], strict=True)
        file = f"  {escape_controls(samples.files[i])}" if samples.files else ""
        yield (
            f"  {'  '.join(row)}  "
            + "  ".join(f"{f'{weight:.3f} ({energy:+.2f})':>18}" for weight, energy in mixed)
            + file
        )
    if n > MAX_ROWS:
        yield f"  ... and {n - MAX_ROWS} more (--json shows all)"
    if files := extra.get("mask_files"):
        yield f"  {len(files)} mask{'s' if len(files) > 1 else ''} in {Path(files[0]).parent}"
    if samples.y is not None:
        figures = answers.problem.make_figures(answers.answers, samples.y)
        yield from _render_figures(answers.problem.SCORE, figures, len(head[0]))
    yield from _render_sets(answers, samples.y)
    median, worst = np.median(calls_ms), np.percentile(calls_ms, 99)
    yield f"  candidates: weight (energy); {median:.3f} ms a call (99 %: {worst:.3f} ms)"
    approximate = " (approximate)" if runtime.engine in APPROXIMATE else ""
    yield f"  engine {runtime.engine}{approximate}, mode {runtime.mode}, {', '.join(runtime.providers)}"
    if runtime.plan is not None:
        yield f"  budget: {runtime.plan.describe(runtime.manifest)}"


def _render_figures(score: str, figures: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield lines with the accuracy of each class, the score, and further figures, as far as there are any."""
    for name, own in figures.get("by_class", {}).items():
        yield f"  {name:<{width}}  accuracy {own['accuracy']:.4f} of {own['n']}"
    for name, value in {score: figures[score], **figures.get("metrics", {})}.items():
        if value is not None:
            yield f"  {name} {value:.4f}"
