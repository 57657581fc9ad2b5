"""An ONNX file from outside, run by ONNX Runtime alone."""

from __future__ import annotations

from pathlib import Path

from fedge.ort import onnxruntime


def session_of(graph: bytes, parts: Path) -> onnxruntime.InferenceSession:
    """A session on one thread. `parts`: the only folder whose files the graph may name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a graph that cannot be run is reported by its exception
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(parts))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
