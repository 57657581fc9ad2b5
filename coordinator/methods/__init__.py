"""The room coordinator.methods."""
