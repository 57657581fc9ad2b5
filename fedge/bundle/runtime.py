"""ONNX Runtime without telemetry: the only place that imports it.

Since 1.29 its Linux wheels write events (the machine, each session with the name and hash of its model, times of
predictions) to a database below the user's home, with a permanent device number, and send them to Microsoft
(https://github.com/microsoft/onnxruntime/pull/27379). This begins at import unless ORT_DISABLE_TELEMETRY is already
set; `onnxruntime.disable_telemetry_events` comes too late. Set ORT_DISABLE_TELEMETRY=0 to allow it.
"""

import os
from pathlib import Path
from typing import Final

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime  # noqa: TID251

__all__ = ["at_work", "onnxruntime", "session_of", "session_options", "wheels"]

_OTHERS: Final = ("extensions", "genai")
"""What distributions are called that bring another package."""


def wheels() -> tuple[str, ...]:
    """Distributions that provide `onnxruntime`, with versions; if there are two, one overwrites the other's files."""
    folder = Path(onnxruntime.__file__).parents[1]
    found = [path.name.removesuffix(".dist-info").split("-") for path in sorted(folder.glob("onnxruntime*.dist-info"))]
    return tuple(f"{name.replace('_', '-')} {version}" for name, version in found if not name.endswith(_OTHERS))


def session_options(folder: Path, threads: int = 1) -> onnxruntime.SessionOptions:
    """Options for a graph whose files all lie in `folder`; no spinning threads (battery, shared cores)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def session_of(graph: bytes, folder: Path) -> onnxruntime.InferenceSession:
    """A single-threaded CPU session; `folder` as in `session_options`. What fails is raised, and printed nowhere."""
    options = session_options(folder)
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def at_work(session: onnxruntime.InferenceSession) -> tuple[str, ...]:
    """Providers that run a node; before ONNX Runtime 1.24, which cannot tell, all of the session's."""
    names = tuple(session.get_providers())
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return names
    used = {part.ep_name for part in session.get_provider_graph_assignment_info()}
    return tuple(name for name in names if name in used)
