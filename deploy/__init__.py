"""Inference on the device, with numpy and ONNX Runtime only: `deploy.load(folder).predict(sample)`."""

from deploy.inference.prediction import Prediction
from deploy.inference.runtime import Runtime, load

__all__ = ["Prediction", "Runtime", "load"]
