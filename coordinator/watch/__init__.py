"""The room coordinator.watch."""
