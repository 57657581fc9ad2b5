"""The demonstration: a whole federation on this machine, and how it compares with simpler ways to learn."""
