"""The room fedge.steps.training."""
