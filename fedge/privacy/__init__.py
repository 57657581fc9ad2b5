"""The room fedge.privacy."""
