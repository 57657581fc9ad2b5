"""Inference on the device, with numpy and ONNX Runtime only: `deploy.load(folder).predict(sample)`."""

from deploy.inference.runtime import Prediction, Runtime, load

__all__ = ["Prediction", "Runtime", "load"]
