"""The room coordinator.fleet."""
