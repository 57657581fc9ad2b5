"""The room fedge.commands."""
