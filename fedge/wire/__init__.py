"""The room fedge.wire."""
