"""ONNX Runtime without telemetry. No other module imports onnxruntime.

Since 1.29 its Linux wheels record events: the machine, each session with the name and hash of its model, and times of
predictions. They write these to a database below the user's home, with a permanent device number, and send them to
Microsoft (https://github.com/microsoft/onnxruntime/pull/27379). This begins at import unless ORT_DISABLE_TELEMETRY is
already set; `onnxruntime.disable_telemetry_events` comes too late. Set ORT_DISABLE_TELEMETRY=0 to allow it.
"""

import os
from pathlib import Path
from typing import Final

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime  # noqa: TID251

__all__ = ["find_active_providers", "find_wheels", "make_session", "make_session_options", "onnxruntime"]

_OTHERS: Final = ("extensions", "genai")
"""Ends of the names of distributions that contain another package than `onnxruntime`."""


def find_wheels() -> tuple[str, ...]:
    """List the installed distributions of `onnxruntime`; if there are two, one overwrites the other's files."""
    folder = Path(onnxruntime.__file__).parents[1]
    found = [path.name.removesuffix(".dist-info").split("-") for path in sorted(folder.glob("onnxruntime*.dist-info"))]
    return tuple(f"{name.replace('_', '-')} {version}" for name, version in found if not name.endswith(_OTHERS))


def make_session_options(folder: Path, threads: int = 1) -> onnxruntime.SessionOptions:
    """Return options for a graph whose files are in `folder`; threads do not spin, to save the battery."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def make_session(graph: bytes, folder: Path) -> onnxruntime.InferenceSession:
    """Open a single-threaded CPU session for a graph whose files are in `folder`; errors are raised, not printed."""
    options = make_session_options(folder)
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def find_active_providers(session: onnxruntime.InferenceSession) -> tuple[str, ...]:
    """Return the providers that run a node of the graph; before ONNX Runtime 1.24, all providers of the session."""
    names = tuple(session.get_providers())
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return names
    used = {part.ep_name for part in session.get_provider_graph_assignment_info()}
    return tuple(name for name in names if name in used)
