"""The room coordinator.fleet.simulated."""
