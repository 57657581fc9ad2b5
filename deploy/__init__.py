"""Inference on the device: numpy and ONNX Runtime, nothing else. `deploy.load(folder).predict(sample)`."""

from deploy.runtime import Prediction, Runtime, load

__all__ = ["Prediction", "Runtime", "load"]
