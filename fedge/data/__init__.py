"""Samples before they are tensors: descriptions, files and checks, without torch.

`task` describes what is learned; `npz`, `tables` and `images` read files; `labels` and `scaling` refuse what nobody can
learn from; `preprocessing` turns samples into inputs, alike in training and inference. Begin with `task`.
"""
