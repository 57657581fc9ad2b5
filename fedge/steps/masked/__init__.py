"""The room fedge.steps.masked."""
