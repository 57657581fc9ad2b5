"""The room fedge.system."""
