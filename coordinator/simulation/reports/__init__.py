"""The room coordinator.simulation.reports."""
