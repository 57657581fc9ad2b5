"""The room fedge.bundle."""
