"""The room fedge.steps.mixture."""
