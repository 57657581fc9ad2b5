"""Ray without usage reports, listening only on this machine; no other module imports Ray.

Usage reports are switched off before the import, unless RAY_USAGE_STATS_ENABLED says otherwise. A cluster started here
binds to 127.0.0.1, without a dashboard. Anybody who reaches a Ray cluster can run code on it, so a cluster across
machines needs a network of its own (docs/simulation.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fedge.errors import ConfigError, FedgeError
from fedge.system.hardware import Processor
from fedge.system.loading import is_registered, make_missing_package_error

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # suppresses an irrelevant warning
os.environ.setdefault("RAY_worker_niceness", "0")  # with the default, 15, Ray's workers starve on a busy machine
try:
    import ray  # noqa: TID251
except ModuleNotFoundError as error:
    raise make_missing_package_error(error, "--engine ray", "ray") from error

__all__ = ["THREADS", "connect", "plan_actors", "ray", "require_importable"]

THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def connect(address: str | None) -> Iterator[int]:
    """Connect, within this context, to the cluster at `address` (`auto`: this machine's), or to a new one if None.

    Yields:
        The cluster's number of processors.

    Raises:
        ConfigError: there is no cluster at the address.
        FedgeError: Ray cannot be started.
    """
    if ray.is_initialized():  # in a notebook, or inside Ray's own worker
        yield _count_processors()
        return
    if address is None:
        _listen_locally()
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": THREADS},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise FedgeError(f"Ray cannot be started here: {error}") from error
        raise ConfigError(
            f"there is no Ray cluster at {address}: {error}; `ray status` says which there are"
        ) from error
    try:
        yield _count_processors()
    finally:
        ray.shutdown()


def _listen_locally() -> None:
    """Make Ray listen on 127.0.0.1, as it does on systems where it makes no clusters; Ray has no option for this."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for the processes that it starts
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # noqa: SLF001 - and for this one


def require_importable(*paths: str | None) -> None:
    """Refuse objects that exist only in this process.

    Raises:
        ConfigError: a task, a network, a method or a function exists only in this process.
    """
    if any(map(is_registered, paths)):
        raise ConfigError(
            "a task, network, method or function of this Python process cannot go to Ray: write it into a module"
        )


def plan_actors(n_processors: int, train_on: Processor) -> tuple[int, dict[str, Any]]:
    """Return how many actors share the cluster, and what each asks for: a processor, with CUDA a part of a GPU.

    Raises:
        ConfigError: `train_on` is CUDA, and the cluster has no GPU.
    """
    if train_on is Processor.CPU:
        return n_processors, {"num_cpus": 1}
    n_gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if n_gpus == 0:
        raise ConfigError(
            "train_on is cuda, and the Ray cluster has no GPU: train on the cpu, or add a machine with one"
        )
    share = max(1, n_processors // n_gpus)  # actors on each GPU; Ray counts ten-thousandths
    return share * n_gpus, {"num_cpus": min(1.0, n_processors / n_gpus), "num_gpus": 10_000 // share / 10_000}


def _count_processors() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
