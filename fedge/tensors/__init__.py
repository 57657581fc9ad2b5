"""The room fedge.tensors."""
