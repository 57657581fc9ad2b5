"""What both sides of a federation share: the wire contract, tasks, models, configuration, the `fedge` command."""

__version__ = "0.1.0"
