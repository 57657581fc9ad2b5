"""The demonstration: a whole federation on this machine, compared with simpler ways to learn."""
