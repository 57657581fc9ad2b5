"""The room fedge.models."""
