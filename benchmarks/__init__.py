"""Measurements: commands, no part of the installed packages."""
