"""Predictions with numpy and ONNX Runtime.

`runtime` loads a bundle and predicts, `engines` are the ways to run its graphs, `sessions` opens them. Begin with
`runtime`.
"""
