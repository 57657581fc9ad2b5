"""The room fedge.identity."""
