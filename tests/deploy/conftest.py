"""Fixtures of tests that run without the other packages, too."""

from .faults import forced, free_disk, not_installed, python_at

__all__ = ["forced", "free_disk", "not_installed", "python_at"]
