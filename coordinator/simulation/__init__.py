"""Whole federations in one process: `fedge simulate` runs a method, `fedge compare` several of them on equal terms."""
