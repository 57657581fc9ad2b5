"""The room fedge.membership."""
