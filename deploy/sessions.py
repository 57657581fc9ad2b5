"""Sessions of ONNX Runtime: how they are set up, and on what they run."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.ort import onnxruntime, session_options

CPU: Final = "CPUExecutionProvider"
PREFERENCE: Final = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "XnnpackExecutionProvider")
"""What is tried before the CPU, where this build of ONNX Runtime has it. CUDA before TensorRT, which builds its engine
for minutes when a bundle is first loaded: ask for that by name."""


def chains(providers: Sequence[str] | None) -> list[tuple[str, ...]]:
    """Lists of execution providers to try one after the other; the last one is the CPU alone.

    Args:
        providers: by name, in order of preference; None: each of `PREFERENCE` that is available.

    Raises:
        ConfigError: this build of ONNX Runtime has no such provider.
    """
    available = onnxruntime.get_available_providers()
    if providers is None:
        return [*((name, CPU) for name in PREFERENCE if name in available), (CPU,)]
    unknown = [name for name in providers if name not in available]
    if unknown:
        raise ConfigError(f"no execution provider {unknown[0]}: this ONNX Runtime has {', '.join(available)}")
    asked = tuple(name for name in providers if name != CPU)
    return [(*asked, CPU), (CPU,)] if asked else [(CPU,)]


class Session:
    """A graph that is ready to run, in memory of its own: what becomes of its files no longer matters.

    ONNX Runtime before 1.24 maps the files instead, which must then not be changed in place.
    """

    def __init__(
        self,
        graph: bytes | Path,
        folder: Path,
        threads: int,
        providers: Sequence[str],
        numbers: Mapping[str, NDArray[Any]] | None = None,
        *,
        parts: Sequence[str] = (),
    ) -> None:
        """Load a graph whose parts lie in `folder`.

        Args:
            graph: serialised, or a file that holds it.
            folder: of the bundle.
            threads: for the nodes of the graph.
            providers: in order of preference.
            numbers: initializers of the graph that get other values.
            parts: names of the files in `folder` that the graph refers to.
        """
        options = session_options(folder, threads)
        self._held = {  # ONNX Runtime refers to this memory as long as the session lives
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in (numbers or {}).items()
        }
        for name, value in self._held.items():
            options.add_initializer(name, value)
        source = str(graph) if isinstance(graph, Path) else graph
        with contextlib.ExitStack() as opened:  # ONNX Runtime copies what it needs
            if parts and hasattr(options, "add_external_initializers_from_files_in_memory"):
                data = [opened.enter_context(_mapped(folder / name)) for name in parts]
                options.add_external_initializers_from_files_in_memory(list(parts), data, [len(d) for d in data])
            self._session = onnxruntime.InferenceSession(source, options, providers=list(providers))
        self.run = self._session.run

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers that it really has."""
        return tuple(self._session.get_providers())


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
