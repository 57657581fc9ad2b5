"""Sends each round's figures to TensorBoard and MLflow through one function, `Track`, without delaying rounds."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final

from fedge.errors import ConfigError, raise_as
from fedge.system.loading import make_missing_package_error
from fedge.system.text import Heading

log = logging.getLogger("fedge.coordinator")

Track = Callable[[int, Mapping[str, float]], None]
"""A function that takes a round's number and its figures by name."""

EXPERIMENT: Final = "fedge"
QUIET: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers what it is used for
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


TensorBoard = Annotated[
    Path | None, Heading.TRACKING, "TensorBoard's files are written to this folder (fedge[tracking])."
]
MLflow = Annotated[
    str | None, Heading.TRACKING, "MLflow has its tracking server at http://HOST:PORT (fedge[tracking])."
]


@contextmanager
def open_tracking(tensorboard: Path | None, mlflow: str | None, name: str, run: str = "") -> Iterator[Track]:
    """Open the places where figures go: TensorBoard, MLflow, or nowhere.

    Args:
        tensorboard: the setting of this name; the run gets a folder of its name there.
        mlflow: the setting of this name.
        name: the run's name for people.
        run: the run's id, equal if a run continues an earlier one; empty for a new run.

    Raises:
        ConfigError: a package is missing, or MLflow's server cannot be reached.
    """
    with ExitStack() as stack:
        writers = []
        if tensorboard is not None:
            writers.append(stack.enter_context(_open_tensorboard(tensorboard / name)))
        if mlflow is not None:
            writers.append(stack.enter_context(_open_mlflow(mlflow, name, run or uuid.uuid4().hex)))
        thread = stack.enter_context(ThreadPoolExecutor(1, "fedge-tracking"))

        def write_figures(number: int, figures: Mapping[str, float]) -> None:
            for writer in writers:
                try:
                    writer(number, figures)
                except Exception as error:  # noqa: BLE001 - a server that is gone costs figures, never a round
                    log.warning("event=tracking_failed round=%d detail=%r", number, str(error)[:200])

        def track_figures(number: int, figures: Mapping[str, float]) -> None:
            if writers:
                thread.submit(write_figures, number, figures)

        yield track_figures


@contextmanager
def _open_tensorboard(folder: Path) -> Iterator[Track]:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise make_missing_package_error(error, "--tensorboard", "tracking") from error
    with SummaryWriter(str(folder)) as writer:

        def write_figures(number: int, figures: Mapping[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, number)
            writer.flush()

        yield write_figures


@contextmanager
def _open_mlflow(address: str, name: str, run: str) -> Iterator[Track]:
    os.environ.update(QUIET)
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
    except ModuleNotFoundError as error:
        raise make_missing_package_error(error, "--mlflow", "tracking") from error
    with raise_as(ConfigError, f"--mlflow {address}", on=MlflowException):
        client = MlflowClient(address)
        known = client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else client.create_experiment(EXPERIMENT)
        found = client.search_runs([experiment], f"tags.`fedge.run` = '{run}'", max_results=1)
        here = (found or [client.create_run(experiment, tags={"fedge.run": run}, run_name=name)])[0].info.run_id

    def write_figures(number: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(here, [Metric(figure, value, now, number) for figure, value in figures.items()])

    yield write_figures
    client.set_terminated(here)
