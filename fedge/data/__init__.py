"""The room fedge.data."""
