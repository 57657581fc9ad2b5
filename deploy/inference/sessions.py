"""ONNX Runtime sessions: their options and execution providers."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.runtime import find_active_providers, find_wheels, make_session_options, onnxruntime
from fedge.errors import ConfigError
from fedge.system.files import get_cache_folder

log = logging.getLogger("fedge.deploy")

CPU: Final = "CPUExecutionProvider"
PREFERENCE: Final = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "XnnpackExecutionProvider")
"""Providers that are tried before the CPU, if this build of ONNX Runtime has them. CUDA comes before TensorRT, which
builds its engine for minutes when a bundle is first loaded; choose TensorRT by name."""


NAMES: Final = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
"""Short names of providers; all others are called by ONNX Runtime's names."""

Provider = str | tuple[str, dict[str, str]]
"""A provider by ONNX Runtime's name, perhaps with options."""


def list_provider_chains(
    provider: str = "auto", options: Mapping[str, str] | None = None
) -> list[tuple[Provider, ...]]:
    """Return lists of execution providers to try in turn; the first of a list must run some of the graph.

    Args:
        provider: "auto" for each available provider of `PREFERENCE`, then the CPU; or a provider by ONNX Runtime's name
            or one of `NAMES`, which gives one list. The CPU runs what that provider cannot; after TensorRT, CUDA comes
            first.
        options: ONNX Runtime's options for the named provider.

    Raises:
        ConfigError: this ONNX Runtime has no such provider, or there are options without a provider.
    """
    available, installed = onnxruntime.get_available_providers(), find_wheels()
    if len(installed) > 1:
        log.warning("event=two_wheels installed=%r detail='keep one: pip uninstall both, install one'", installed)
    if provider == "auto":
        if options:
            raise ConfigError("provider options are for a provider that is named: give --provider, too")
        return [*((name, CPU) for name in PREFERENCE if name in available), (CPU,)]
    name = NAMES.get(provider, provider)
    if name not in available:
        raise ConfigError(
            f"no execution provider {provider} here: {' and '.join(installed) or 'this onnxruntime'} has "
            f"{', '.join(available)}; choose one of them, or install the wheel that has it in place of this one "
            "(docs/devices.md)"
        )
    if name == CPU:
        return [(CPU,)]
    given = dict(options or {})
    if name != NAMES["tensorrt"]:
        return [((name, given), CPU)]
    beside = [NAMES["cuda"]] if NAMES["cuda"] in available else []
    return [((name, _make_cache_options(given)), *beside, CPU)]


def _make_cache_options(options: dict[str, str]) -> dict[str, str]:
    """Return options by which TensorRT caches its engines, built for minutes, in the user's cache folder."""
    given = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(get_cache_folder("tensorrt"))} | options
    try:
        Path(given["trt_engine_cache_path"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("event=no_engine_cache reason=%r detail='TensorRT builds its engine at each start'", str(error))
        given["trt_engine_cache_enable"] = "0"
    return given


class Session:
    """A graph ready to run, with its weights copied into memory, so that changes to its files no longer matter.

    ONNX Runtime before 1.24 maps the files instead, so they must not be changed in place.
    """

    def __init__(
        self,
        graph: bytes | Path,
        folder: Path,
        threads: int,
        providers: Sequence[Provider],
        numbers: Mapping[str, NDArray[Any]] | None = None,
        *,
        parts: Sequence[str] = (),
    ) -> None:
        """Load a graph whose parts are in `folder`.

        Args:
            graph: the serialised graph, or the file that holds it.
            folder: the bundle's folder.
            threads: number of threads for the nodes of the graph.
            providers: execution providers, in order of preference.
            numbers: tensors that override initializers of the graph, by name.
            parts: names of the files in `folder` that the graph refers to.
        """
        options = make_session_options(folder, threads)
        self._held = {  # ONNX Runtime uses this memory as long as the session lives
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in (numbers or {}).items()
        }
        for name, value in self._held.items():
            options.add_initializer(name, value)
        source = str(graph) if isinstance(graph, Path) else graph
        with contextlib.ExitStack() as opened:  # ONNX Runtime copies what it needs
            if parts and hasattr(options, "add_external_initializers_from_files_in_memory"):
                data = [opened.enter_context(_map_file(folder / name)) for name in parts]
                options.add_external_initializers_from_files_in_memory(list(parts), data, [len(d) for d in data])
            self._session = onnxruntime.InferenceSession(source, options, providers=list(providers))
        self.run = self._session.run
        self.providers = find_active_providers(self._session)
        """The execution providers that run a part of the graph, in order of preference."""


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
