"""The room coordinator.simulation.commands."""
