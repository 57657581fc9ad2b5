"""The room coordinator.store."""
