"""ONNX Runtime, which tells nobody that it runs: the one place that imports it.

Since 1.29 its Linux wheels write what happens (the machine, each session with the name and hash of its model, times of
predictions) to a data base below the user's home, with a lasting number for the device, and send it to Microsoft
(https://github.com/microsoft/onnxruntime/pull/27379). It begins at the import, unless ORT_DISABLE_TELEMETRY is set by
then; `onnxruntime.disable_telemetry_events` comes too late. Whoever wants it sets ORT_DISABLE_TELEMETRY=0.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime  # noqa: TID251

__all__ = ["onnxruntime"]
