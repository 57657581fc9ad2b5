"""ONNX Runtime, which tells nobody that it runs: the one place that imports it.

Since 1.29 its Linux wheels write what happens (the machine, each session with the name and hash of its model, times of
predictions) to a data base below the user's home, with a lasting number for the device, and send it to Microsoft
(https://github.com/microsoft/onnxruntime/pull/27379). It begins at the import, unless ORT_DISABLE_TELEMETRY is set by
then; `onnxruntime.disable_telemetry_events` comes too late. Whoever wants it sets ORT_DISABLE_TELEMETRY=0.
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
    """Distributions that lie where `onnxruntime` does, with versions: of two, one's files lie over the other's."""
    folder = Path(onnxruntime.__file__).parents[1]
    found = [path.name.removesuffix(".dist-info").split("-") for path in sorted(folder.glob("onnxruntime*.dist-info"))]
    return tuple(f"{name.replace('_', '-')} {version}" for name, version in found if not name.endswith(_OTHERS))


def session_options(folder: Path, threads: int = 1) -> onnxruntime.SessionOptions:
    """For a graph whose files lie in `folder`, and nowhere else; no spinning threads (battery, shared cores)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def session_of(graph: bytes, folder: Path) -> onnxruntime.InferenceSession:
    """A session on one thread of the processor; `folder` as in `session_options`."""
    return onnxruntime.InferenceSession(graph, session_options(folder), providers=["CPUExecutionProvider"])


def at_work(session: onnxruntime.InferenceSession) -> tuple[str, ...]:
    """Providers that were given a node; before ONNX Runtime 1.24, which does not tell, those that the session has."""
    names = tuple(session.get_providers())
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return names
    used = {part.ep_name for part in session.get_provider_graph_assignment_info()}
    return tuple(name for name in names if name in used)
