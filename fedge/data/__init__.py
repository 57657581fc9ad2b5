"""Samples before they are tensors: descriptions, files and checks, without torch.

`task` describes a task; `npz`, `tables` and `images` read files; `labels` and `scaling` refuse values from which
nothing can be learned; `preprocessing` turns samples into inputs, in the same way for training and inference. Begin
with `task`.
"""
