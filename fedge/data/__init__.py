"""Samples before they are tensors: descriptions, files and checks, without torch.

`task` describes a task, and `problems` what is asked of its network; `npz`, `tables` and `images` read files; `scaling`
refuses values from which nothing can be learned; `preprocessing` turns samples into inputs, in the same way for
training and inference. Begin with `task`.
"""
