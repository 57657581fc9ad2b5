"""The room fedge.steps.descriptions."""
